"""List the kernels of the prebuilt sets: every one that a plan of the known families launches in a form."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import zerowaste_vae
from zerowaste_vae import demo_vae_path
from zerowaste_vae.engine.checkpoints import read_checkpoint
from zerowaste_vae.engine.extras.tuning.candidates import candidates
from zerowaste_vae.engine.extras.tuning.layers import layers
from zerowaste_vae.engine.families import ARCHITECTURES, detect
from zerowaste_vae.engine.kernels.cards import FORMS
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.prebuilt.keys import Key, key
from zerowaste_vae.engine.kernels.prebuilt.library import MADE_OF
from zerowaste_vae.engine.kernels.targets import Target, prebuilt
from zerowaste_vae.engine.network.architecture import Architecture
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.planning.fusable import no_8_bit
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.planning.launches import keys_of, launches, needs, uniform, use_id
from zerowaste_vae.engine.precision.modes import PRECISIONS
from zerowaste_vae.engine.precision.policy import EXACT

#: Toggles that change what is launched. The Winograd form has no kernel in a set, and what runs beside it is among the
#: direct form's.
TOGGLES = Options(winograd=False), Options(winograd=False, composed_upsample=False)
#: Of schedules that a tuning tries beside the tables': how many ship, for layers with so much of the work of a model in
#: the type that it was made for.
TRIED, SHARE = 2, 0.04
TYPES = (torch.float16, torch.bfloat16)
TESTS = Path(__file__).parents[1] / "tests" / "engine"
#: Modules of GPU tests that launch kernels themselves -> these tests (none: all).
DIRECT = {
    "tests.engine.kernels.test_not_finite": (),
    "tests.engine.families.test_ltx_diffusion_gpu": ("test_neighbourhood", "test_products", "test_narrow_products"),
    "tests.engine.families.test_mage_gpu": ("test_kernels_agree_with_their_references", "test_pixels"),
}  # fmt: skip
Each = Callable[[Callable[[Any], Any], list[Any]], Iterable[Any]]


class Use(NamedTuple):
    """One way to run a half of a model. kind: of 8-bit operands; fast: sums in fp16."""

    family: str
    half: str
    dtype: torch.dtype
    kind: str | None
    fast: bool
    options: Options

    def __str__(self) -> str:
        form = self.kind or ("fp16 sums" if self.fast else "16 bit")
        toggled = " uncomposed" * (not self.options.composed_upsample)
        return f"{self.family} {self.half} {str(self.dtype).removeprefix('torch.')} {form}{toggled}"

    @property
    def policies(self) -> bool:
        """Return policies in which each convolution has a type of its own."""
        architecture, config = models()[self.family]
        return not architecture.program(self.half, config).scales

    def ids(self) -> list[str]:
        """Return the names of the use, and of the same without attention's kernels, which it then does not launch."""
        known = functools.partial(use_id, *models()[self.family], self.half, self.dtype)
        options = self.options, self.options.switched(off=["flash_attention"])
        return [known(one, self.kind, self.fast) for one in options]

    def launches(self, here: Target) -> tuple[frozenset[Key], frozenset[Key]]:
        """Return what it launches with the tables' schedules, and with those or any that a tuning may choose."""
        architecture, config = models()[self.family]
        program = architecture.program(self.half, config)
        policy = uniform(program, None if program.scales else self.kind, self.fast)
        known = functools.partial(launches, architecture, config, self.half, self.dtype, self.options, policy,
                                  here=here, kind=self.kind)  # fmt: skip
        found = usual = known()
        usual_only = self.options != TOGGLES[0] or self.dtype != PRECISIONS[architecture.native]
        if usual_only or program.scales:
            return usual, found
        walk = FusedWalk(architecture, config, self.dtype, self.options)
        if self.half not in walk.halves:
            return usual, found
        walk.use(self.half, policy)
        tried = {layer.kind: candidates(here, layer.kind)[1 : TRIED + 1] for layer in layers(walk, here)
                 if layer.share >= SHARE}  # fmt: skip
        for i in range(TRIED):
            found |= known(schedules={kind: some[i] for kind, some in tried.items() if len(some) > i})
        return usual, found


@functools.cache
def models() -> dict[str, tuple[Architecture, Any]]:
    """Name -> architecture and sizes, of the demo and of every family's published VAE."""
    checkpoint = read_checkpoint(demo_vae_path())
    architecture = detect(checkpoint.tensors)
    groups = int(checkpoint.metadata["norm_num_groups"])
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    published = {one.name: (one, one.published.config) for one in ARCHITECTURES if one.published is not None}
    return {"demo": (architecture, architecture.config_of(shapes, checkpoint.metadata, groups)), **published}


