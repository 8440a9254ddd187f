"""Normalisation, SiLU, quantisation and border in plain torch, fp32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..conv3d.reference import cast, note, partial_sums
from ..conv3d.types import QUANT_MAX, Partials, quantiser
from .types import Norm, Store


def statistics(x: Tensor, groups: int) -> Partials:
    return partial_sums(x, groups)


def coefficients(partials: Partials, norm: Norm, positions: int, *, health: Tensor | None = None) -> Tensor:
    """Return coefficients c [D, 2, C] float32: y = x * c[:, 0] + c[:, 1]. `positions` is H * W of the whole frame."""
    note(health, partials.data)
    d, _, columns, _ = partials.data.shape
    channels = columns * partials.span
    sums = partials.data.double().sum(1).reshape(d, norm.groups, -1, 2).sum(2)
    if norm.per_chunk:
        sums = sums.sum(0, keepdim=True).expand(d, -1, -1)
        positions *= d
    mean, square = (sums / (positions * channels // norm.groups)).unbind(-1)
    rstd = (square - mean.square()).clamp_min(0).add(norm.eps).rsqrt()
    spread = channels // norm.groups
    scale, mean = rstd.repeat_interleave(spread, 1), mean.repeat_interleave(spread, 1)
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    coefs = torch.stack((scale, shift), 1).float()
    note(health, coefs)
    return coefs


def apply(x: Tensor, norm: Norm, coefs: Tensor | None) -> Tensor:
    """Normalise [D, H, W, C] in fp32."""
    y = x.float()
    if coefs is not None:
        return torch.addcmul(coefs[:, None, None, 1], y, coefs[:, None, None, 0])
    if norm.kind == "none":
        return y
    if norm.kind == "l2":
        y = F.normalize(y, dim=-1, eps=norm.eps) * y.shape[-1] ** 0.5
    else:
        y = y * (y.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    if norm.weight is not None:
        y = y * norm.weight
    return y if norm.bias is None else y + norm.bias


def _inside(first: int, end: int, size: int, border: str, device: torch.device) -> Tensor:
    """Return the source of each row (or column) in [first, end): those of the frame, 0..size - 1, are their own
    source."""
    at = torch.arange(first, end, device=device)
    return at.clamp(0, size - 1) if border == "replicate" else size - 1 - (size - 1 - at.abs()).abs()


def norm_act(
    x: Tensor, norm: Norm, coefs: Tensor | None, store: Store, buffer: Tensor, slot: int, border: int, first: int,
    health: Tensor | None = None, affine: Tensor | None = None,
) -> None:
    """Do the same as op.norm_act, frame by frame so that the fp32 copies stay small. affine: [h, w, 2C] of a
    conditioned norm, for all frames."""
    c, w = x.shape[3], x.shape[2]
    rows = buffer.shape[1]
    # Image rows this band touches, and the part of its border outside the image.
    low, high = first - border, first + rows - border
    above, below = max(-low, 0), max(high - x.shape[1], 0)
    source = None
    if border and store.border != "zero":
        source = [_inside(a, b, n, store.border, x.device)
                  for a, b, n in ((low, high, x.shape[1]), (-border, w + border, w))]  # fmt: skip
    else:
        if affine is not None:
            each = x.shape[1] // affine.shape[0]
            affine = affine.repeat_interleave(each, 0)[low + above : high - below].repeat_interleave(each, 1)
        x = x[:, low + above : high - below]
    fmt = quantiser(buffer.dtype, store.scale) if buffer.dtype in QUANT_MAX else None
    for values in (norm.weight, norm.bias, store.gain):
        if values is not None and coefs is None:
            note(health, values)
    for d in range(x.shape[0]):
        if coefs is None:
            note(health, x[d] if norm.kind == "none" else x[d].float().square())
        frame = x[d : d + 1] if source is None else x[d : d + 1, source[0]][:, :, source[1]]
        y = apply(frame, norm, None if coefs is None else coefs[d : d + 1])
        y = y if affine is None else torch.addcmul(affine[..., c:], y, affine[..., :c])
        y = F.silu(y) if store.silu else y
        y = y if store.gain is None else y * store.gain
        if source is None:
            y = F.pad(y, (0, 0, border, border, above, below))
        target = buffer[(slot + d) % buffer.shape[0]]
        target[..., :c] = cast(y[0], buffer.dtype, fmt)
        if target.shape[-1] > c:
            target[..., c:] = 0
