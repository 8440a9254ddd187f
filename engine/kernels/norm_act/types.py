"""Parameters of a normalisation, and the format in which its results are stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """A normalisation. kind: group (statistics over positions), l2 (x / max(|x|, eps) * sqrt(C)), rms (x / sqrt(mean
    x^2 + eps)), none.

    weight, bias: [C] float32 or None. groups, per_chunk: for `group`; per_chunk pools all frames of the call.
    """

    kind: str = "group"
    weight: Tensor | None = None
    bias: Tensor | None = None
    groups: int = 32
    eps: float = 1e-6
    per_chunk: bool = False


@dataclass(frozen=True)
class Store:
    """The format of stored results: silu first; border zero, replicate or reflect; an 8-bit type holds value / scale,
    or with `gain` ([C] float32) value * gain per channel.

    rounded: planes are made of the values as a plain buffer of their type holds them, so that making them of such a
    buffer later (kind none, no silu, scale 1) gives the same bits; plain buffers for that are written with `rounded`,
    too.
    """

    silu: bool = True
    border: str = "zero"
    scale: float = 1.0
    gain: Tensor | None = None
    rounded: bool = False
