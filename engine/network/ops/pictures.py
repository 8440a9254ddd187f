"""Networks for clips that are used for pictures: each latent passes all of its steps as a short separate clip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..program import Step, work_of
from ..state import State
from ..values import CAUSAL, Size, Style, Work


@dataclass(frozen=True)
class EachPicture(Step):
    """Steps applied to each picture as a clip. copies: frames of that clip in an encoder. A decoder keeps the last
    frame."""

    name: str
    steps: tuple[Step, ...]
    copies: int = 1
    plain_only = "each of its pictures is a clip, which only plain torch knows"

    def inner(self) -> tuple[Step, ...]:
        return self.steps

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        made = []
        for picture in x.split(1, 2):
            y = picture.expand(-1, -1, self.copies, -1, -1)
            for step in self.steps:
                y = step.plain(part, y, None)
            made.append(y[:, :, -1:])
        return torch.cat(made, 2) if len(made) > 1 else made[0]

    def size(self, size: Size, starts: bool) -> Size:
        for step in self.steps:
            size = step.size(size._replace(frames=1), True)._replace(frames=size.frames)
        return size

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        up, down = 1, 1
        for step in self.steps:
            up, down = up * step.space[0], down * step.space[1]
        return up, down

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        one = work_of(self.steps, size._replace(frames=self.copies), style)
        return Work(*(size.frames * part for part in one))
