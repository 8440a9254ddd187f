"""Normalise, activate, quantise and pad: statistics -> coefficients -> one pass that writes the next convolution's
buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..conv3d.types import QUANT_MAX, Partials, stat_span
from ..launching import launcher
from ..operators import HALVES, Takes, operator, strides_of
from ..targets import Target, interpreted
from . import reference
from .types import Norm, Store

_DEFAULT = Store()
_KINDS = ("group", "l2", "rms", "none")
_BORDERS = ("zero", "replicate", "reflect")
_TAKES = Takes(*HALVES, torch.float32)
#: Elements of one program of WARPS warps, for whole rows of channels: accesses of 16 bytes, two or more in flight for
#: each thread.
ELEMENTS, WARPS = 4096, 4
#: Image rows summed by one program of the statistics pass (its blocks never depend on the launch).
STAT_ROWS = 1


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()


def _check_statistics(x: Tensor, groups: int) -> None:
    if x.dim() != 4 or x.stride(3) != 1 or x.shape[3] % groups:
        raise ValueError(f"statistics need [D, H, W, C] with unit channel stride and C divisible by {groups}")


@operator("statistics_kernel", reference=reference.statistics, check=_check_statistics, takes=_TAKES)
def statistics(here: Target, x: Tensor, groups: int) -> Partials:
    """Return partial sums of [D, H, W, C] (unit channel stride), where no convolution's epilogue made them.

    Bands that start at multiples of STAT_ROWS rows concatenate to the frame's own sums.
    """
    d, h, w, c = x.shape
    wide = _power_of_two(c)
    span, blocks = stat_span(c, groups, wide), -(-h // STAT_ROWS)
    data = torch.empty(d, blocks, c // span, 2, dtype=torch.float32, device=x.device)
    unit, strides = strides_of(x)
    launcher("norm_act.statistics_kernel", here)[(blocks, d)](
        x, data, h, w, *strides, C=c, CP=wide, SPAN=span, UNIT=unit, ROWS=STAT_ROWS,
        BP=max(ELEMENTS // wide, 1), num_warps=WARPS,
    )  # fmt: skip
    return Partials(data, span)


@operator("coefficients_kernel", reference=reference.coefficients)
def coefficients(here: Target, partials: Partials, norm: Norm, positions: int, *,
                 health: Tensor | None = None) -> Tensor:
    """Turn partial sums into coefficients [D, 2, C] float32: y = x * [:, 0] + [:, 1].

    Every block is summed in its fixed order in fp64, so neither launch nor band moves a bit.

    Args:
        positions: H * W of the whole frame.
        health: float32 [], set to NaN if a value was not finite, or too large for its square to be.
    """
    d, blocks, columns, _ = partials.data.shape
    c = columns * partials.span
    count = positions * (c // norm.groups) * (d if norm.per_chunk else 1)
    coefs = torch.empty(d, 2, c, dtype=torch.float32, device=partials.data.device)
    affine = norm.weight is not None and norm.bias is not None
    launcher("norm_act.coefficients_kernel", here)[(norm.groups, d)](
        partials.data, norm.weight if affine else coefs, norm.bias if affine else coefs, coefs,
        coefs if health is None else health, blocks,
        float(count), norm.eps, C=c, GROUPS=norm.groups, COLUMNS=columns, AFFINE=affine, HEALTH=health is not None,
        POOL=norm.per_chunk, BB=1024, BC=_power_of_two(columns // norm.groups),
        BG=_power_of_two(c // norm.groups), num_warps=4,
    )  # fmt: skip
    return coefs


def _check(x: Tensor, norm: Norm, buffer: Tensor, *, slot: int = 0, border: int = 1, store: Store = _DEFAULT,
           first: int | None = None, **_: Any) -> None:
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
    if d > buffer.shape[0] or not 0 <= slot < buffer.shape[0] or co < c:
        raise ValueError(f"{d} frames of {c} channels do not fit slot {slot} of {list(buffer.shape)}")
    if norm.kind == "group" and (norm.weight is None) != (norm.bias is None):
        raise ValueError("a group norm has both weight and bias, or neither")
    if norm.condition is not None and (store.border != "zero" or x.stride(3) != 1):
        raise ValueError("a conditioned norm takes unit channel strides and writes frames beside zeros")


def _reference(x: Tensor, norm: Norm, buffer: Tensor, *, slot: int = 0, border: int = 1, store: Store = _DEFAULT,
               coefs: Tensor | None = None, first: int | None = None, health: Tensor | None = None) -> None:
    first = first or 0
    if norm.kind != "group":
        coefs = None
    elif coefs is None:
        sums = statistics(x, norm.groups, backend="reference")
        coefs = reference.coefficients(sums, norm, x.shape[1] * x.shape[2], health=health)
    if norm.condition is None:
        reference.norm_act(x, norm, coefs, store, buffer, slot, border, first, health)
        return
    for a, b, affine, at in _runs(x, norm, buffer, slot, health):
        reference.norm_act(x[a:b], norm, coefs[a:b], store, buffer, at, border, first, affine=affine)


def _runs(
    x: Tensor, norm: Norm, buffer: Tensor, slot: int, health: Tensor | None
) -> Iterator[tuple[int, int, Tensor, int]]:
    """Yield (first, end, affine, slot) of the frames that take one latent; affine: its [h, w, 2C]."""
    _, h, w, _ = x.shape
    for a, b, latent in norm.condition.runs(x.shape[0]):
        affine = norm.condition.affine(latent)
        if health is not None and buffer.dtype in QUANT_MAX:  # which hides what is not finite
            health.add_(affine.sum(), alpha=0.0)
        each = h // affine.shape[0]
        if (each * affine.shape[0], each * affine.shape[1]) != (h, w):
            raise ValueError(f"frames of {h}x{w} are no multiple of latents of {affine.shape[0]}x{affine.shape[1]}")
        yield a, b, affine, (slot + a) % buffer.shape[0]


@operator("norm_act_kernel", "conditioned_kernel", reference=_reference, check=_check, takes=_TAKES)
def norm_act(here: Target, x: Tensor, norm: Norm, buffer: Tensor, *, slot: int = 0, border: int = 1,
             store: Store = _DEFAULT, coefs: Tensor | None = None, first: int | None = None,
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
    rows, columns, co = buffer.shape[1:]
    first, wide, eighth = first or 0, _power_of_two(co), buffer.dtype in QUANT_MAX
    block = max(ELEMENTS // wide, 1)
    if norm.kind == "group" and coefs is None:
        sums = statistics(x, norm.groups, backend="triton")
        coefs = coefficients(sums, norm, h * w, health=health, backend="triton")
    absent = coefs if coefs is not None else buffer
    gains = absent if store.gain is None else store.gain
    gain, limit = 1.0 / store.scale if eighth else 1.0, QUANT_MAX.get(buffer.dtype, 0.0)
    constants = {
        "C": c, "CO": co, "CP": wide, "GAINS": store.gain is not None, "SILU": store.silu, "CLAMP": eighth,
        "ROUND": buffer.dtype == torch.int8, "FAST": not (x.is_cpu and interpreted()), "BORDER": border, "BP": block,
    }  # fmt: skip
    programs = -(-(rows * columns) // block)
    if norm.condition is not None:
        unit, strides = strides_of(x)
        for a, b, affine, at in _runs(x, norm, buffer, slot, health):
            launcher("norm_act.conditioned_kernel", here)[(programs, b - a)](
                x[a:b], coefs[a:b], affine, coefs[a:b] if store.gain is None else gains, buffer, buffer.shape[0], at,
                h, w, first, rows, *strides, h // affine.shape[0], affine.shape[1], gain, limit, UNIT=unit,
                **constants, num_warps=WARPS,
            )  # fmt: skip
        return
    dense = x.stride(3) == 1
    unit, strides = strides_of(x) if dense else (1, list(x.stride()[:3]))
    own = norm.kind in ("l2", "rms")  # a group norm's weights are in its coefficients
    launcher("norm_act.norm_act_kernel", here)[(programs, d)](
        x, absent, absent if norm.weight is None else norm.weight, absent if norm.bias is None else norm.bias, gains,
        absent if health is None else health, buffer, buffer.shape[0], slot, h, w, first, rows, *strides, x.stride(3),
        norm.eps, gain, limit, KIND=norm.kind, WEIGHT=own and norm.weight is not None,
        BIAS=own and norm.bias is not None, HEALTH=health is not None and norm.kind != "group", EDGE=store.border,
        UNIT=unit, DENSE=dense, **constants, num_warps=WARPS,
    )  # fmt: skip
