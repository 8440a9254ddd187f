"""Parameters of a Program under the names of its files, and the walk with a State on PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .program import Program, Step
from .state import State
from .tree import find, graft


class Half(nn.Module):
    """An encoder or decoder: [B, C, T, H, W] -> the same, in three parts with their own granularity.

    Decoder: `run_low` takes latents and sees whole frames, `run_mid` takes what that makes of them, `run_high` any
    number of frames; blended tiles start at mid's input. Encoder: `run_high` takes any number of frames, `run_mid` what
    came of 1 + 4n of them first and of 4n later, `run_low` latents; tiles end at low's input. A file may call a part
    "mid": nothing here may be in the way of those who look for it by that name.
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

    def beside(self) -> dict[str, nn.Module]:
        """Modules whose parameters lie beside this half in the file, by name."""
        return {name[1:]: module for name, (module,) in self._beside.items()}

    def part(self, name: str) -> nn.Module:
        """Of a step, by the name that it gave."""
        return self._beside[name][0] if name in self._beside else find(self, name)

    def run(self, steps: Sequence[Step], x: Tensor, state: State | None = None) -> Tensor:
        """Some of the Program's steps."""
        for step in steps:
            x = step.plain(self.part, x, state)
        return x

    def run_low(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.run(self._low, x, state)

    def run_mid(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.run(self._mid, x, state)

    def run_high(self, x: Tensor, state: State | None = None) -> Tensor:
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
    def sample(moments: Tensor, seed: int | None = None) -> Tensor:
        """Moments -> latent: the mean, or with a seed mean + std * noise (same noise on every device)."""
        mean, logvar = moments.chunk(2, 1)
        if seed is None:
            return mean
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(mean.shape, generator=generator).to(mean)
        return torch.addcmul(mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0)), noise)
