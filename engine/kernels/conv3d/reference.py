"""The convolution in plain torch, fp32 arithmetic: the reference of the kernels, and the path without kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..precision import exact_math
from .schedules import ROW_BLOCK
from .types import Epilogue, Geometry, Partials, Pixels, Weight, stat_span
from .winograd2d import reference as tiles

_PLAIN, _NOTHING = Geometry(), Epilogue()


def cast(values: Tensor, dtype: torch.dtype, fmt: Pixels | None) -> Tensor:
    """Convert float32 to `dtype` through an output format, if there is one."""
    if fmt is not None:
        values = (values * fmt.gain + fmt.offset).clamp(fmt.low, fmt.high)
    return (values if dtype.is_floating_point else values.round()).to(dtype)


def note(health: Tensor | None, values: Tensor) -> None:
    """Make `health` NaN if one of `values` is not finite, without waiting for a device."""
    if health is not None:
        health.add_(values.abs().sum(dtype=torch.float32) * 0)


def frames_of(buffer: Tensor, start: int, count: int) -> Tensor:
    """Return `count` frames of a ring buffer from slot `start` on, in order."""
    if start + count <= buffer.shape[0]:
        return buffer[start : start + count]
    return torch.cat((buffer[start:], buffer[: start + count - buffer.shape[0]]))


def partial_sums(stored: Tensor, groups: int) -> Partials:
    """Return per row block of [D, H, W, K]: sums and sums of squares over `span` channels."""
    d, h, _, k = stored.shape
    span = stat_span(k, groups, k)
    blocks = []
    for top in range(0, h, ROW_BLOCK):
        x = stored[:, top : top + ROW_BLOCK].double().reshape(d, -1, k // span, span)
        blocks.append(torch.stack((x.sum((1, 3)), x.square().sum((1, 3))), -1))
    return Partials(torch.stack(blocks, 1).float(), span)


def product(x: Tensor, rows: Tensor, weight: Weight, geometry: Geometry, shift: tuple[int, int],
            size: tuple[int, int, int]) -> Tensor:
    """Return the raw dot products [D, H, W, N] of buffer frames [T, Hp, Wp, C] with weight rows [N, taps * C]."""
    (st, sh, sw), (kt, kh, kw), (d, h, w) = geometry.stride, weight.kernel, size
    oy, ox = geometry.origin[0] + shift[0], geometry.origin[1] + shift[1]
    # Sums of int8 products can pass 2^24, where float32 begins to round; float64 is exact but several times slower.
    exact = x.dtype != torch.int8 or int(rows.abs().sum(1, dtype=torch.int64).max()) * 128 < 1 << 24
    wide = torch.float32 if exact else torch.float64
    window = x[: (d - 1) * st + kt, oy : oy + (h - 1) * sh + kh, ox : ox + (w - 1) * sw + kw, : weight.channels]
    kernel = rows.to(wide).view(-1, kt, kh, kw, weight.channels).permute(0, 4, 1, 2, 3)
    with exact_math(x.device):
        out = F.conv3d(window.to(wide).permute(3, 0, 1, 2)[None], kernel, stride=geometry.stride)
    return out[0].permute(1, 2, 3, 0).float()


def border_bias(table: Tensor, phase: tuple[int, int], size: tuple[int, int], geometry: Geometry) -> Tensor:
    """Expand [4, K] (inside, row, column and corner increments) to [H, W, K] for one phase of the composed
    upsampler."""
    h, w = size
    rows = geometry.frame_rows or h
    at_row = torch.zeros(h, 1, 1, device=table.device, dtype=torch.float32)
    at_col = torch.zeros(1, w, 1, device=table.device, dtype=torch.float32)
    edge = (rows - 1 if phase[0] else 0) - geometry.first_row
    if 0 <= edge < h:
        at_row[edge] = 1
    at_col[:, w - 1 if phase[1] else 0] = 1
    return table[0] + at_row * table[1] + at_col * table[2] + at_row * at_col * table[3]


def conv3d(x: Tensor, weight: Weight, out: Tensor, *, geometry: Geometry = _PLAIN, epilogue: Epilogue = _NOTHING,
           start: int = 0, first: int = 2, **_: object) -> Partials | None:  # fmt: skip
    """Do the same as op.conv3d. `out` is written last, when no allocation can fail any more: it may be the
    residual too, and a call that ran out of memory must be repeatable."""
    pt, py, px = weight.phases
    drop = int(weight.folded > 0 and first == 0)
    k = weight.out_channels
    d, h, w = (out.shape[0] + drop) // pt, out.shape[1] // py, out.shape[2] // px
    count = (d - 1) * geometry.stride[0] + weight.kernel[0]
    frames = frames_of(x, start, count)
    sets = [min(first + i, 2) for i in range(d)] if weight.folded else [0] * d
    result = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    for phase in range(pt * py * px):
        iy, ix, it = phase // (px * pt), phase // pt % px, phase % pt
        shift = (iy, ix) if weight.shifted else (0, 0)
        for index in sorted(set(sets)):
            members = [i for i in range(d) if sets[i] == index]
            lo, hi = members[0], members[-1] + 1
            if drop and index == 0 and it == 0:
                continue
            group = min(index, max(weight.folded - 1, 0)) * pt * py * px + phase
            base = group * k
            part = frames[lo * geometry.stride[0] : (hi - 1) * geometry.stride[0] + weight.kernel[0]]
            size = hi - lo, h, w
            if weight.tiles:
                y = tiles.product(part, weight.phase(phase), geometry.origin, size)
            else:
                y = product(part, weight.data[base : base + k], weight, geometry, shift, size)
            y = y * epilogue.scale
            if weight.scale is not None:
                y = y * weight.scale[base : base + k]
            if epilogue.bias is not None and epilogue.bias.dim() == 3:
                y = y + border_bias(epilogue.bias[group], (iy, ix), (h, w), geometry)
            elif epilogue.bias is not None:
                y = y + epilogue.bias[phase * k : phase * k + k]
            target = slice(lo * pt + it - drop, (hi - 1) * pt + it - drop + 1, pt)
            if epilogue.residual is not None:
                y = y + epilogue.residual[target, iy::py, ix::px].float()
            fmt = epilogue.format(out.dtype)
            if fmt is not None:
                note(epilogue.health, y)
            result[target, iy::py, ix::px] = cast(y, out.dtype, fmt)
    partials = partial_sums(result, epilogue.groups) if epilogue.groups else None
    out.copy_(result)
    return partials
