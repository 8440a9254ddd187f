"""Fixtures every test may use: carried golden data, the optional larger set, and small seeded VAEs."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import inspect
import operator
import os
import random
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which the first test module may do: here its interpreter runs the kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import load
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.runtime.pinned import POOL
from zerowaste_vae.engine.runtime.weights import Conv

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = Path(__file__).resolve().parent / "fixtures"
#: fp32 noise of the original against its own fp64 run is up to 6.2e-6.
ATOL = 1.5e-5
# torch 2.9 replaced the booleans of TF32 and refuses a mixture of both.
NEW = hasattr(torch.backends.cuda.matmul, "fp32_precision")
TF32 = "fp32_precision" if NEW else "allow_tf32"
#: Settings of the process that a run may change while it lasts.
SETTINGS = {
    "TF32 in products": (torch.backends.cuda.matmul, TF32),
    "TF32 in convolutions": (torch.backends.cudnn.conv if NEW else torch.backends.cudnn, TF32),
    "cuDNN's benchmark": (torch.backends.cudnn, "benchmark"),
    "cuDNN": (torch.backends.cudnn, "enabled"),
}


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="another order: modules, and the tests in each")
    parser.addoption("--passed", type=Path, metavar="FILE", help="names what passes there; what it names is not run")


class Passed:
    """Tests that passed, now or in the runs before that wrote the same file. It is written as they pass, because a run
    may be cut off."""

    def __init__(self, path):
        self.path = path
        self.names = set(path.read_text(encoding="utf-8").splitlines() if path.exists() else ())
        self.called = set()

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_configure_node(self, node):
        node.workerinput["passed"] = sorted(self.names)  # all workers collect the same tests, a replaced one too

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self.called:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self):
        self.path.touch()


class Root:
    """The repository is a package whose folder has any name, `ComfyUI-ZeroWasteVAE` for one: pytest would import it by
    that name before the first test, and cannot where it has a hyphen."""

    @staticmethod
    def pytest_collect_directory(path, parent):
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config):
    config.pluginmanager.register(Root())
    path = config.getoption("--passed")
    if path and not hasattr(config, "workerinput"):  # the workers of xdist report to this process
        config.pluginmanager.register(Passed(path), "passed")


def core_tests():
    """File -> its tests of the core, or those that are not, with a hyphen; all of them where none is named."""
    lines = map(str.split, (ROOT / "tests" / "core.txt").read_text(encoding="utf-8").splitlines())
    return {words[0]: words[1:] for words in lines if words and words[0] != "#"}


def is_core(names, test):
    if names is None:
        return False
    return f"-{test}" not in names if all(name[0] == "-" for name in names) else test in names


def pytest_ignore_collect(collection_path, config):
    """Files without a test of the mark are not imported, which takes longer than most tests."""
    mark = config.option.markexpr if collection_path.match("test_*.py") else None
    if mark == "core":
        return collection_path.relative_to(ROOT).as_posix() not in core_tests() or None
    return (mark == "gpu" and "mark.gpu" not in collection_path.read_text(encoding="utf-8")) or None


@pytest.hookimpl(tryfirst=True)  # pytest then groups what shares a fixture's parameter
def pytest_collection_modifyitems(config, items):
    path, seed, core = config.getoption("--passed"), config.getoption("--shuffle"), core_tests()
    for item in items:
        if is_core(core.get(item.nodeid.partition("::")[0]), item.originalname):
            item.add_marker("core")
    if path:
        given = getattr(config, "workerinput", None)
        known = set(given["passed"]) if given else config.pluginmanager.get_plugin("passed").names
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
        items[:] = [item for item in items if item.nodeid not in known]
    if seed is not None:
        shuffle(items, random.Random(seed))


def shuffle(items, draw):
    """No test may need another one before it. Modules stay together: their fixtures are made once. What needs no
    kernels on a GPU comes first, as ever: the others' are compiled meanwhile."""
    modules = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    order = list(modules.values())
    draw.shuffle(order)
    for tests in order:
        draw.shuffle(tests)
    items[:] = [item for tests in order for item in tests]
    items.sort(key=lambda item: item.get_closest_marker("plain") is None)


