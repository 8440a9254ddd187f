"""Sizes, strides and types of the results of torch's operators on the meta device.

For many operators torch has rules in Python there, which import its compiler or sympy when they are first used: 1.8 and
0.55 s of CPU. The rules of this module import neither."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Layout(NamedTuple):
    """Shape, strides and type of one tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        """Return the layout of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype)

    @classmethod
    def ordered(cls, shape: Sequence[int], order: Iterable[int], dtype: torch.dtype) -> Layout:
        """Return a layout without gaps; `order`: the axes from the outermost to the innermost."""
        strides, size = [1] * len(shape), 1
        for axis in reversed(list(order)):
            strides[axis] = size
            size *= max(shape[axis], 1)
        return cls(tuple(shape), tuple(strides), dtype)

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """Return the contiguous layout of a shape."""
        return cls.ordered(shape, range(len(shape)), dtype)

    def made(self) -> Tensor:
        """Return a tensor of this layout on the meta device."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def _order(tensors: Sequence[Tensor]) -> list[int]:
    """Return the result's axes, outermost first: as in the first tensor (all have one shape) that orders them."""
    axes, plain = range(tensors[0].dim()), all(t.is_contiguous() for t in tensors)
    last = len(axes) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    if plain != last:
        return [0, 2, 3, 1] if last else list(axes)

    def swapped(a: int, b: int) -> int:
        for t in tensors:
            x, y = t.stride(a), t.stride(b)
            if x and y and (x != y or t.shape[a] > t.shape[b]):
                return 1 if x >= y else -1
        return 0

    order = list(reversed(axes))
    for i in axes[1:]:
        for j in reversed(range(i)):
            found = swapped(order[j], order[i])
            if found > 0:
                order[j], order[i], i = order[i], order[j], j
            elif found < 0:
                break
    return order[::-1]


