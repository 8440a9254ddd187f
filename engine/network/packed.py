"""Pack plain modules into the weights that the fused operators read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..kernels.conv3d import Weight, pack_tiles, pack_weight, winograd2d
from ..kernels.norm_act import Norm
from ..precision.forms import Balancer, Form, Operands
from ..runtime.weights import Conv

#: Convolutions of at most this many products per position and tap also keep weights for a clip's first two frames: the
#: convolutions at 4x and 8x of the published SeedVR2 decoder are two thirds of its work and, in fp16, 30 of 246 MB.
EARLY = 512 * 256
#: Convolutions of so many weights at the latent's own resolution stay direct: they make 4.7 % of the products of
#: HunyuanVideo 1.5's decoder and 3.9 % of Wan 2.2's, and would be 2.2 of 3.8 GB and 1.0 of 1.8 GB in Winograd form.
HEAVY = 1 << 24


def conv_of(conv: Any, operands: Operands, normed: bool = True) -> Conv:
    """Pack a convolution in space, or in space and time. `normed` says that a norm bounds its input."""
    form = operands.form(conv.key, normed)
    kernel, stride = clip_kernel(conv.weight), (1, 1, *conv.stride)[-3:]
    n, c, taps = kernel.shape[:3]
    strided = stride != (1, 1, 1)
    # Values that no norm bounds may be so large that the differences Winograd takes overflow.
    suits = normed and not strided and kernel.shape[3:] == (3, 3)
    tiles = suits and in_tiles(operands, form, c, n, taps)
    early = taps == 3 and n * c <= EARLY and conv.head == "replicate" and not strided and not conv.after

    def make(balancer: Balancer | None) -> tuple[Weight, Tensor]:
        if tiles:  # 16 bit only: there are no scales to balance
            return pack_tiles(kernel, form.dtype, early=early), conv.bias.float()
        return pack_weight(kernel, form.dtype, early=early, balance=balancer), conv.bias.float()

    return operands.once(conv.key, form, lambda: packed_conv(conv.key, form, make, stride=stride))


def in_tiles(operands: Operands, form: Form, channels: int, outputs: int, depth: int) -> bool:
    """Check whether a convolution has the Winograd form: in 16 bit, with sums in fp32, and not HEAVY.

    Args:
        channels, outputs, depth: of its weight [outputs, channels, depth, 3, 3]; of one phase.
    """
    if not operands.winograd or form.half_accumulate:
        return False
    if operands.scale == 1 and outputs * channels * depth * 9 >= HEAVY:
        return False
    return winograd2d.takes(form.dtype, channels, outputs)


def outer_conv_of(conv: Any, operands: Operands) -> Conv:
    """Pack a component's first or last convolution, which is direct: results of the last one may have another type than
    its operands, which the Winograd form does not make, and what the first one rounds goes through all others, for less
    than a thousandth of the products."""
    return conv_of(conv, replace(operands, winograd=False))


def clip_kernel(weight: Tensor) -> Tensor:
    """Return a convolution's weight as [K, C, kt, kh, kw], with kt = 1 for a convolution of single frames."""
    return weight.unsqueeze(2) if weight.dim() == 4 else weight


def packed_conv(
    key: str, form: Form, make: Callable[[Balancer | None], tuple[Weight, Tensor]],
    stride: tuple[int, int, int] = (1, 1, 1),
) -> Conv:  # fmt: skip
    """Return a convolution in a form; make(balancer) packs its weight and bias with scales of the balancer's."""
    balancer = form.balancer()
    weight, bias = make(balancer)
    gain = None if balancer is None else balancer.gain
    return Conv(key, weight, bias, stride=stride, scale=form.scale, gain=gain, half_accumulate=form.half_accumulate)


def norm_of(norm: nn.Module) -> Norm:
    """Pack a norm over groups of channels, conditioned or not, or over all channels of a position, or an activation
    without a norm."""
    if isinstance(norm, nn.GroupNorm):
        several = getattr(norm, "chunk", None) is not None
        return Norm("group", norm.weight.float(), norm.bias.float(), norm.num_groups, norm.eps, several)
    if hasattr(norm, "condition"):
        return replace(norm_of(norm.norm_layer), condition=norm.condition())
    if not hasattr(norm, "gamma"):
        return Norm("rms", eps=norm.eps) if hasattr(norm, "eps") else Norm("none")
    return Norm("l2", norm.gamma.flatten().float(), eps=norm.eps)


def tensor_bytes(value: object) -> int:
    """Return the bytes of all distinct tensors in nested objects, lists and tuples."""
    return sum({id(v): v.numel() * v.element_size() for v in _parts(value) if isinstance(v, Tensor)}.values())


def in_winograd(value: object) -> tuple[int, int]:
    """Return how many convolutions in nested objects, lists and tuples have the Winograd form, and how many there
    are."""
    found = {v.key: v.weight.tiles for v in _parts(value) if isinstance(v, Conv)}
    return sum(found.values()), len(found)


def _parts(value: object) -> Iterator[object]:
    """Yield a value and all that is in it, in nested objects, lists and tuples."""
    yield value
    if isinstance(value, Tensor):
        return
    inside = value if isinstance(value, (list, tuple)) else vars(value).values() if hasattr(value, "__dict__") else ()
    for item in inside:
        yield from _parts(item)