def uses(form: str, families: frozenset[str] | None = None) -> Iterator[Use]:
    """Every way in which a form runs the models; families: of these names only."""
    here = card(form)
    for (name, (architecture, config)), half in itertools.product(models().items(), ("decoder", "encoder")):
        program = None if families and name not in families else architecture.program(half, config)
        if program is None:
            continue
        for dtype, options in itertools.product(TYPES, TOGGLES[:1] if program.scales else TOGGLES):
            narrow = program.scales or no_8_bit([program], dtype) is None
            kinds = (*(("fp8",) if here.fp8 else ()), "int8") if narrow else ()
            fast = not program.scales and here.half_accumulate and dtype == torch.float16
            for kind, sums in [(None, False), *([(None, True)] if fast else []), *((k, False) for k in kinds)]:
                yield Use(name, half, dtype, kind, sums, options)


def walked(
    name: str, families: frozenset[str] | None = None, each: Each = map
) -> dict[Use, tuple[frozenset[Key], frozenset[Key]]]:
    """Return what each use of a form launches (`Use.launches`), whichever set that is in. each: as `map`, over several
    processes."""
    walk([name], families, each)
    return _walked[name, families]


def walk(
    names: Iterable[str], families: frozenset[str] | None = None, each: Each = map, cache: Path | None = None
) -> None:
    """Walk the uses of several forms, and of those that they share kernels with, side by side. Arguments as for
    `walked`, which remembers them. cache: folder of what the same code walked before, which is added to."""
    forms = dict.fromkeys(one for name in names for one in MADE_OF[name] if (one, families) not in _walked)
    ways = [(way, form) for form in forms for way in uses(form, families)]
    _walked.update({(form, families): {} for form in forms})
    for (way, form), found in zip(ways, each(_launches, [(*one, cache) for one in ways]), strict=True):
        _walked[form, families][way] = found


#: What a build asks for again: the walks of forms that others share.
_walked: dict[tuple[str, frozenset[str] | None], dict[Use, tuple[frozenset[Key], frozenset[Key]]]] = {}


def wanted(name: str, families: frozenset[str] | None = None, each: Each = map) -> dict[Key, frozenset[str]]:
    """Return the kernels of a set and the families that use each. Arguments as for `walked`."""
    shared = set().union(*(wanted(one, families, each) for one in MADE_OF[name][1:]))
    found: dict[Key, set[str]] = defaultdict(set)
    for way, (_, keys) in walked(name, families, each).items():
        for one in keys:
            found[one].add(way.family)
    own = {one: frozenset(users) for one, users in found.items() if one not in shared}
    return own | {first(): frozenset()}


def covered(
    name: str, there: Container[Key], families: frozenset[str] | None = None, each: Each = map
) -> dict[str, list[str]]:
    """Return the uses of which a form has all kernels, by their ids; those in 8 bit may leave any convolution in 16.

    Each comes with the digests of those that it launches with the tables' schedules, or none for toggles that few
    people turn: those compile one by one when they first run, and the index stays small.
    """
    walks = walked(name, families, each)
    whole = {way for way, (keys, _) in walks.items() if all(one in there for one in keys)}
    whole = {way for way in whole if way.kind is None or way._replace(kind=None) in whole or not way.policies}
    found: dict[str, list[str]] = {}
    for way in whole:
        usual, without_flash = way.ids()
        digests = sorted(key.digest for key in walks[way][0]) if way.options == TOGGLES[0] else []
        found |= {usual: digests, without_flash: []}
    return found


def of_tests(name: str, each: Each = map) -> tuple[dict[str, frozenset[Key]], set[Key]]:
    """Return what the GPU tests launch in a form: the kernels of their models by use (`use_id`), and others."""
    sys.path[:0] = [str(TESTS), str(TESTS / "kernels")]
    import gpu_models
    from warm_kernels import CELLS

    more = {("minimaxh3", "bf16"), ("seedvr2-8-bit", "bf16"), ("hunyuanvideo1.5-128", "fp16")}
    cells = sorted({(what, precision) for what, precision, _ in CELLS} | more)
    found = {use: keys for some in each(_of_model, [(*cell, name) for cell in cells]) for use, keys in some.items()}
    here = card(name)
    return found, {*_tuned(gpu_models, here), *of_kernel_tests(here)}


