"""Settings of our own calls, put back afterwards: nothing global is changed behind the user's back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..kernels.attention import reference
from ..kernels.precision import fp32_math


@contextmanager
def scoped_math(
    device: torch.device, *, tf32: bool = False, cudnn_benchmark: bool = False, flash_attention: bool = True
) -> Iterator[None]:
    """How torch computes inside; no gradients. Process-wide settings are restored also after an error.

    CUDA: fp32 in fp32, or in TF32; cuDNN tries its algorithms out, or takes the first; fp16 products never sum in
    fp16; torch's attention kernels that need no score matrix are on. Without `flash_attention`, attention is made of
    plain products in fp32 on every device (a block of queries at a time, so that memory stays linear).
    """
    with torch.no_grad(), ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(fp32_math(tf32))
            stack.enter_context(attribute(torch.backends.cudnn, "benchmark", cudnn_benchmark))
            cuda = torch.backends.cuda
            if getattr(cuda.matmul, "allow_fp16_accumulation", False):  # since torch 2.7
                stack.enter_context(attribute(cuda.matmul, "allow_fp16_accumulation", False))
            stack.enter_context(_switch(cuda.flash_sdp_enabled, cuda.enable_flash_sdp))
            stack.enter_context(_switch(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp))
        stack.enter_context(attention_scope(flash_attention))
        yield


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


@contextmanager
def attribute(holder: object, name: str, value: object) -> Iterator[None]:
    """`holder.name` is `value` inside."""
    kept = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, kept)


@contextmanager
def _switch(enabled: Callable[[], bool], enable: Callable[[bool], None]) -> Iterator[None]:
    kept = enabled()
    enable(True)
    try:
        yield
    finally:
        enable(kept)
