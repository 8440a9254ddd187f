"""Capabilities of a GPU and of the kernels chosen for it, decided once per device and explained in words.

A way names the code that runs: a prebuilt set by its letter, Triton, or plain torch (cards.py has the order). It is
chosen for a component and a device (planning/choice.py) and holds inside `using`; operators called outside take the
device's first way.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from .cards import AUTO, FORMS, PLAIN, SHARED_KIB, TRITON, order, wish
from .cure import not_installed
from .gpus import winograd

FP8 = torch.float8_e4m3fn
MIN_TRITON = (3, 5)
#: Versions of Triton whose Gluon the kernels in it are tested with.
GLUON = ((3, 6), (3, 7))
#: What ZLUDA, which runs CUDA programs on AMD GPUs and says it is an NVIDIA GPU of 8.x, adds to a GPU's name.
ZLUDA = "[ZLUDA]"
MADE_WITH = (3, 6)  # the Triton that prebuilt kernels are compiled with


@dataclass(frozen=True)
class Target:
    """Capabilities of one device under one way. `notes` are the sentences `info` prints: what is off, and why."""

    name: str
    sm: int  # the form of the code: 90 for compute capability 9.0; 0 without CUDA
    triton: tuple[int, int] | None
    shared_kib: int = 0  # most shared memory one block can use
    tma: bool = False
    fp8: bool = False
    mxfp8: bool = False
    half_accumulate: bool = False  # accumulating in fp16 doubles the matrix rate
    notes: tuple[str, ...] = field(default=())
    way: str = TRITON  # or PLAIN, or the letter of a prebuilt set
    passed: tuple[str, ...] = ()  # why ways before this one do not run
    card: int = 0  # the GPU's own compute capability; 0: `sm` is
    winograd: bool = False  # layers in 16 bit have their Winograd form by default: by the table of cards
    winograd_off: str = ""  # why that form does not run although other kernels do

    @functools.cached_property
    def kernels(self) -> bool:
        return self.way != PLAIN and self.triton is not None and self.sm >= 80

    @functools.cached_property
    def mma_sync(self) -> bool:
        """Return True if products are fed from registers, and the Triton is one whose lower-level language this pack's
        loop for them is written in."""
        return (80 <= self.sm < 90 or self.sm >= 120) and self.triton in GLUON

    @property
    def wgmma(self) -> bool:
        """Return True if groups of four warps multiply from shared memory, and the Triton is one whose lower-level
        language this pack's kernels for that are written in."""
        return self.sm == 90 and self.set is None and self.triton in GLUON

    @property
    def set(self) -> str | None:
        """Return the prebuilt set whose kernels run, or None."""
        return self.way if self.way in FORMS else None

    @property
    def words(self) -> str:
        """Return in one line the kernels that run, and why none of the ways before them does."""
        why = "; ".join(self.notes if self.way == PLAIN else self.passed)
        if self.way == TRITON:
            return f"Triton's kernels ({why})" if why else "Triton's kernels"
        if self.way == PLAIN:
            return f"plain torch ({why})" if why else "plain torch"
        return f"prebuilt kernels, set {self.way} ({why})" if why else f"prebuilt kernels, set {self.way}"

    @property
    def identity(self) -> str:
        """Return the text that the bits of results depend on: the set's contents, or Triton's version."""
        from .prebuilt.library import library

        if self.way == TRITON:
            return f"{TRITON} {'.'.join(map(str, self.triton or ()))}"
        return PLAIN if self.set is None else f"{self.set} {library().identity(self.set)}"

    @property
    def capability(self) -> int:
        """Return the GPU's own compute capability."""
        return self.card or self.sm

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True if the convolution kernel takes operands of this type here; others run the reference."""
        if not self.kernels:
            return False
        if dtype == FP8:
            return self.fp8
        return dtype in (torch.float16, torch.bfloat16, torch.int8)

    def accumulate(self, dtype: torch.dtype, fast: bool) -> str:
        """Return the fastest accumulation for operands of `dtype`: f32, i32, mx (block-scaled), or f16 in short runs,
        whose sums are added up.

        `fast` permits fp16 accumulation; mx is as exact as f32 and needs no permission. Its blocks all have the scale
        one: real scales are per output channel, in the epilogue. A scale for every 32 weights as well gains nothing, as
        e4m3 has an exponent of its own (demo VAE, decode of a held-back clip: 49.58 dB with it, 49.61 without).
        """
        if dtype == torch.int8:
            return "i32"
        if dtype == FP8 and self.mxfp8:
            return "mx"
        if fast and self.half_accumulate and dtype in (FP8, torch.float16):
            return "f16"
        return "f32"


@functools.cache  # it takes 0.2 ms, and every call in the interpreter needs it
def triton_version() -> tuple[int, int] | None:
    """Return the installed Triton's (major, minor), or None; reads package metadata, imports nothing."""
    if importlib.util.find_spec("triton") is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    for package in ("triton", "triton-windows", "pytorch-triton"):
        try:
            major, minor = version(package).split(".")[:2]
        except PackageNotFoundError:
            continue
        return int(major), int(minor)
    return None