def _each(*args: Any, floats: bool = False, dtype: torch.dtype | None = None, alpha: float = 1) -> Layout:
    """Return the result of an elementwise function. floats: it gives floating-point values of integers, too."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if dtype is None:
        dtype = torch.result_type(*args) if len(args) == 2 else args[0].dtype
        if floats and not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
    if any(t.shape != tensors[0].shape for t in tensors):
        tensors = list(torch.broadcast_tensors(*tensors))
    return Layout.ordered(tensors[0].shape, _order(tensors), dtype)


def _channels_last(x: Tensor) -> bool:
    """Check if torch takes the strides for a channels-last layout."""
    least, axes = 0, (1, *range(x.dim() - 1, 1, -1), 0)
    if x.dim() not in (4, 5) or not x.stride(1):
        return False
    for axis in axes:
        size, stride = x.shape[axis], x.stride(axis)
        if not size or stride < least or (not axis and least == x.stride(1)):
            return False
        least = stride * size if size > 1 else stride
    return True


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Layout:
    parts = [t for t in tensors if t.dim() > 1 or t.numel()] or tensors  # torch lets empty ones of one axis pass
    shape, dim = list(parts[0].shape), dim % parts[0].dim()
    shape[dim] = sum(t.shape[dim] for t in parts)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    order = list(range(len(shape)))
    if all(map(_channels_last, tensors)):
        order = [0, *order[2:], 1]
    return Layout.ordered(shape, order, dtype)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Layout:
    dim %= tensors[0].dim() + 1
    if dim == tensors[0].dim():
        return _joined([t.unsqueeze(dim) for t in tensors], dim)
    shape = list(tensors[0].shape)
    return Layout.of(_joined(tensors, dim).made().view(*shape[:dim], len(tensors), *shape[dim:]))


def _mean(x: Tensor, dims: Sequence[int] | None, keep: bool = False, *, dtype: torch.dtype | None = None) -> Layout:
    gone = {d % x.dim() for d in (dims or range(x.dim()))}
    shape = [1 if i in gone else n for i, n in enumerate(x.shape) if keep or i not in gone]
    return Layout.dense(shape, dtype or x.dtype)


def _product(*tensors: Tensor) -> Layout:
    *_, a, b = tensors
    return Layout.dense((*a.shape[:-1], *b.shape[a.dim() - 1 :]), a.dtype)


def _empty(shape: Sequence[int], *, dtype: Any = None, device: torch.device | None = None, **_: Any) -> Layout | None:
    if device is None or device.type != "meta":
        return None
    return Layout.dense(shape, dtype or torch.get_default_dtype())


def _of_one_type(*tensors: Tensor, **_: float) -> Layout | None:
    return _each(*tensors) if len({t.dtype for t in tensors}) == 1 else None


def _copy(x: Tensor, *_: float, dtype: Any = None, memory_format: Any = None, **__: Any) -> Layout | None:
    if memory_format in (None, torch.preserve_format):
        return _each(x, dtype=dtype or x.dtype)
    return Layout.dense(x.shape, dtype or x.dtype) if memory_format == torch.contiguous_format else None


def _repeated(x: Tensor, times: Sequence[int]) -> Layout:
    shape = (*[1] * (len(times) - x.dim()), *x.shape)
    return Layout.dense([n * t for n, t in zip(shape, times, strict=True)], x.dtype)


def _padded(x: Tensor, by: Sequence[int]) -> Layout:
    shape = list(x.shape)
    for axis, (before, behind) in enumerate(zip(by[::2], by[1::2], strict=True), 1):
        shape[-axis] += before + behind
    return Layout.dense(shape, x.dtype)


def _resized(x: Tensor, size: Sequence[int], *_: Any) -> Layout:
    order = [0, *range(2, x.dim()), 1] if _channels_last(x) else range(x.dim())
    return Layout.ordered((*x.shape[:2], *size), order, x.dtype)


def _pooled(x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), *more: Any) -> Layout | None:
    if more or tuple(stride or kernel) != tuple(kernel):
        return None
    return Layout.dense((*x.shape[:2], *(n // k for n, k in zip(x.shape[2:], kernel, strict=True))), x.dtype)


def _picked(x: Tensor, places: Sequence[Tensor | None]) -> Layout | None:
    given = [(axis, each) for axis, each in enumerate(places) if each is not None]
    axis, each = given[0]
    if len(given) > 1 or each.dtype == torch.bool or not x.is_contiguous():
        return None
    return Layout.dense((*x.shape[:axis], *each.shape, *x.shape[axis + 1 :]), x.dtype)


def _weighed(x: Tensor, _: int, widened: bool) -> Layout:
    return Layout.dense(x.shape, torch.float32 if widened else x.dtype)


def _convolved(x: Tensor, weight: Tensor, bias: Any, stride: Sequence[int], padding: Sequence[int],
               dilation: Sequence[int], transposed: bool, *_: Any) -> Layout | None:  # fmt: skip
    if transposed or not (x.dim() == 5 or (x.dim() == 4 and x.is_contiguous())):
        return None
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return Layout.dense((x.shape[0], weight.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1
                                                         for n, k, s, p, d in sizes)), x.dtype)  # fmt: skip


def _rows(x: Tensor, shape: Sequence[int], *_: Any) -> list[Layout]:
    sums = Layout.dense((*x.shape[: x.dim() - len(shape)], *[1] * len(shape)), torch.float32)
    return [Layout.dense(x.shape, x.dtype), sums, sums]


def _range(*ends: int, dtype: Any = None, device: torch.device | None = None, **_: Any) -> Layout | None:
    if device is None or device.type != "meta" or not all(isinstance(end, int) for end in ends):
        return None
    return Layout.dense((ends[-1] - sum(ends[:-1]),), dtype or torch.int64)


#: Since torch 2.14 group norms of channels-last frames return contiguous results, as on a GPU, and by a rule in Python,
#: which imports sympy.
_GROUPS_MAKE_ROWS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


def _groups(x: Tensor, weight: Tensor | None, bias: Tensor | None, count: int, channels: int, size: int, groups: int,
            eps: float) -> list[Layout] | None:  # fmt: skip
    if x.stride(1) == 1 and not x.is_contiguous() and not _GROUPS_MAKE_ROWS:
        return None
    sums = Layout.dense((count, groups), x.dtype)
    return [Layout.dense(x.shape, x.dtype), sums, sums]


_floats, _bools = functools.partial(_each, floats=True), functools.partial(_each, dtype=torch.bool)
#: Operator -> function that returns the layout of its results; where that returns None, torch's own rule is used.
RULES: dict[Any, Callable[..., Layout | list[Layout] | None]] = {
    **dict.fromkeys((
        aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.pow.Tensor_Scalar, aten.pow.Scalar,
        aten.remainder.Scalar, aten.floor_divide.default, aten.clamp_min.default, aten.abs.default,
        aten.silu.default, aten.gelu.default, aten.relu.default,
    ), _each),
    **dict.fromkeys((
        aten.div.Tensor, aten.rsqrt.default, aten.sigmoid.default, aten.tanh.default,
        aten.sin.default, aten.cos.default, aten.exp.default, aten.log.default,
    ), _floats),
    aten.eq.Tensor: _bools,
    aten.addcmul.default: _of_one_type,
    **dict.fromkeys((
        aten.clone.default, aten.empty_like.default, aten.zeros_like.default, aten.full_like.default,
    ), _copy),
    aten.repeat.default: _repeated,
    aten.replication_pad3d.default: _padded,
    aten.reflection_pad3d.default: _padded,
    aten.upsample_nearest3d.default: _resized,
    aten.avg_pool3d.default: _pooled,
    aten.index.Tensor: _picked,
    **dict.fromkeys((aten.bmm.default, aten.mm.default, aten.addmm.default, aten.mv.default), _product),
    aten.convolution.default: _convolved,
    aten.native_layer_norm.default: _rows,
    aten.arange.default: _range,
    aten.arange.start: _range,
    aten.cat.default: _joined,
    aten.stack.default: _stacked,
    aten.eye.default: lambda count, **like: _empty((count, count), **like),
    aten.zeros.default: _empty,  # torch 2.6 imports sympy for these
    aten.ones.default: _empty,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _mean,
    aten.linalg_vector_norm.default: lambda x, order, *dims, **like: _mean(x, *dims, **like),
    aten.native_group_norm.default: _groups,
    aten._softmax.default: _weighed,
}  # fmt: skip


#: In-place operators by id: they make nothing new, and there are no values to compute.
IN_PLACE = {
    id(func) for func in (
        aten.add_.Tensor, aten.mul_.Tensor, aten.silu_.default, aten.copy_.default, aten.addmm_.default,
        aten.uniform_.default, aten.addcmul_.default, aten.clamp_max_.default,
    )
}  # fmt: skip


def result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return func(*args, **kwargs) on the meta device, by one of RULES where there is one."""
    rule = RULES.get(func)
    if rule is not None and all(map(_valueless, args)):
        made = rule(*args, **kwargs)
        if made is not None:
            return made.made() if isinstance(made, Layout) else tuple(each.made() for each in made)
    return func(*args, **kwargs)


def _valueless(arg: Any) -> bool:
    if isinstance(arg, Tensor):
        return arg.is_meta
    return not isinstance(arg, (list, tuple)) or all(map(_valueless, arg))


class ByRules(TorchDispatchMode):
    """Context in which results on the meta device are made by RULES."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or torch imports its compiler to make it skip this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if id(func) in IN_PLACE and args[0].is_meta:
            return args[0]
        return result(func, args, kwargs or {})
