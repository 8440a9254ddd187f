"""Means and deviations of a latent's channels, which a file has beside its networks, and moments in their units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...kernels.conv3d import Partials
from ...operands.forms import Operands
from ...options import Options
from ...run.run import Run
from ..program import Step, Style
from ..state import State

MEAN, DEVIATION = "mean-of-means", "std-of-means"


class Statistics(nn.Module):
    """Both [C]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_parameter(MEAN, nn.Parameter(torch.zeros(channels)))
        self.register_parameter(DEVIATION, nn.Parameter(torch.ones(channels)))

    def values(self) -> tuple[Tensor, Tensor]:
        """(mean, deviation), float32 [C]."""
        return getattr(self, MEAN).float(), getattr(self, DEVIATION).float()


@dataclass(frozen=True)
class Denormalise(Step):
    """What enters a decoder: times the deviations, plus the means, in fp32."""

    name: str
    width: int
    wide = True
    stream: ClassVar[bool] = False

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Statistics(self.width)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        mean, deviation = (v.view(-1, 1, 1, 1) for v in part(self.name).values())
        return torch.addcmul(mean, x.float(), deviation).to(x.dtype)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Any:
        return part(self.name).values()

    def run(self, packed: Any, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        if not run.dry:
            torch.addcmul(packed[0], x.float(), packed[1], out=out)
        return out, None


@dataclass(frozen=True)
class Normalise(Step):
    """What leaves an encoder: mean and logarithm of the variance of every channel, of which all but the first have one
    variance where `shared`. Both in the latents' units."""

    name: str
    width: int
    shared: bool
    stream: ClassVar[bool] = False

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Statistics(self.width)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        mean, deviation = (v.view(-1, 1, 1, 1) for v in part(self.name).values())
        means, variances = x.float().split((self.width, x.shape[1] - self.width), 1)
        variances = variances.expand_as(means) - 2.0 * deviation.abs().log()
        return torch.cat(((means - mean) / deviation, variances), 1).to(x.dtype)

    def channels(self, channels: int) -> int:
        return 2 * self.width

    def why_not_fused(self, style: Style) -> str | None:
        return "its moments are brought to the latents' units, which only the plain walk does"