def gains_by_half_sums(sm: int) -> bool:
    """Check whether sums in fp16 double the matrix rate on a compute capability (89 for 8.9)."""
    return sm in (86, 89) or sm >= 120


def capabilities(name: str, sm: int, triton: tuple[int, int] | None) -> Target:
    """Return the capabilities of Triton's code for a generation (checked by cross-compiling in the tests)."""
    notes = []
    if triton is None:
        return Target(name, sm, None, notes=(not_installed(),), way=PLAIN)
    if triton < MIN_TRITON:
        have, need = ".".join(map(str, triton)), ".".join(map(str, MIN_TRITON))
        return Target(name, sm, None, notes=(f"Triton {have} is older than {need}",), way=PLAIN)
    if sm < 80:
        old = f"{name} (sm_{sm}) is older than sm_80: the fused kernels are off"
        return Target(name, sm, triton, notes=(old,), way=PLAIN)
    fp8 = sm >= 89
    if not fp8:
        notes.append(f"sm_{sm} has no fp8 matrix instruction: 8-bit convolutions use int8")
    mxfp8 = sm >= 120 and triton >= (3, 6)
    if sm >= 120 and not mxfp8:
        notes.append("block-scaled fp8 needs Triton 3.6: plain fp8 is used, at half the rate under fp32 accumulation")
    tma = sm >= 90
    if not tma:
        notes.append(f"sm_{sm} has no bulk tensor copies: convolutions load through pointers with asynchronous copies")
    shared = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227}.get(sm, 99)
    return Target(name, sm, triton, shared, tma, fp8, mxfp8, gains_by_half_sums(sm), tuple(notes))


def prebuilt(name: str, card: int, letter: str) -> Target:
    """Return the target of a prebuilt set on a GPU of compute capability `card`."""
    form = FORMS[letter]
    made = capabilities(name, form, MADE_WITH)
    notes = () if made.fp8 else (made.notes[0].replace(f"sm_{form}", f"set {letter}"),)
    half = made.half_accumulate and (card >= 90 or card in (86, 89))
    return replace(made, shared_kib=SHARED_KIB, mxfp8=letter == "D", half_accumulate=half, notes=notes, way=letter,
                   card=card)  # fmt: skip


def under(way: str, name: str, card: int) -> Target:
    """Return the target of a GPU under a way; one that cannot run has no kernels, and says why in its notes."""
    if way in FORMS:
        why = _not_there(way)
        if why is not None:
            return Target(name, card, None, notes=(why,), way=PLAIN)
        here = prebuilt(name, card, way)
    else:
        here = capabilities(name, card, triton_version())
    return replace(here, winograd=winograd(name, card))


def _not_there(form: str) -> str | None:
    """Return why a form cannot be launched on this machine, without asking the GPU; None: no reason is known."""
    from .prebuilt.driver import library_name
    from .prebuilt.library import MADE_OF, SetError, library

    if library_name() is None:
        return f"NVIDIA has no CUDA driver for {platform.system()}"
    try:
        there = library().sets
    except SetError as error:
        return str(error)
    lacks = [one for one in MADE_OF[form] if one not in there]
    return f"set {lacks[0]} of the prebuilt kernels is not part of this installation" if lacks else None


#: (GPU, way) -> why it does not run although it should.
_off: dict[tuple[torch.device, str], str] = {}


def switch_off(device: torch.device, way: str, reason: str) -> None:
    """Launch no kernel this way on this GPU any more; `reason` becomes a note."""
    _off[device, way] = reason
    _ways.cache_clear()


#: GPU -> why it does not run the Winograd form.
_winograd_off: dict[torch.device, str] = {}


def switch_winograd_off(device: torch.device, reason: str) -> None:
    """Let layers have no Winograd form on this GPU any more; all other kernels run on."""
    _winograd_off[device] = reason
    _ways.cache_clear()


def ways(device: torch.device, asked: str = AUTO) -> list[Target]:
    """Return the ways to run kernels on a CUDA device, in the order in which they are tried. The last one is plain
    torch.

    Args:
        device: with or without an index.
        asked: one of `cards.CHOICES`; AUTO asks the environment.
    """
    if _instead:
        return _instead[0]
    index = torch.cuda.current_device() if device.index is None else device.index
    return _ways(index, wish(asked))


#: The targets of `standing_in`.
_instead: list[list[Target]] = []


