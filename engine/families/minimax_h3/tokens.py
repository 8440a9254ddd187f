"""A transformer that turns one tile of a section into its pixels: the parameters, and the step that uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...network.offload import Hosted
from ...network.ops.conv import pointwise
from ...network.program import Step
from ...network.state import State
from ...network.values import CAUSAL, Size, Style, Work

EPS = 1e-5
#: Share of a head's channels that is rotated, and the base of the angles.
ROTATED, BASE = 0.75, 100.0
AXES = 3


class Weight(Hosted):
    """A norm without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Matrix(Hosted, nn.Linear):
    """A linear layer."""


class Heads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_qkv, self.to_out = Matrix(width, 3 * width), Matrix(width, width)


class Gate(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = Matrix(width, 2 * inner), Matrix(inner, width)


class Layer(Hosted):
    """x += scale1 * attention(norm1(x)); x += scale2 * gate(norm2(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.attn = Weight(width), Heads(width)
        self.scale1 = nn.Parameter(torch.ones(width))
        self.norm2, self.ff = Weight(width), Gate(width, inner)
        self.scale2 = nn.Parameter(torch.ones(width))


def turns(frames: int, height: int, width: int, head: int, behind: int, device: torch.device) -> Tensor:
    """Return float32 [tokens, 2, angles] cosines and sines of every token's angles, in order of frame, row and column;
    the last `behind` tokens are not rotated. Positions are the middles of n equal parts of -1..1."""
    rotated = int(head * ROTATED)
    frequencies = BASE ** -torch.arange(0, 1, 2 * AXES / rotated, dtype=torch.float64, device="cpu")
    places = [(torch.arange(n, dtype=torch.float64, device="cpu") + 0.5) / n * 2 - 1 for n in (frames, height, width)]
    grid = torch.stack(torch.meshgrid(*places, indexing="ij"), -1).flatten(0, 2)
    angles = (2 * torch.pi * grid[:, :, None] * frequencies).flatten(1)
    angles = torch.cat((angles, angles.new_zeros(behind, angles.shape[1])))
    return torch.stack((angles.cos(), angles.sin()), 1).float().to(device)


@dataclass(frozen=True)
class Tokens(Step):
    """Turn a tile's latents into its pixels by `layers` of a transformer in `width` channels with heads of `head`. Each
    latent pixel is a token and becomes `rate` frames of `patch` x `patch` pixels; `registers` learned tokens and one of
    zeros follow. gates: channels between the products of a gate. Latents come in units of `deviation` from `mean` and
    pass a 1x1x1 convolution first. `running.transformer` executes it.

    The fields from `mean` on are names of its parts; unused: a parameter in the files that nothing reads.
    """

    name: str
    c_in: int
    layers: int
    width: int
    gates: int
    head: int
    registers: int
    rate: int
    patch: int
    mean: str = "/latents_mean"
    deviation: str = "/latents_std"
    first: str = "/post_quant_conv"
    enters: str = "x_embedder"
    learned: str = "register_tokens"
    unused: str = "mask_token"
    leaves: str = "proj_out"
    norm: str = "norm_out"
    stream: ClassVar[bool] = False
    scales: ClassVar[bool] = True
    plain_only = "its layers are products, which the libraries compute"

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return self.patch, 1

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return self.rate, 1

    @property
    def behind(self) -> int:
        """Return the number of tokens that stand for no latent pixel."""
        return self.registers + 1

    def modules(self, style: Style) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module | nn.Parameter] = {
            self.mean: nn.Parameter(torch.zeros(self.c_in)),
            self.deviation: nn.Parameter(torch.ones(self.c_in)),
            self.first: pointwise(self.c_in, self.c_in, style),
            self.enters: nn.Linear(self.c_in, self.width),
            self.learned: nn.Parameter(torch.zeros(1, self.registers, self.width)),
            self.unused: nn.Parameter(torch.zeros(1, 1, self.width)),
            self.norm: nn.LayerNorm(self.width, eps=EPS),
            self.leaves: nn.Linear(self.width, self.channels(0) * self.rate * self.patch**2),
        }
        parts |= {f"{self.name}.{i}": Layer(self.width, self.gates) for i in range(self.layers)}
        return parts  # type: ignore[return-value]

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        raise NotImplementedError("a transformer is walked layer by layer, by running.transformer")

    def size(self, size: Size, starts: bool) -> Size:
        """Return the size of all frames that are made; the step does not know which of them belong to a clip."""
        return Size(self.rate * size.frames, self.patch * size.height, self.patch * size.width, self.channels(0))

    def channels(self, channels: int) -> int:
        return 3

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        tokens = size.frames * size.height * size.width + self.behind
        products = 4 * self.width**2 + 3 * self.width * self.gates
        flop = self.layers * (2.0 * tokens * products + 4.0 * tokens**2 * self.width)
        flop += 2.0 * tokens * self.width * (self.c_in + self.channels(0) * self.rate * self.patch**2)
        return Work(flop, flop, 0.0)
