"""Networks whose norms span batches of a clip that depend on its length: the clip goes through all steps in these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...network.program import Step, work_of
from ...network.state import State
from ...network.values import CAUSAL, Size, Style, Taps, Work


@dataclass(frozen=True)
class Batches(Step):
    """Steps applied to a clip in batches along time, once all of it is there. count: inputs of a batch; what a clip has
    over a multiple of it goes with the first batch."""

    name: str
    steps: tuple[Step, ...]
    count: int
    plain_only = "its norms span batches of a clip, which only plain torch does"
    late = waits = True

    def inner(self) -> tuple[Step, ...]:
        return self.steps

    def spans(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of each batch of `count` inputs."""
        rest, first = count % self.count, 0
        for end in range(rest + min(self.count, count - rest), count + 1, self.count):
            yield first, end
            first = end

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        if state is not None:
            state.waiting[self.name].append(x)
            if not state.ending:
                made = self.size(Size(1, *x.shape[3:], x.shape[1]), True)
                return x.new_empty(x.shape[0], made.channels, 0, made.height, made.width)
            x = torch.cat(state.waiting.pop(self.name), 2)
        made, inside = [], State()
        for first, end in self.spans(x.shape[2]):
            y = x[:, :, first:end]
            inside.counts.clear()  # latents that norms see are those of the batch
            for step in self.steps:
                y = step.plain(part, y, inside)
            made.append(y)
        return torch.cat(made, 2) if len(made) > 1 else made[0]

    def size(self, size: Size, starts: bool) -> Size:
        for step in self.steps:
            size = step.size(size, True)
        return size

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return math.prod(step.space[0] for step in self.steps), math.prod(step.space[1] for step in self.steps)

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return math.prod(step.time[0] for step in self.steps), math.prod(step.time[1] for step in self.steps)

    def taps(self, style: Style) -> Taps:
        return Taps(math.inf, math.inf)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return work_of(self.steps, size, style)
