"""List all architectures and the keys that identify their files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from ..errors import InputError
from ..network.architecture import Architecture, KeySet
from ..network.plain import Network
from ..network.program import Program
from . import (
    cogvideox,
    cosmos,
    hunyuan,
    hunyuan15,
    hunyuan_image,
    hunyuan_refiner,
    kl,
    ltx,
    ltx_diffusion,
    mage,
    minimax_h3,
    mochi,
    qwen_image21,
    seedvr2,
    svd,
    tae,
    taehv,
    unsupported,
    wan,
)

T = TypeVar("T")
ARCHITECTURES: tuple[Architecture, ...] = (
    seedvr2.ARCHITECTURE, wan.WAN21, wan.WAN22, kl.SD, kl.FLUX, kl.FLUX2,
    ltx.ARCHITECTURE, ltx_diffusion.ARCHITECTURE, mochi.ARCHITECTURE, cosmos.ARCHITECTURE,
    hunyuan.ARCHITECTURE, hunyuan15.ARCHITECTURE, hunyuan_image.ARCHITECTURE, hunyuan_refiner.ARCHITECTURE,
    minimax_h3.ARCHITECTURE, mage.ARCHITECTURE, svd.ARCHITECTURE, cogvideox.ARCHITECTURE,
    qwen_image21.ARCHITECTURE, tae.TAESD, tae.TAEF2, tae.TAESANA, taehv.ARCHITECTURE,
)  # fmt: skip
#: The architecture of plans, benchmarks and reasons if no file is given.
DEFAULT = ARCHITECTURES[0]
#: Search terms for all published VAEs.
WORDS = tuple(dict.fromkeys(word for a in ARCHITECTURES if a.published for word in a.published.words))
#: Parts of the names of files that hold another network than the family they are named after: reduced decoders, audio.
_NOT_THE_FAMILY = re.compile(r"tae(?!sd|f[12]|sana|[ _.-]*(hv|hy|w|ltx|h3|os))|audio|flash[ _.-]*vae", re.IGNORECASE)
#: Families that read the latents of another one: LTX-2.5's two decoders share one encoder and one set of statistics,
#: LTX-2.3's; Stable Video Diffusion's decoder was trained on Stable Diffusion's encoder, TAEF2 on Flux.2's.
_SPACES = {"ltx-diffusion": "ltx", "svd": "sd", "taef2": "flux2"}
# Prefixes of containers: single-file checkpoints, stable-diffusion.cpp (--vae), trainers, DataParallel. Others are
# found too, but these come first.
PREFIXES = ("first_stage_model.", "vae.", "model.", "module.")
#: Parts that torch.compile, FSDP and activation checkpoints insert into names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
#: DataParallel's part around a submodule; removed only if the file fits no known family with it.
_MODULE = re.compile(r"(?:^|(?<=\.))module\.")
# The order decides: a later family's names may also occur in an earlier one (HunyuanVideo's in 1.5, Wan 2.1's in 2.2).
KEY_SETS = (
    minimax_h3.DIFFUSERS, taehv.ARCHITECTURE.keys, tae.TAEF2.keys, tae.TAESANA.keys, tae.TAESD.keys,
    tae.COMBINED, tae.HALVES,
    *unsupported.NEIGHBOURS,
    seedvr2.KEYS, minimax_h3.ARCHITECTURE.keys, mage.ARCHITECTURE.keys, mochi.ARCHITECTURE.keys,
    ltx_diffusion.ARCHITECTURE.keys, ltx.ARCHITECTURE.keys,
    cogvideox.ARCHITECTURE.keys, unsupported.MOVQ, hunyuan15.ARCHITECTURE.keys, unsupported.HUNYUAN15_DIFFUSERS,
    hunyuan.ARCHITECTURE.keys, hunyuan.DIFFUSERS, ltx.DIFFUSERS, cosmos.ARCHITECTURE.keys,
    qwen_image21.ARCHITECTURE.keys, wan.WAN22.keys, wan.WAN21.keys,
    wan.DIFFUSERS, svd.ARCHITECTURE.keys, svd.DIFFUSERS, hunyuan_image.ARCHITECTURE.keys, kl.DIFFUSERS,
    seedvr2.ENCODER_KEYS,
    kl.FLUX2.keys, kl.SD.keys, hunyuan_refiner.ARCHITECTURE.keys, kl.FLUX.keys, *unsupported.OTHERS,
)  # fmt: skip
#: The first name of each. Flux.2's is left out: its files have Flux's, too, and many other networks have such norms;
#: numbers alone are names of too many, and so are those of a transformer's products.
_COMMON = kl.FLUX2.keys, tae.HALVES, minimax_h3.DIFFUSERS, *unsupported.NEIGHBOURS
_ANCHORS = {names[0] for k in KEY_SETS if k not in _COMMON for names in k.keys}
_ENDINGS = tuple(f".{name}" for name in sorted(_ANCHORS))


def detect(keys: Iterable[str]) -> Architecture | None:
    """Return the architecture whose key set is among `keys`, or None."""
    found = find_key_set(keys)
    return None if found is None else by_name(found.name)


def of_encoder(architecture: Architecture, config: Any) -> Architecture:
    """Return the family of an encoder without a decoder that was detected as `architecture`. Stable Video Diffusion's
    has Flux's names and, unlike all others that have them, 4 latent channels: with so many an image VAE has a
    `quant_conv`."""
    return svd.ARCHITECTURE if architecture is kl.FLUX and config.latent_channels == 4 else architecture


def by_name(name: str) -> Architecture | None:
    """Return the architecture of this name; None for families that are not run."""
    return next((a for a in ARCHITECTURES if a.name == name), None)


def own(program: Program, part: str) -> ModuleType | None:
    """Return a module of the family that plans and runs this component in a way of its own; None: the core does.

    part: "plans" (its class Plans is one of planning/plans.py), "components" (Components: of execution/passes.py) or
    "launches" (launch(half, dtype, kind) launches all kernels, as planning/launches.py wants it).
    """
    return import_module(f"{program.component}.running.{part}") if program.component else None


def own_halves(model: Network, part: str) -> dict[str, ModuleType]:
    """Return {"encoder" or "decoder": its `own` module} of the components of a model that have one."""
    halves = {name: half for name in ("encoder", "decoder") if (half := getattr(model, name)) is not None}
    return {name: module for name, half in halves.items() if (module := own(half.program, part)) is not None}


#: Names that people give to VAEs, in letters and digits alone -> the family.
_CALLED = {
    "wan": "wan2.1", "wan21": "wan2.1", "wan2214b": "wan2.1", "wan22a14b": "wan2.1", "qwen": "wan2.1",
    "qwenimage": "wan2.1", "qwenimagelayered": "wan2.1", "qwenimageedit": "wan2.1", "krea2": "wan2.1",
    "anima": "wan2.1", "cosmospredict2": "wan2.1", "mingimage": "wan2.1", "wan225b": "wan2.2", "wan22ti2v5b": "wan2.2",
    "sd1": "sd", "sd14": "sd", "sd15": "sd", "sd2": "sd", "sd21": "sd", "sdxl": "sd", "sdxl10": "sd", "ssd1b": "sd",
    "pixart": "sd", "auraflow": "sd", "pony": "sd", "illustrious": "sd", "flux1": "flux", "flux1dev": "flux",
    "flux1schnell": "flux", "fluxkontext": "flux", "sd3": "flux", "sd35": "flux", "zimage": "flux", "chroma": "flux",
    "lumina2": "flux", "hidream": "flux", "omnigen2": "flux", "longcatimage": "flux", "flux2dev": "flux2",
    "flux2klein": "flux2", "ideogram4": "flux2", "ltxv": "ltx", "ltxvideo": "ltx", "ltx2": "ltx", "ltx23": "ltx",
    "ltx25": "ltx-diffusion", "mochi1": "mochi", "cosmos1": "cosmos", "hunyuan": "hunyuanvideo",
    "hunyuanvideo1": "hunyuanvideo", "hunyuanvideo10": "hunyuanvideo", "skyreels": "hunyuanvideo",
    "kandinsky5": "hunyuanvideo", "hunyuan15": "hunyuanvideo1.5", "hunyuanimage21": "hunyuanimage",
    "minimax": "minimaxh3", "h3": "minimaxh3", "hailuo": "minimaxh3", "mageflow": "mage", "magevae": "mage",
    "svdxt": "svd", "cogvideo": "cogvideox", "cogvideox15": "cogvideox", "qwen21": "qwenimage2.1",
    "seedvr": "seedvr2",
}  # fmt: skip


def by_words(text: str) -> Architecture | None:
    """Return the architecture that people mean by a name such as "SDXL", "Wan2.1" or "Flux.1 dev"; None: unknown.
    A family's own name and title are taken in any case and with any blanks, dots and hyphens."""
    key = re.sub(r"[^a-z0-9]", "", text.lower())
    named = {re.sub(r"[^a-z0-9]", "", name.lower()): a for a in ARCHITECTURES for name in (a.published.title, a.name)}
    return named.get(key) or by_name(_CALLED.get(key, ""))