def pytest_collection_finish():
    """Freeze all that is imported by now: later garbage collections, which many tests ask for, need not look at it."""
    gc.collect()
    gc.freeze()


def settle_gpu():
    """No memory of an earlier run on the GPU but what living fixtures hold, no limit of an earlier test, and counters
    that start anew."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # a failed test's frames, with their tensors
        with suppress(AttributeError):
            delattr(sys, name)
    KEPT.release()
    gc.collect()  # what failed refers to itself
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def settings():
    """Setting -> whether it is on."""
    return {name: getattr(*setting) in (True, "tf32") for name, setting in SETTINGS.items()}


@pytest.fixture(autouse=True)
def gpu_as_found(request):
    """Every test marked gpu finds the device as a new process would, and leaves no limit or run to what comes next."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    settle_gpu()
    device, before = torch.cuda.current_device(), settings()
    yield
    torch.cuda.set_device(device)
    KEPT.release()
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert settings() == before


@pytest.fixture(autouse=True)
def gradients_as_found():
    """A call that left them off, or a stream that was dropped within one, would do so for everybody."""
    yield
    left_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert left_on, "gradients are left off"


@pytest.fixture(scope="module", autouse=True)
def earlier_modules_forgotten():
    """On a GPU, what they leave behind, compiled kernels above all, is left out of later collections: every test begins
    with one, and they came to 0.14 s each. Not at a module's end, where pytest still holds what its last test was
    given: later it would be out of reach for a collection, with the memory it has."""
    if not torch.cuda.is_initialized():
        return
    settle_gpu()
    if torch.cuda.memory_allocated() < 1 << 20:
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def page_locked_memory_given_back():
    """Within a module it stays: locking takes time."""
    yield
    POOL.release()


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """Keep measurements and packed weights of tests out of the user's cache, and the user's out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROWASTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def exact_sums(monkeypatch):
    """Convolutions in float64 and rounded: the order of sums, which some CPUs choose by the number of frames, does not
    show."""
    convolve = torch.nn.functional.conv3d

    def exactly(x, weight, bias=None, *rest, **options):
        bias = None if bias is None else bias.double()
        return convolve(x.double(), weight.double(), bias, *rest, **options).to(x.dtype)

    monkeypatch.setattr(torch.nn.functional, "conv3d", exactly)


@pytest.fixture(scope="session")
def atol() -> float:
    return ATOL


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture(scope="session")
def shared() -> Path:
    """The larger golden set: $ZEROWASTE_SHARED, or a folder `shared` beside the repository."""
    path = Path(os.environ.get("ZEROWASTE_SHARED") or ROOT.parent / "shared")
    if not (path / "golden").is_dir():
        pytest.skip(f"the larger golden set is not at {path} (set ZEROWASTE_SHARED)")
    return path


def seeded_weights(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter from one generator, in name order: the recipe of the recorded full-width outputs."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.ndim >= 2:
                p.normal_(generator=g).mul_(1.2 / p[0].numel() ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                p.copy_(1 + 0.2 * torch.randn(p.shape, generator=g))
            else:
                p.copy_(0.1 * torch.randn(p.shape, generator=g))


@pytest.fixture(scope="session")
def make_vae_file(tmp_path_factory):
    """make_vae_file(encoder, decoder widths, groups, seed) -> path of a seeded SeedVR2 file in fp32."""
    folder = tmp_path_factory.mktemp("vae")

    def make(encoder=(8, 16, 16, 16), decoder=(8, 16, 16, 16), groups=4, seed=0) -> Path:
        path = folder / f"{encoder}-{decoder}-{groups}-{seed}.safetensors".replace(" ", "")
        if not path.exists():
            model = ARCHITECTURE.build(Config(encoder, decoder, 16, groups))
            seeded_weights(model, seed)
            save_file(model.state_dict(), path, {"norm_num_groups": str(groups)})
        return path

    return make


@pytest.fixture(scope="session")
def vae_file(make_vae_file) -> Path:
    return make_vae_file()


@pytest.fixture(scope="session")
def vae(vae_file):
    """A tiny seeded VAE (widths 8 to 16) in fp32 on the CPU."""
    return load(vae_file, device="cpu")


@pytest.fixture(scope="session")
def seed_model():
    return seeded_weights


@pytest.fixture(scope="session")
def units() -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / "seedvr2" / "units.safetensors")


def packed_convolutions(value) -> dict:
    """{key: packed convolution} of all in a fused half, a list or a dataclass."""
    if isinstance(value, (FusedDecoder, FusedEncoder)):
        value = [link.packed for stage in value.stages for link in stage]
    if isinstance(value, Conv):
        return {value.key: value}
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = map(packed_convolutions, value if isinstance(value, (list, tuple)) else ())
    return {key: conv for part in parts for key, conv in part.items()}


@pytest.fixture(scope="session")
def convolutions():
    return packed_convolutions


@pytest.fixture(scope="session")
def full_width(tmp_path_factory) -> Path:
    """A file of SeedVR2's published widths with the weights of the recorded outputs, in fp32."""
    path = tmp_path_factory.mktemp("full") / "full.safetensors"
    with torch.device("meta"):
        model = ARCHITECTURE.build(Config((128, 256, 512, 512), (128, 256, 512, 512)))
    model.to_empty(device="cpu")
    seeded_weights(model, 1234)
    save_file(model.state_dict(), path)
    return path


