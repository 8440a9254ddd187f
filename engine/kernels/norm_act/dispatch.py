"""Dispatch of norm_act: statistics -> coefficients -> one pass that writes the next convolution's buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..conv3d.types import QUANT_MAX, Partials, stat_span
from ..launching import launcher
from ..observe import observed
from ..targets import Target, interpreted, kernels_for, on_device
from . import reference
from .schedules import STAT_ELEMENTS, STAT_ROWS, WARPS, positions
from .types import Norm, Store

_DEFAULT = Store()
_KINDS = ("group", "l2", "rms", "none")
_BORDERS = ("zero", "replicate", "reflect")


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()


def _strides(x: Tensor) -> tuple[int, list[int]]:
    unit = 16 if all(s % 16 == 0 for s in x.stride()[:3]) else 1
    return unit, [s // unit for s in x.stride()[:3]]


def _kernels(x: Tensor, backend: str) -> Target | None:
    return None if x.dtype == torch.float64 else kernels_for(x.device, backend)


@observed
def statistics(x: Tensor, groups: int, backend: str = "auto") -> Partials:
    """Return partial sums of [D, H, W, C] (unit channel stride), where no convolution's epilogue made them.

    Bands that start at multiples of STAT_ROWS rows concatenate to the frame's own sums.
    """
    if x.dim() != 4 or x.stride(3) != 1 or x.shape[3] % groups:
        raise ValueError(f"statistics need [D, H, W, C] with unit channel stride and C divisible by {groups}")
    here = _kernels(x, backend)
    if here is None:
        return reference.statistics(x, groups)
    d, h, w, c = x.shape
    wide = _power_of_two(c)
    span, blocks = stat_span(c, groups, wide), -(-h // STAT_ROWS)
    data = torch.empty(d, blocks, c // span, 2, dtype=torch.float32, device=x.device)
    unit, strides = _strides(x)
    with on_device(x):
        launcher("norm_act.statistics_kernel", here)[(blocks, d)](
            x, data, h, w, *strides, C=c, CP=wide, SPAN=span, UNIT=unit, ROWS=STAT_ROWS,
            BP=max(STAT_ELEMENTS // wide, 1), num_warps=WARPS,
        )  # fmt: skip
    return Partials(data, span)


@observed
def coefficients(partials: Partials, norm: Norm, positions: int, backend: str = "auto",
                 health: Tensor | None = None) -> Tensor:
    """Turn partial sums into coefficients [D, 2, C] float32: y = x * [:, 0] + [:, 1].

    Every block is summed in its fixed order in fp64, so neither launch nor band moves a bit.

    Args:
        positions: H * W of the whole frame.
        health: float32 [], set to NaN if a value was not finite, or too large for its square to be.
    """
    here = kernels_for(partials.data.device, backend)
    if here is None:
        return reference.coefficients(partials, norm, positions, health)
    d, blocks, columns, _ = partials.data.shape
    c = columns * partials.span
    count = positions * (c // norm.groups) * (d if norm.per_chunk else 1)
    coefs = torch.empty(d, 2, c, dtype=torch.float32, device=partials.data.device)
    affine = norm.weight is not None and norm.bias is not None
    with on_device(partials.data):
        launcher("norm_act.coefficients_kernel", here)[(norm.groups, d)](
            partials.data, norm.weight if affine else coefs, norm.bias if affine else coefs, coefs,
            coefs if health is None else health, blocks,
            float(count), norm.eps, C=c, GROUPS=norm.groups, COLUMNS=columns, AFFINE=affine, HEALTH=health is not None,
            POOL=norm.per_chunk, BB=1024, BC=_power_of_two(columns // norm.groups),
            BG=_power_of_two(c // norm.groups), num_warps=4,
        )  # fmt: skip
    return coefs


@observed
def norm_act(x: Tensor, norm: Norm, buffer: Tensor, *, slot: int = 0, border: int = 1, store: Store = _DEFAULT,
             coefs: Tensor | None = None, first: int | None = None, backend: str = "auto",
             health: Tensor | None = None) -> None:
    """Normalise (or just copy, kind none) and write bordered frames.

    Args:
        x: [D, H, W, C], any strides.
        buffer: [slots, H + 2 * border, W + 2 * border, Cp] contiguous, Cp >= C (the rest is zeroed).
        slot: frame d goes to slot (slot + d) mod slots.
        coefs: from `coefficients`; without them a group norm sums x itself first.
        first: the buffer holds a band only, the bordered frame's rows from this one on.
        health: float32 [], set to NaN if a value of x was not finite, which 8 bit would hide, or too large for its norm
            to be; a group norm with `coefs` has been checked in `coefficients`.

    Raises:
        ValueError: shapes do not fit.
    """
    d, h, w, c = x.shape
    if norm.kind not in _KINDS or store.border not in _BORDERS:
        raise ValueError(f"unknown norm {norm.kind!r} or border {store.border!r}")
    if store.border == "reflect" and min(h, w) <= border:
        raise ValueError(f"a frame of {h}x{w} is too small to reflect {border} of its rows and columns")
    if buffer.dim() != 4:
        raise ValueError(f"buffer {list(buffer.shape)} is not [slots, rows, columns, channels]")
    (rows, columns, co), whole = buffer.shape[1:], h + 2 * border
    fits = rows == whole if first is None else 0 <= first <= whole - rows
    if not buffer.is_contiguous() or not fits or columns != w + 2 * border:
        raise ValueError(f"buffer {list(buffer.shape)} does not hold {h}x{w} with a border of {border}")
    first = first or 0
    if d > buffer.shape[0] or not 0 <= slot < buffer.shape[0] or co < c:
        raise ValueError(f"{d} frames of {c} channels do not fit slot {slot} of {list(buffer.shape)}")
    if norm.kind == "group" and (norm.weight is None) != (norm.bias is None):
        raise ValueError("a group norm has both weight and bias, or neither")
    if norm.kind == "group" and coefs is None:
        coefs = coefficients(statistics(x, norm.groups, backend), norm, h * w, backend, health)
    here = _kernels(x, backend)
    if norm.condition is not None:
        if store.border != "zero" or x.stride(3) != 1:
            raise ValueError("a conditioned norm takes unit channel strides and writes frames beside zeros")
        for a, b, latent in norm.condition.runs(d):
            affine, at = norm.condition.affine(latent), (slot + a) % buffer.shape[0]
            if health is not None and buffer.dtype in QUANT_MAX:  # which hides what is not finite
                health.add_(affine.sum(), alpha=0.0)
            _conditioned(x[a:b], norm, affine, coefs[a:b], store, buffer, at, border, first, here)
        return
    if here is None:
        coefs = coefs if norm.kind == "group" else None
        reference.norm_act(x, norm, coefs, store, buffer, slot, border, first, health)
        return
    wide = _power_of_two(co)
    dense = x.stride(3) == 1
    unit, strides = _strides(x) if dense else (1, list(x.stride()[:3]))
    affine = norm.kind in ("l2", "rms")  # a group norm's weights are in its coefficients
    absent = coefs if coefs is not None else buffer
    arguments = (
        x, absent, norm.weight if norm.weight is not None else absent, norm.bias if norm.bias is not None else absent,
        store.gain if store.gain is not None else absent, absent if health is None else health, buffer, buffer.shape[0],
        slot, h, w, first, rows, *strides, x.stride(3), norm.eps,
        1.0 / store.scale if buffer.dtype in QUANT_MAX else 1.0,
    )  # fmt: skip
    constants = dict(
        C=c, CO=co, CP=wide, KIND=norm.kind, WEIGHT=affine and norm.weight is not None,
        BIAS=affine and norm.bias is not None, HEALTH=health is not None and norm.kind != "group",
        GAINS=store.gain is not None, SILU=store.silu,
        EDGE=store.border, CLAMP=buffer.dtype in QUANT_MAX, ROUND=buffer.dtype == torch.int8,
        UNIT=unit, DENSE=dense, FAST=not (interpreted() and x.is_cpu),
    )  # fmt: skip
    limit, block = QUANT_MAX.get(buffer.dtype, 0.0), positions(wide)
    with on_device(x):
        launcher("norm_act.norm_act_kernel", here)[(-(-(rows * columns) // block), d)](
            *arguments, limit, **constants, BORDER=border, BP=block, num_warps=WARPS
        )


def _conditioned(x: Tensor, norm: Norm, affine: Tensor, coefs: Tensor, store: Store, buffer: Tensor, slot: int,
                 border: int, first: int, here: Target | None) -> None:  # fmt: skip
    """Write frames that take one latent; affine: its [h, w, 2C]."""
    d, h, w, c = x.shape
    rows, columns, co = buffer.shape[-3:]
    each = h // affine.shape[0]
    if (each * affine.shape[0], each * affine.shape[1]) != (h, w):
        raise ValueError(f"frames of {h}x{w} are no multiple of latents of {affine.shape[0]}x{affine.shape[1]}")
    if here is None:
        reference.norm_act(x, norm, coefs, store, buffer, slot, border, first, affine=affine)
        return
    wide, (unit, strides), eighth = _power_of_two(co), _strides(x), buffer.dtype in QUANT_MAX
    block = positions(wide)
    with on_device(x):
        launcher("norm_act.conditioned_kernel", here)[(-(-(rows * columns) // block), d)](
            x, coefs, affine, coefs if store.gain is None else store.gain, buffer, buffer.shape[0], slot, h, w, first,
            rows, *strides, each, affine.shape[1], 1.0 / store.scale if eighth else 1.0,
            QUANT_MAX.get(buffer.dtype, 0.0), C=c, CO=co, CP=wide, GAINS=store.gain is not None, SILU=store.silu,
            CLAMP=eighth, ROUND=buffer.dtype == torch.int8, UNIT=unit, FAST=not (interpreted() and x.is_cpu),
            BORDER=border, BP=block, num_warps=WARPS,
        )  # fmt: skip