def latent_space(name: str) -> str:
    """Return the name of the latents of this family: the same for all families that share them."""
    return _SPACES.get(name, name)


def by_file(file: str) -> Architecture | None:
    """Return the architecture whose published VAE has files of this name, or None; used before a file is read. Later
    families are tested first: their files' names contain those of earlier ones ("wan" in Wan 2.2's)."""
    known = (a for a in reversed(ARCHITECTURES) if a.published and re.search(a.published.files, file, re.IGNORECASE))
    return None if _NOT_THE_FAMILY.search(file) else next(known, None)


def find_key_set(names: Iterable[str]) -> KeySet | None:
    """Return the family of a file with these names.

    If the file is complete for no family, return the first family whose first name it has: some tensors are missing.
    """
    present = set(names)
    partly = (k for k in KEY_SETS if any(n[0] in present for n in k.keys if n[0] in _ANCHORS))
    return _complete(present) or next(partly, None)


def _complete(present: set[str]) -> KeySet | None:
    return next((k for k in KEY_SETS if k.fits(present)), None)


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Return {name in the file: name in the network} of the VAE in a file, whatever container it is in.

    A container's prefix and the parts that compilers and trainers write into names are removed, and other networks'
    names are left out. Without a known VAE, all names stay as they are. A VAE that can be run takes precedence over one
    that is only known.
    """
    whole = {n: n for n in names}
    bare = {n: _WRAPPERS.sub("", n) for n in whole}
    forms = [whole]
    for form in (bare, {n: _MODULE.sub("", b) for n, b in bare.items()}):
        if form != forms[-1]:
            forms.append(form)
    named: list[tuple[bool, dict[str, str]]] = []
    for form in forms:
        for prefix in _prefixes(form.values()):
            found = {n: o[len(prefix) :] for n, o in form.items() if o.startswith(prefix)}
            if len(set(found.values())) < len(found):
                continue
            key_set = _complete(set(found.values()))
            if key_set is not None and not key_set.title:
                return found
            if key_set is not None or find_key_set(found.values()):
                named.append((key_set is None, found))
    return min(named, key=lambda one: one[0], default=(False, whole))[1]


def other_vaes(names: Iterable[str], used: Mapping[str, str]) -> list[str]:
    """Return the other VAEs of a file that can be run and have a decoder, in words: family and prefix.

    Args:
        names: in the file.
        used: the result of `unwrapped`, one of the VAEs.
    """
    bare, found = [_WRAPPERS.sub("", name) for name in names], {}
    for prefix in _prefixes(bare):
        inside = {name[len(prefix) :] for name in bare if name.startswith(prefix)}
        key_set = _complete(inside)
        if key_set is not None and not key_set.title and any("decoder" in n for n in _of(key_set, inside)):
            found[prefix] = key_set.name
    old, name = next(iter(used.items()), ("", ""))
    mine = _WRAPPERS.sub("", old).removesuffix(name)
    return [f"{family} under {p or 'no prefix'}" for p, family in found.items() if p != mine and mine in found]


def _of(key_set: KeySet, present: set[str]) -> set[str]:
    """Return the names by which a family is known that are present."""
    return present.intersection(name for names in key_set.keys for name in names)


def _prefixes(names: Iterable[str]) -> list[str]:
    """Return the possible prefixes of a VAE's names: none first, then the usual ones, then the shortest."""
    found = set(PREFIXES)
    for name in names:
        if name.endswith(_ENDINGS):
            found.update(name[: -len(anchor)] for anchor in _ANCHORS if name.endswith(f".{anchor}"))
    # Mochi's names may lack the component's name, which is no container.
    found = {prefix for prefix in found if not re.search(r"\b(en|de)coder\.", prefix)}
    others = sorted(found.difference(PREFIXES), key=lambda p: ("ema" in p, len(p), p))
    return ["", *PREFIXES, *others]


def renamed(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return a known network's tensors, or their shapes, under the original names. Raises InputError."""
    key_set = find_key_set(tensors)
    names = None if key_set is None else native_names(tensors, key_set)
    return dict(tensors) if names is None else {new: tensors[name] for name, new in names.items()}


def native_names(names: Iterable[str], key_set: KeySet) -> dict[str, str] | None:
    """Return {file name: original name}; None if the family has only one set of names. A name without a counterpart
    stays as it is. Where two names of a file that is not complete would become one: None, or only the mapped one.

    Raises:
        InputError: a complete file of the family has two tensors of one original name.
    """
    names = list(names)
    if key_set.native is None:
        return None
    mapped = {name: new for name, new in key_set.native(names).items() if new is not None}
    origin: dict[str, str] = {}
    pairs = [(origin[new], name) for name in names if origin.setdefault(new := mapped.get(name, name), name) != name]
    if pairs and key_set.fits(set(names)):
        raise InputError(f"{pairs[0][0]} and {pairs[0][1]} are two names of one tensor; download the file again")
    taken = set(mapped.values())
    if len(taken) < len(mapped):
        return None
    return mapped | {name: name for name in names if name not in mapped and name not in taken}
