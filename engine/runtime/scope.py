"""Settings of torch for our own calls, restored afterwards: no global setting changes unseen by the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..kernels.attention import attention
from ..kernels.precision import fp32_math
from ..kernels.settings import Setting
from ..system.devices import current

_CUDA = torch.backends.cuda
#: Not exact: another algorithm rounds differently.
CUDNN_BENCHMARK = Setting.attribute(torch.backends.cudnn, "benchmark", exact=False)
_HALF_SUMS = Setting.attribute(_CUDA.matmul, "allow_fp16_accumulation", exact=False)  # since torch 2.7
_FLASH = Setting(_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp, exact=True)
#: The type of tensors that are made without naming one, and of quotients of integers.
_DEFAULT_TYPE = Setting(torch.get_default_dtype, torch.set_default_dtype, exact=torch.float32)
#: Refuses operations whose results may differ between two runs, and fills new memory; 0 does neither. Runs here use no
#: such operation, but products of cuBLAS are refused with them, and cuDNN takes other algorithms.
_DETERMINISTIC = Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, exact=0)
_CUDNN_DETERMINISTIC = Setting.attribute(torch.backends.cudnn, "deterministic", exact=False)
#: Products and convolutions in fp32 on a CPU: "medium" precision of products, which many scripts ask for, is bf16.
_CPU = torch.backends.mkldnn
if hasattr(_CPU, "matmul"):  # since torch 2.9
    _CPU_FP32 = [Setting.attribute(of, "fp32_precision", exact="ieee") for of in (_CPU.matmul, _CPU.conv)]
else:
    _CPU_FP32 = [Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, exact="highest")]
_EFFICIENT = Setting(_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp, exact=True)


@contextmanager
def as_usual(*kinds: str) -> Iterator[None]:
    """Let torch compute inside as in a new process, whatever the caller has set: without autocast, with float32 where
    no type is named, in full fp32 on a CPU, and not in deterministic mode. Not the device of new tensors: code of ours
    names it, and the caller's code, such as an iterable of frames that is read inside, finds its own.

    Enter it where a call comes from outside; it also decorates functions. Process-wide settings are restored when the
    last of the calls that overlap is over, also after an error.

    Args:
        kinds: types of devices to switch autocast off for, besides "cpu" and "cuda".
    """
    with ExitStack() as stack:
        for kind in {"cpu", "cuda", *kinds}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        for setting in (_DEFAULT_TYPE, _DETERMINISTIC, *_CPU_FP32):
            # Nearly always it is so, and holding all of them takes 40 us. "none": nobody asks for less than "ieee".
            if not setting.is_one_of(setting.exact, "none"):
                stack.enter_context(setting.hold(setting.exact))
        yield


@contextmanager
def scoped_math(
    device: torch.device, *, tf32: bool = False, cudnn_benchmark: bool = False, flash_attention: bool = True
) -> Iterator[None]:
    """Set how and where torch computes in a run: `as_usual`, without gradients, and as these arguments say.

    On CUDA, `device` is the thread's current one, so that events, streams and libraries belong to it; fp16 products
    never sum in fp16; torch's attention kernels that need no score matrix are on.

    Args:
        device: device of the run.
        tf32: compute fp32 in TF32.
        cudnn_benchmark: let cuDNN try its algorithms out; otherwise it takes the first.
        flash_attention: false makes attention of plain products in fp32 on every device (a block of queries at a time,
            so that memory stays linear).
    """
    with torch.no_grad(), as_usual(device.type), ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(current(device))
            stack.enter_context(fp32_math(tf32))
            stack.enter_context(CUDNN_BENCHMARK.hold(cudnn_benchmark))
            stack.enter_context(_CUDNN_DETERMINISTIC.hold(False))
            if hasattr(_CUDA.matmul, "allow_fp16_accumulation"):
                stack.enter_context(_HALF_SUMS.hold(False))
            stack.enter_context(_FLASH.hold(True))
            stack.enter_context(_EFFICIENT.hold(True))
        stack.enter_context(attention_scope(flash_attention))
        yield


def attention_scope(flash_attention: bool) -> AbstractContextManager[object]:
    """Return the part of `scoped_math` that also changes the memory a run takes: dry runs need it too."""
    return ExitStack() if flash_attention else _PlainAttention()


class _PlainAttention(TorchFunctionMode):
    """Replaces torch's attention kernels in this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and len(args) == 3 and not kwargs:
            q, k, v = (t.flatten(0, -3) for t in args)
            return attention.reference(q, k, v).reshape(args[0].shape)
        return func(*args, **(kwargs or {}))