def of_kernel_tests(here: Target) -> set[Key]:
    """Return what the GPU tests of single kernels launch: those of `DIRECT`, run without values."""
    import pytest

    sys.path.insert(0, str(TESTS.parents[1]))
    architecture, config = models()["mage"]
    walks = [FusedWalk(architecture, config, dtype, Options()) for dtype in TYPES]
    fixtures = {"where": [("meta", "triton")], "vae": [SimpleNamespace(kernels=lambda half: here)],
                "end": [walk.network("decoder").stages[-1][-1].packed for walk in walks]}  # fmt: skip
    stops = Exception, pytest.skip.Exception  # nothing has values, which is all that follows launches
    found = set()
    for module, names in DIRECT.items():
        tests = importlib.import_module(module)
        device, tests.DEVICE = getattr(tests, "DEVICE", None), "meta"
        for test in [vars(tests)[name] for name in names or vars(tests) if name.startswith("test_")]:
            for arguments in _cases(test, fixtures):
                with recording(here) as calls, contextlib.suppress(*stops):
                    test(**arguments)
                found |= keys_of(calls)
        tests.DEVICE = device
    return found


def _cases(test: Callable[..., None], fixtures: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """The arguments of a test in each of its cases: its parameters, and values of its fixtures."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    axes = [([name.strip() for name in words.split(",")], list(values)) for words, values in marks]
    known = {name for names, _ in axes for name in names}
    axes += [([name], fixtures[name]) for name in inspect.signature(test).parameters if name not in known]
    for values in itertools.product(*(values for _, values in axes)):
        pairs = zip(axes, values, strict=True)
        yield {name: one for (names, _), value in pairs
               for name, one in zip(names, value if len(names) > 1 else (value,), strict=True)}  # fmt: skip


def _of_model(cell: tuple[str, str, str]) -> dict[str, frozenset[Key]]:
    """What a model of the tests launches in a precision and form, by use."""
    sys.path.insert(0, str(TESTS))
    from gpu_models import MODELS
    from warm_kernels import SWITCHED

    (model, _, toggled), precision, name = cell[0].partition(" "), *cell[1:]
    architecture, configuration, *arguments = MODELS[model]
    config = configuration(*arguments)
    kind = None if precision in PRECISIONS else precision
    dtype = PRECISIONS[precision if kind is None else architecture.native]
    ways = [Options().switched(off=off) for off in (SWITCHED if toggled == "switched" else [()])]
    uses = [(architecture, config, half, dtype, options) for half in ("decoder", "encoder") for options in ways
            if architecture.program(half, config) is not None]  # fmt: skip
    return {use_id(*use, kind, False): needs(*use, card(name), kind) for use in uses}


def _tuned(gpu_models: Any, here: Target) -> Iterator[Key]:
    """What tests of tuning try: of each layer of this model two schedules."""
    architecture, configuration, *arguments = gpu_models.MODELS["seedvr2-small"]
    config = configuration(*arguments)
    known = functools.partial(launches, architecture, config, dtype=torch.float16, options=Options(), here=here)
    walk = FusedWalk(architecture, config, torch.float16, Options())
    for half in walk.halves:
        walk.use(half, EXACT)
    for layer in layers(walk, here):
        for schedule in candidates(here, layer.kind)[:2]:
            for half in ("decoder", "encoder"):
                yield from known(half=half, schedules={layer.kind: schedule})


def _launches(what: tuple[Use, str, Path | None]) -> tuple[frozenset[Key], frozenset[Key]]:
    way, name, cache = what
    path = cache and cache / "walks" / sha256(repr((_code(), name, way)).encode()).hexdigest()
    if path and path.is_file():
        return pickle.loads(path.read_bytes())
    found = way.launches(card(name))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(found))
        part.replace(path)
    return found


@functools.cache
def _code() -> str:
    """Return a digest of the code that a walk goes through."""
    files = [Path(__file__), *sorted(Path(zerowaste_vae.__file__).parent.glob("engine/**/*.py"))]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def card(name: str) -> Target:
    """Return a GPU that runs a form with all that it can do."""
    return prebuilt("card", FORMS[name], name)


def first() -> Key:
    """Return the kernel that is run before all others, to see whether any runs; every set has its own."""
    x = torch.empty(128, device="meta")
    return key("probe.doubling_kernel", [x, x], {"N": 128, "num_warps": 4})


def operands(one: Key) -> str:
    """Return the type of 8 bit that a kernel reads or writes, or "16"."""
    types = {word.lstrip("*").removeprefix("map:").partition("[")[0] for word in one.types}
    return "fp8" if "fp8e4nv" in types else "int8" if "i8" in types else "16"
