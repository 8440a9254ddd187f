"""Settings of our own calls, put back afterwards: nothing global is changed behind the user's back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..kernels.attention import reference
from ..kernels.precision import fp32_math
from ..kernels.settings import Setting

_CUDA = torch.backends.cuda
#: Other algorithms round differently.
CUDNN_BENCHMARK = Setting.attribute(torch.backends.cudnn, "benchmark", exact=False)
_HALF_SUMS = Setting.attribute(_CUDA.matmul, "allow_fp16_accumulation", exact=False)  # since torch 2.7
_FLASH = Setting(_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp, exact=True)
_EFFICIENT = Setting(_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp, exact=True)


@contextmanager
def scoped_math(
    device: torch.device, *, tf32: bool = False, cudnn_benchmark: bool = False, flash_attention: bool = True
) -> Iterator[None]:
    """How torch computes inside, and where; no gradients. Process-wide settings are put back when the last of the runs
    that overlap is over, also after an error.

    CUDA: `device` is the thread's current one, so that events, streams and libraries belong to it; fp32 in fp32, or in
    TF32; cuDNN tries its algorithms out, or takes the first; fp16 products never sum in fp16; torch's attention kernels
    that need no score matrix are on. Without `flash_attention`, attention is made of plain products in fp32 on every
    device (a block of queries at a time, so that memory stays linear).
    """
    with torch.no_grad(), ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(current(device))
            stack.enter_context(fp32_math(tf32))
            stack.enter_context(CUDNN_BENCHMARK.hold(cudnn_benchmark))
            if hasattr(_CUDA.matmul, "allow_fp16_accumulation"):
                stack.enter_context(_HALF_SUMS.hold(False))
            stack.enter_context(_FLASH.hold(True))
            stack.enter_context(_EFFICIENT.hold(True))
        stack.enter_context(attention_scope(flash_attention))
        yield


def current(device: torch.device) -> AbstractContextManager[object]:
    """`device` is this thread's current one inside, if it is a GPU that has a number; the thread's own comes back."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext()


def attention_scope(flash_attention: bool) -> AbstractContextManager[object]:
    """The part of `scoped_math` that also changes what memory a run takes: dry runs need it too."""
    return ExitStack() if flash_attention else _PlainAttention()


class _PlainAttention(TorchFunctionMode):
    """Replaces torch's attention kernels in this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and len(args) == 3 and not kwargs:
            q, k, v = (t.flatten(0, -3) for t in args)
            return reference.attention(q, k, v).reshape(args[0].shape)
        return func(*args, **(kwargs or {}))
