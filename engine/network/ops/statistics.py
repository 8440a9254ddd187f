"""Means and deviations of a latent's channels, which a file stores outside its networks, and moments in their units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import ExecutionContext
from ..program import Step
from ..state import State
from ..values import Result, Style, Sums

#: The logarithm of a variance that is negligible in fp32.
NO_VARIANCE = -30.0
MEAN, DEVIATION = "mean-of-means", "std-of-means"


class Statistics(nn.Module):
    """The means and deviations of channels, each [C]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_parameter(MEAN, nn.Parameter(torch.zeros(channels)))
        self.register_parameter(DEVIATION, nn.Parameter(torch.ones(channels)))

    def values(self) -> tuple[Tensor, Tensor]:
        """Return (mean, deviation), float32 [C]."""
        return getattr(self, MEAN).float(), getattr(self, DEVIATION).float()

    # The next two have ComfyUI's names: its LTXVLatentUpsampler calls them on a VAE's network.

    def un_normalize(self, x: Tensor) -> Tensor:
        """Return latents [B, C, T, h, w] in the network's own units."""
        mean, deviation = (v.view(1, -1, 1, 1, 1).to(x) for v in self.values())
        return x * deviation + mean

    def normalize(self, x: Tensor) -> Tensor:
        """Invert `un_normalize`."""
        mean, deviation = (v.view(1, -1, 1, 1, 1).to(x) for v in self.values())
        return (x - mean) / deviation


@dataclass(frozen=True)
class Denormalise(Step):
    """Scale a decoder's input by the deviations and add the means, in fp32."""

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

    def run(self, packed: Any, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        if not run.dry:
            torch.addcmul(packed[0], x.float(), packed[1], out=out)
        return out, None


@dataclass(frozen=True)
class Standardise(Step):
    """Convert an encoder's mean and log variance of every channel to units of `deviation` from `mean`; these are the
    names of its parameters."""

    mean: str
    deviation: str
    width: int
    wide = True
    stream: ClassVar[bool] = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.mean

    def modules(self, style: Style) -> dict[str, nn.Module]:
        mean, deviation = nn.Parameter(torch.zeros(self.width)), nn.Parameter(torch.ones(self.width))
        return {self.mean: mean, self.deviation: deviation}  # type: ignore[dict-item]

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        mean, deviation, lower = (v.view(-1, 1, 1, 1) for v in self.pack(part, None, None))
        means, variances = x.float().chunk(2, 1)
        return torch.cat(((means - mean) / deviation, variances - lower), 1)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands | None, options: Options | None) -> Any:
        mean, deviation = part(self.mean).float(), part(self.deviation).float()
        return mean, deviation, 2.0 * deviation.abs().log()

    def run(self, packed: Any, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        mean, deviation, lower = packed
        if not run.dry:
            out[..., : self.width] = (x[..., : self.width] - mean) / deviation
            out[..., self.width :] = x[..., self.width :] - lower
        return out, None


@dataclass(frozen=True)
class ByFrame(Step):
    """Apply means and deviations of channels that differ for each of `period` frames and then repeat: to the units of a
    decoder, or (`leaves`) from those of an encoder, whose moments have a negligible variance. scale: of external
    latents."""

    mean: str
    deviation: str
    width: int
    period: int
    scale: float
    leaves: bool = False
    stream: ClassVar[bool] = False
    plain_only = "its latents have statistics of their own for every frame, which only plain torch knows"

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.mean

    @property
    def cycle(self) -> int:  # type: ignore[override]
        return self.period

    def modules(self, style: Style) -> dict[str, nn.Module]:
        count = self.width * self.period
        return {self.mean: nn.Parameter(torch.zeros(count)), self.deviation: nn.Parameter(torch.ones(count))}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        first = 0 if state is None else state.count(self.mean, x)
        at = torch.arange(first, first + x.shape[2], device=x.device) % self.period
        tables = (part(name).float().view(self.width, -1)[:, at, None, None] for name in (self.mean, self.deviation))
        mean, deviation = tables
        if not self.leaves:
            return torch.addcmul(mean, x.float() / self.scale, deviation).to(x.dtype)
        means = ((x.float() - mean) / deviation * self.scale).to(x.dtype)
        return torch.cat((means, torch.full_like(means, NO_VARIANCE)), 1)

    def channels(self, channels: int) -> int:
        return (1 + self.leaves) * self.width


@dataclass(frozen=True)
class Normalise(Step):
    """Convert an encoder's mean and log variance of every channel to the latents' units. shared: all channels have one
    variance."""

    name: str
    width: int
    shared: bool
    stream: ClassVar[bool] = False
    plain_only = "its moments are brought to the latents' units, which only plain torch does"

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Statistics(self.width)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        mean, deviation = (v.view(-1, 1, 1, 1) for v in part(self.name).values())
        means, variances = x.float().split((self.width, x.shape[1] - self.width), 1)
        variances = variances.expand_as(means) - 2.0 * deviation.abs().log()
        return torch.cat(((means - mean) / deviation, variances), 1).to(x.dtype)

    def channels(self, channels: int) -> int:
        return 2 * self.width
