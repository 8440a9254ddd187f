"""Peak memory of a torch program, found by running it on the meta device and following every storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels import exact


class _LeanAttention(TorchFunctionMode):
    """Attention as the fused kernels do it: one output, no score matrix (the meta device would build it)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
_IN_PLACE = {_aten.add_.Tensor, _aten.mul_.Tensor, _aten.silu_.default, _aten.copy_.default, _aten.addmm_.default}


class _Products(TorchFunctionMode):
    """Convolutions as fp32 has them on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.conv3d:
            return exact.conv3d(*args[:5], taps=1)
        return func(*args, **(kwargs or {}))


class _Follow(TorchDispatchMode):
    """Counts bytes of live storages. Convolutions also hold a re-laid-out input and output while they run."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_PLACE:  # nothing new, nothing to compute
            return args[0]
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (tuple, list)) else (out,)
        for result in results:
            if isinstance(result, Tensor):
                self._hold(result)
        extra = 0
        if func is torch.ops.aten.convolution.default:
            extra = _nbytes(args[0]) + _nbytes(out)
        self.peak = max(self.peak, self.live + extra)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._holders:
            self._holders[key] = 0
            self.live += size
        self._holders[key] += 1
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.live -= size


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class PeakMemory:
    """`with PeakMemory() as m: program()`; then `m.peak` is in bytes. Only tensors made inside are counted."""

    def __init__(self, products: bool = False) -> None:
        """products: convolutions are matrix products (engine/kernels/exact.py)."""
        self._follow = _Follow()
        self._modes = [_LeanAttention(), *([_Products()] if products else []), self._follow]

    def __enter__(self) -> PeakMemory:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, value, trace)

    @property
    def peak(self) -> int:
        return self._follow.peak


def peak_bytes(program: Callable[[], Any], products: bool = False) -> int:
    """Peak bytes of the tensors `program` makes on the meta device; products as for PeakMemory."""
    # Under a caller's inference mode, as ComfyUI's, composite operators would arrive whole: their temporaries unseen.
    with torch.inference_mode(False), torch.no_grad(), PeakMemory(products) as memory:
        program()
    return memory.peak
