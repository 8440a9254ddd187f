"""Parameters of a Program under the names of its files, and the walk with a State on PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .program import TILES, Program, Step
from .state import State
from .tree import find, graft


class Half(nn.Module):
    """An encoder or decoder: [B, C, T, H, W] -> the same, in three parts with their own granularity.

    Decoder: `low` takes latents and sees whole frames, `mid` takes what low makes of them, `high` any number of frames;
    blended tiles start at mid's input. Encoder: `high` takes any number of frames, `mid` what came of 1 + 4n of them
    first and of 4n later, `low` latents; tiles end at low's input.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        first, self._mid, last = program.parts()
        self._low, self._high = (first, last) if program.half == "decoder" else (last, first)
        self._beside: dict[str, tuple[nn.Module]] = {}  # tuples are not registered: these belong to the network
        for step in program.every():
            if step.inner():
                continue
            for name, module in step.modules(program.style).items():
                if name.startswith("/"):
                    self._beside[name] = (module,)
                else:
                    graft(self, name, module)

    @property
    def front(self) -> int:
        """Steps in front of the mark TILES: a decoder's on whole frames, an encoder's on tiles."""
        return self.program.before(TILES)

    def beside(self) -> dict[str, nn.Module]:
        """Modules whose parameters lie beside this half in the file, by name."""
        return {name[1:]: module for name, (module,) in self._beside.items()}

    def part(self, name: str) -> nn.Module:
        """Of a step, by the name that it gave."""
        return self._beside[name][0] if name in self._beside else find(self, name)

    def run(self, steps: Sequence[Step], x: Tensor, state: State | None = None) -> Tensor:
        """Some of the Program's steps; no frames where one of them begins later."""
        for step in steps:
            if state is not None and not state.takes_part(step.name):
                return x[:, :, :0]
            x = step.plain(self.part, x, state)
        return x

    def low(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.run(self._low, x, state)

    def mid(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.run(self._mid, x, state)

    def high(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.run(self._high, x, state)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if self.program.half == "encoder" and state is None:
            x = x[:, :, : self.program.whole_frames(x.shape[2])]
        return self.run(self.program.steps, x, state)


class Network(nn.Module):
    """Both halves of a VAE with the parameter names of its files. An absent half is None."""

    encoder: Half | None
    decoder: Half | None

    def __init__(self, config: Any, encoder: Program | None, decoder: Program | None) -> None:
        super().__init__()
        self.config = config
        self.encoder = None if encoder is None else Half(encoder)
        self.decoder = None if decoder is None else Half(decoder)
        for half in (self.encoder, self.decoder):
            for name, module in half.beside().items() if half is not None else ():
                self.add_module(name, module)
        for name, module in self.named_modules():
            if hasattr(module, "key"):
                module.key = name  # its history's, and its calibration's

    def names(self, half: str) -> list[str]:
        """Keys of "encoder" or "decoder" in the file; none if it is absent."""
        part = getattr(self, half)
        first = () if part is None else (half, *part.beside())
        return [key for key in self.state_dict() if key.partition(".")[0] in first]

    def drop(self, half: str) -> None:
        """Go on without "encoder" or "decoder"."""
        for name in (half, *getattr(self, half).beside()):
            setattr(self, name, None)

    @staticmethod
    def noise(shape: Sequence[int], seed: int) -> Tensor:
        """What `sample` adds to a latent of this shape, in units of its std; the same on every device."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    @classmethod
    def sample(cls, moments: Tensor, seed: int | None = None, noise: Tensor | None = None) -> Tensor:
        """Moments [B, 2C, T, h, w] -> latent: the mean, or mean + std * noise. noise: that of `seed` if not given, for
        a part of a latent its part."""
        mean, logvar = moments.chunk(2, 1)
        if seed is not None:
            noise = cls.noise(mean.shape, seed)
        if noise is None:
            return mean
        return torch.addcmul(mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0)), noise.to(mean))
