"""Peak memory of a torch program, found by running it on the meta device and following every storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels import exact
from .allocator import Allocator, Block

T = TypeVar("T")


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
    """Counts bytes of live storages; an allocator follows what it would reserve for them. Convolutions also hold a
    re-laid-out input, weight and output while they run."""

    def __init__(self, allocator: Allocator | None) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.allocator = allocator
        self._holders: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        self._held: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_PLACE:  # nothing new, nothing to compute
            return args[0]
        out = _result(func, args, kwargs or {})
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, Tensor):
                self._hold(result)
        extra = 0
        if func is torch.ops.aten.convolution.default:
            extra = _nbytes(args[0]) + _nbytes(args[1]) + _nbytes(out)
            if self.allocator is not None:
                self.allocator.give(self.allocator.take(extra))
        self.peak = max(self.peak, self.live + extra)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._holders:
            self._holders[key] = 0
            self.live += size
            if self.allocator is not None and size:
                self._blocks[key] = self.allocator.take(size)
        self._holders[key] += 1
        ref = weakref.ref(tensor, self._release)
        self._held[id(ref)] = ref, key, size

    def _release(self, ref: weakref.ref[Tensor]) -> None:
        _, key, size = self._held.pop(id(ref))
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.live -= size
            if key in self._blocks:
                self.allocator.give(self._blocks.pop(key))


#: Operator -> whether what it returns is new, and what it is given stays as it is. One that does not say so is not.
_MAKES: dict[Any, bool] = {_aten._unsafe_view.default: False}
#: Operator and arguments without values -> sizes, strides and types of what it makes of them.
_MADE: dict[Any, list[tuple[Any, ...]]] = {}
_MOST_MADE = 1 << 14


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func's, on the meta device. torch's rules for that are slow Python for many operators (1 ms for a group norm), so
    each question is asked once."""
    if func not in _MAKES:
        _MAKES[func] = not any(a.alias_info for a in (*func._schema.arguments, *func._schema.returns))
    if not _MAKES[func]:
        return func(*args, **kwargs)
    question = func, _outline(args), _outline(tuple(kwargs.items()))
    if question in _MADE:
        made = [torch.empty_strided(size, by, dtype=dtype, device="meta") for size, by, dtype in _MADE[question]]
        return made if len(made) > 1 else made[0]
    out = func(*args, **kwargs)
    results = out if isinstance(out, (tuple, list)) else [out]
    if results and all(isinstance(r, Tensor) for r in results):
        if len(_MADE) >= _MOST_MADE:
            _MADE.clear()
        _MADE[question] = [_outline(r) for r in results]
    return out


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(map(_outline, value)) if isinstance(value, (tuple, list)) else value


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class PeakMemory:
    """`with PeakMemory() as m: program()`; then `m.peak` is in bytes. Only tensors made inside are counted."""

    def __init__(self, products: bool = False, reserves: bool = False) -> None:
        """products: convolutions are matrix products (engine/kernels/exact.py). reserves: `peak` is what torch's
        caching allocator reserves."""
        self._follow = _Follow(Allocator() if reserves else None)
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
        allocator = self._follow.allocator
        return max(self._follow.peak, 0 if allocator is None else allocator.reserved)

    def above(self, work: Callable[[], T]) -> tuple[T, int]:
        """work(), and the bytes that it needs at most besides what is there before it."""
        follow = self._follow
        before, start = follow.peak, follow.live
        follow.peak = start
        result = work()
        more, follow.peak = follow.peak - start, max(before, follow.peak)
        return result, more

    def need(self, more: int) -> None:
        """As if work that needs so many bytes besides what is there were done."""
        self._follow.peak = max(self._follow.peak, self._follow.live + more)


def peak_bytes(program: Callable[[], Any], memory: PeakMemory | None = None) -> int:
    """Peak bytes of the tensors `program` makes on the meta device, as `memory` counts."""
    # Under a caller's inference mode, as ComfyUI's, composite operators would arrive whole: their temporaries unseen.
    with torch.inference_mode(False), torch.no_grad(), memory or PeakMemory() as memory:
        program()
    return memory.peak