@pytest.fixture
def noise():
    """noise(*shape, seed=0): seeded normal values."""

    def make(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture(scope="session", autouse=True)
def exact_interpreter():
    """Triton's interpreter adds up products in fp64 and rounds once, and takes half the time.

    Its products are those of numpy's BLAS, which on some CPUs rounds a row of fp32 by its place among the others. Time
    goes into a look through all of triton.language at every call of a function, tables of types made anew, reductions
    element by element, and eight operations for each look for an overflow."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.language import float64
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    dot, reduce = interpreter.InterpreterBuilder.create_dot, interpreter.ReduceOps.generic_reduce
    convert, names, types = interpreter._get_np_dtype, {}, {}

    def create_dot(self, a, b, d, *options):
        if d.data.dtype != np.float32:
            return dot(self, a, b, d, *options)
        made = dot(self, a, b, interpreter.TensorHandle(d.data.astype(np.float64), float64), *options)
        return interpreter.TensorHandle(made.data.astype(np.float32), d.dtype.scalar)

    def patch_builtin(package, *options):
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if not is_builtin(member):  # nor are the others: a kernel calls a function
                break
            interpreter._patch_attr(package, name, member, *options)

    def np_dtype(dtype):
        if dtype.name not in types:
            types[dtype.name] = convert(dtype)
        return types[dtype.name]

    def generic_reduce(self, values):
        if self.axis is None:
            return reduce(self, values)
        parts = [np.moveaxis(v.handle.data, self.axis, 0) for v in values]
        while (half := len(parts[0]) // 2) > 0:  # a power of two
            pairs = [p[at] for at in (slice(half), slice(half, None)) for p in parts]
            made = self.combine_fn.fn(
                *(self.to_tensor(p, v.dtype) for p, v in zip(pairs, [*values, *values], strict=True))
            )
            parts = [t.handle.data for t in (made if isinstance(made, tuple) else (made,))]
        found = (np.expand_dims(p[0], self.axis) if self.keep_dims else p[0] for p in parts)
        return [self.to_tensor(array, v.dtype) for array, v in zip(found, values, strict=True)]

    def overflow(a, b, operation):
        a, b = a.handle.data, b.handle.data
        if a.dtype != bool and a.itemsize < 8:
            limits, made = np.iinfo(a.dtype), getattr(operator, operation.__name__)(a.astype(np.int64), b)
            assert limits.min <= made.min() and made.max() <= limits.max, f"{a.dtype} overflow in {operation.__name__}"

    interpreter.InterpreterBuilder.create_dot, interpreter._patch_builtin = create_dot, patch_builtin
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = overflow
    interpreter._get_np_dtype = np_dtype
