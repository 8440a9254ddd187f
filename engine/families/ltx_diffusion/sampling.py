"""A diffusion decoder's steps from noise to pixels, and the stations before and after its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.tokens import normalised
from .neighbours import EPS, Frames

COLOURS = 3


@dataclass(frozen=True)
class Sampling:
    """Steps from noise to a picture. Timesteps fall from 1 to 1 / steps and are embedded times `multiplier`. velocity:
    the network's result is a velocity, not the picture."""

    steps: int = 1
    multiplier: float = 1000.0
    velocity: bool = False

    def time(self, step: int) -> float:
        """Return a step's timestep; 0 after the last."""
        if step == self.steps:
            return 0.0
        return 1.0 - step * (1.0 - 1.0 / self.steps) / max(self.steps - 1, 1)


#: That of the published decoder.
ONE_STEP = Sampling()


class Enter:
    """Give frames of features their noise, or the picture of the step before, as tokens."""

    def __init__(
        self, patch: int, linear: nn.Linear, first: nn.Linear, noise: Callable[[int], Tensor] | None, keeps: bool
    ) -> None:
        """first: the product of the context that the first block adds to its input. keeps: the picture so far is needed
        after the blocks."""
        self._patch, self._linear, self._first, self._noise, self._keeps = patch, linear, first, noise, keeps
        self._count = 0

    def push(self, frames: Frames) -> Iterator[Frames]:
        noisy, context = frames.noisy, frames.tokens if frames.context is None else frames.context
        if noisy is None:
            rows, columns = (self._patch * n for n in context.shape[1:3])
            if context.is_meta:
                made = [context.new_empty(COLOURS, rows, columns)] * len(frames)
            else:
                made = [self._noise(self._count + i)[:, :rows, :columns] for i in range(len(frames))]
            noisy = torch.stack([to_patches(picture.to(context.dtype), self._patch) for picture in made])
            self._count += len(frames)
        tokens = F.linear(noisy.to(context.dtype), self._linear.weight, self._linear.bias)
        tokens += F.linear(context, self._first.weight, self._first.bias)
        yield Frames(tokens, frames.ends, context, noisy if self._keeps else None)


class Leave:
    """Turn tokens into the network's result, and that into the picture of the next step or the last one."""

    def __init__(self, patch: int, norm: Tensor, linear: nn.Linear, sampling: Sampling, step: int) -> None:
        self._patch, self._norm, self._sampling, self._step = patch, norm, sampling, step
        # Where nothing is combined with it, the result is made in the order of pixels: whole rows of a patch are copied
        # to their places, not single values.
        self._last = step == sampling.steps - 1
        self._direct = self._last and not sampling.velocity
        self._weight, self._bias = linear.weight, linear.bias
        if self._direct:
            order = (t.unflatten(0, (COLOURS, patch, patch)).transpose(0, 2) for t in (linear.weight, linear.bias))
            self._weight, self._bias = (t.flatten(0, 2) for t in order)

    def push(self, frames: Frames) -> Iterator[Frames]:
        flat, s = frames.tokens.view(-1, frames.tokens.shape[-1]), self._sampling
        normed = torch.empty_like(flat)
        normalised(flat, self._norm, EPS, normed)
        made = F.linear(normed, self._weight, self._bias).view(*frames.tokens.shape[:3], -1)
        if self._direct:
            yield Frames(from_rows(made, self._patch), frames.ends)
            return
        noisy, time = frames.noisy.float(), s.time(self._step)
        velocity = made.float() if s.velocity else (noisy - made.float()) / time
        made = noisy - (time - s.time(self._step + 1)) * velocity
        if self._last:
            pixels = [from_patches(one.to(flat.dtype), self._patch) for one in made]
            yield Frames(torch.stack(pixels), frames.ends)
        else:
            yield replace(frames, noisy=made)


def to_patches(x: Tensor, patch: int) -> Tensor:
    """Turn a picture [C, H, W] into patches [H / patch, W / patch, C * patch^2], channels in the order (colour, column,
    row)."""
    c, h, w = x.shape
    parts = x.reshape(c, h // patch, patch, w // patch, patch)
    return parts.permute(1, 3, 0, 4, 2).reshape(h // patch, w // patch, c * patch**2)


def from_patches(x: Tensor, patch: int) -> Tensor:
    """Invert `to_patches`; the result is [H, W, C]."""
    h, w, c = x.shape
    parts = x.view(h, w, c // patch**2, patch, patch)
    return parts.permute(0, 4, 1, 3, 2).reshape(h * patch, w * patch, c // patch**2)


def from_rows(x: Tensor, patch: int) -> Tensor:
    """Turn patches [n, h, w, patch^2 * C], channels in the order (row, column, colour), into pictures
    [n, H, W, C]."""
    n, h, w, values = x.shape
    rows = x.view(n, h, w, patch, values // patch).transpose(2, 3)
    return rows.reshape(n, h * patch, w * patch, values // patch**2)