@contextmanager
def standing_in(here: Target) -> Iterator[None]:
    """Let every CUDA device of the process run kernels as `here` says, or plain torch, whatever is requested."""
    _instead.append([here, without_kernels(here.name, here.sm, ["the form asked for does not run here"])])
    try:
        yield
    finally:
        _instead.pop()


@functools.cache
def _ways(index: int, asked: str) -> list[Target]:
    name, sm = _card(index)
    if not sm:
        why = "ZLUDA runs the torch operators" if ZLUDA in name else "AMD GPUs run the torch operators"
        return [Target(name, 0, None, notes=(why,), way=PLAIN)]
    here = torch.device("cuda", index)
    found = _tried(name, sm, asked, lambda way: _off.get((here, way)))
    return [replace(one, winograd_off=_winograd_off.get(here, "")) for one in found]


def _card(index: int) -> tuple[str, int]:
    """Return a GPU's name and compute capability; 0 for a GPU that is not NVIDIA's."""
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    return name, 0 if torch.version.hip is not None or ZLUDA in name else major * 10 + minor


def _tried(name: str, sm: int, asked: str, off: Callable[[str], str | None]) -> list[Target]:
    found: list[Target] = []
    reasons: list[str] = []
    for way in order(sm, asked):
        here = under(way, name, sm)
        if here.kernels and off(way) is None:
            found.append(replace(here, passed=tuple(dict.fromkeys(reasons))))
        else:
            reasons.append(off(way) or here.notes[0])
    if asked == PLAIN:
        reasons = ["plain torch is asked for"]
    elif sm < 80:
        reasons = [f"{name} (sm_{sm}) is older than sm_80: the fused kernels are off"]
    return [*found, without_kernels(name, sm, reasons)]


def without_kernels(name: str, sm: int, reasons: Sequence[str]) -> Target:
    """Return the target of a GPU that runs plain torch; its one note gives the reasons, in the order of the tried
    ways."""
    return Target(name, sm, None, notes=("; ".join(dict.fromkeys(reasons)),), way=PLAIN)


def has_fp8(device: torch.device, asked: str = AUTO) -> bool:
    """Return True if any way to run kernels on a device has fp8 products, not the first alone."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return any(here.fp8 for here in ways(device, asked) if here.kernels)


def projected(name: str, sm: int, asked: str = AUTO) -> list[Target]:
    """Return the result of `ways` for a GPU that need not be here, with the files of this installation."""
    return _tried(name, sm, wish(asked), lambda way: None)


def target(device: torch.device | str, asked: str = AUTO) -> Target:
    """Return the target of a torch device: that of `using`, or the first of `ways`. A CPU has no kernels; see
    `interpreted` for how tests run them there."""
    device = torch.device(device)
    if device.type != "cuda":
        return Target(device.type, 0, None, notes=("no CUDA device: the torch operators run",), way=PLAIN)
    chosen = _chosen.get()
    return ways(device, asked)[0] if chosen is None else chosen


_chosen: ContextVar[Target | None] = ContextVar("chosen", default=None)


@contextmanager
def using(here: Target | None) -> Iterator[None]:
    """Run the operators called inside the way that `here` says (None: as outside), on the device it was made for."""
    token = _chosen.set(_chosen.get() if here is None else here)
    try:
        yield
    finally:
        _chosen.reset(token)


def interpreted() -> bool:
    """Return True if Triton's interpreter is on (TRITON_INTERPRET=1): kernels run on CPU tensors, for checking only."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def widened(x: torch.Tensor) -> bool:
    """Return True where kernels widen operands to fp32: Triton's interpreter multiplies these types wrongly (3.6.0 and
    3.9.0)."""
    return x.is_cpu and interpreted() and x.dtype in (torch.bfloat16, FP8)


def kernels_for(device: torch.device, backend: str) -> Target | None:
    """Resolve an operator's `backend`.

    Args:
        device: of its tensors. Meta tensors have the kernels of `using`, for recording.
        backend: "auto" (kernels where there are some), "triton" (kernels, or an error) or "reference".

    Returns:
        The target whose kernels run, or None for the reference. In Triton's interpreter, which stands in for the newest
            measured generation, only "triton" runs kernels.

    Raises:
        ValueError: another backend.
        RuntimeError: "triton" where there is no kernel.
    """
    if backend == "reference":
        return None
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend is {backend!r}; use auto, triton or reference")
    kind = device.type  # a new string each time
    if kind == "cpu" and backend == "triton" and interpreted() and triton_version() is not None:
        return capabilities("interpreter", 90, triton_version())
    here = _chosen.get() if kind in ("cuda", "meta") else None
    here = target(device) if here is None and kind != "meta" else here
    if here is not None and here.kernels:
        return here
    if backend == "triton":
        notes = "; ".join(here.notes) if here else "nothing says which GPU's"
        raise RuntimeError(f"no kernel for this operator on {device}: {notes}")
    return None
