"""Parameters of a normalisation, and the format in which its results are stored."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


def latent_of_frame(frame: int, rate: int, latents: int) -> int:
    """Return the latent that a clip's frame takes, at `rate` frames per latent: an odd number of latents have only one
    frame of the first."""
    return (frame + (rate - 1) * (latents % 2)) // rate


@dataclass(frozen=True)
class Condition:
    """A clip's latents that scale and shift normalised frames: at the position of a latent z, y becomes y * (z @ weight
    + bias)[:C] + (z @ weight + bias)[C:].

    weight: [Z, 2C] float32. bias: [2C] float32. rate: frames per latent. The rest belongs to a call. latents: [T, h, w,
    Z], a divisor of the frames' sizes. first: the clip's frame that x begins with. table: float32 [h * w, 2C], room.
    """

    weight: Tensor
    bias: Tensor
    rate: int
    latents: Tensor | None = None
    first: int = 0
    table: Tensor | None = None

    def runs(self, frames: int) -> list[tuple[int, int, int]]:
        """Return (first, end, latent) of the runs of a call's frames that take one latent."""
        taken = [latent_of_frame(self.first + i, self.rate, self.latents.shape[0]) for i in range(frames)]
        edges = [0, *(i for i in range(1, frames) if taken[i] != taken[i - 1]), frames]
        return [(a, b, taken[a]) for a, b in itertools.pairwise(edges)]

    def affine(self, latent: int) -> Tensor:
        """Return factors and summands of a latent's positions, [h, w, 2C], in `table`."""
        z = self.latents[latent]
        flat = z.reshape(-1, z.shape[2]).float()
        return torch.addmm(self.bias, flat, self.weight, out=self.table).view(*z.shape[:2], -1)


@dataclass(frozen=True)
class Norm:
    """A normalisation. kind: group (statistics over positions), l2 (x / max(|x|, eps) * sqrt(C)), rms (x / sqrt(mean
    x^2 + eps)), none.

    weight, bias: [C] float32 or None. groups, per_chunk, condition: for `group`; per_chunk pools all frames of the
    call.
    """

    kind: str = "group"
    weight: Tensor | None = None
    bias: Tensor | None = None
    groups: int = 32
    eps: float = 1e-6
    per_chunk: bool = False
    condition: Condition | None = None


@dataclass(frozen=True)
class Store:
    """The format of stored results: silu first; border zero, replicate or reflect; an 8-bit type holds value / scale,
    or with `gain` ([C] float32) value * gain per channel."""

    silu: bool = True
    border: str = "zero"
    scale: float = 1.0
    gain: Tensor | None = None
