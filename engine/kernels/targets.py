"""What a GPU and the installed Triton can do, decided once per device and explained in words."""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

FP8 = torch.float8_e4m3fn
MIN_TRITON = (3, 5)


@dataclass(frozen=True)
class Target:
    """Capabilities of one device. `notes` are the sentences `info` prints: what is off, and why."""

    name: str
    sm: int  # 90 for compute capability 9.0; 0 without CUDA
    triton: tuple[int, int] | None
    shared_kib: int = 0  # most shared memory one block can use
    tma: bool = False
    fp8: bool = False
    mxfp8: bool = False
    half_accumulate: bool = False  # accumulating in fp16 doubles the matrix rate
    notes: tuple[str, ...] = field(default=())

    @property
    def kernels(self) -> bool:
        return self.triton is not None and self.sm >= 80

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether the Triton convolution takes operands of this type here; anything else runs the reference."""
        if not self.kernels:
            return False
        if dtype == FP8:
            return self.fp8
        return dtype in (torch.float16, torch.bfloat16, torch.int8)

    def accumulate(self, dtype: torch.dtype, fast: bool) -> str:
        """Fastest accumulation for operands of `dtype`: f32, i32, mx (block-scaled), or f16 promoted each step.

        `fast` permits fp16 accumulation; mx is as exact as f32 and needs no permission. Its blocks all have the scale
        one: real scales are per output channel, in the epilogue. A scale for every 32 weights as well gains nothing,
        as e4m3 has an exponent of its own (demo VAE, decode of a clip held back: 49.58 dB with it, 49.61 without).
        """
        if dtype == torch.int8:
            return "i32"
        if dtype == FP8 and self.mxfp8:
            return "mx"
        if fast and self.half_accumulate and dtype in (FP8, torch.float16):
            return "f16"
        return "f32"


@functools.cache  # 0.2 ms, which every call in the interpreter asks for
def triton_version() -> tuple[int, int] | None:
    """Installed Triton's (major, minor), or None; reads package metadata, imports nothing."""
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


def capabilities(name: str, sm: int, triton: tuple[int, int] | None) -> Target:
    """The table: what Triton emits for each generation (checked by cross-compiling in the tests)."""
    notes = []
    if triton is None:
        return Target(name, sm, None, notes=("Triton is not installed: the fused kernels are off, torch runs instead",))
    if triton < MIN_TRITON:
        have, need = ".".join(map(str, triton)), ".".join(map(str, MIN_TRITON))
        return Target(name, sm, None, notes=(f"Triton {have} is older than {need}: the fused kernels are off",))
    if sm < 80:
        return Target(name, sm, triton, notes=(f"{name} (sm_{sm}) is older than sm_80: the fused kernels are off",))
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
    return Target(name, sm, triton, shared, tma, fp8, mxfp8, sm in (86, 89) or sm >= 120, tuple(notes))


#: GPU -> why its kernels are off although it should have some.
_off: dict[torch.device, str] = {}


def switch_off(device: torch.device, reason: str) -> None:
    """No kernel runs on this GPU any more; `reason` becomes its note."""
    _off[device] = reason
    _cuda_target.cache_clear()


@functools.cache
def _cuda_target(index: int) -> Target:
    found, reason = _capable(index), _off.get(torch.device("cuda", index))
    return replace(found, triton=None, notes=(reason,)) if found.kernels and reason else found


def _capable(index: int) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    if torch.version.hip is not None:
        return Target(torch.cuda.get_device_name(index), 0, None, notes=("AMD GPUs run the torch operators",))
    return capabilities(torch.cuda.get_device_name(index), major * 10 + minor, triton_version())


def target(device: torch.device | str) -> Target:
    """Capabilities of a torch device. A CPU has no kernels; see `interpreted` for how tests run them there."""
    device = torch.device(device)
    if device.type != "cuda":
        return Target(device.type, 0, None, notes=("no CUDA device: the torch operators run",))
    return _cuda_target(torch.cuda.current_device() if device.index is None else device.index)


def interpreted() -> bool:
    """Triton's interpreter is on (TRITON_INTERPRET=1): kernels run on CPU tensors, for checking only."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def use_triton(device: torch.device, backend: str, dtype: torch.dtype | None = None) -> bool:
    """Resolve `backend`: auto (Triton where it works), triton (or an error), reference."""
    if backend == "reference":
        return False
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend is {backend!r}; use auto, triton or reference")
    here = target(device)
    able = here.kernels if dtype is None else here.supports(dtype)
    if device.type == "cpu":
        able = backend == "triton" and interpreted() and triton_version() is not None
    if backend == "triton" and not able:
        raise RuntimeError(f"no Triton kernel for {dtype or 'this operator'} on {device}: {'; '.join(here.notes)}")
    return able
