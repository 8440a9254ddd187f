"""Parameters of a Program under the names of its files, and the walk with a State on PyTorch's own operators."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .hosted import Part
from .packing import PackedLatents
from .program import TILES, Program, Size, Step
from .state import State
from .tree import find, graft


class Half(nn.Module):
    """An encoder or decoder: [B, C, T, H, W] -> the same, in three parts with their own granularity.

    Decoder: `low` takes latents and sees whole frames, `between` takes what low makes of them, `high` any number of
    frames; blended tiles start at between's input. Encoder: `high` takes any number of frames, `between` what came of
    1 + 4n of them first and of 4n later, `low` latents; tiles end at low's input. (Files have a `mid` of their own.)
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        first, self._mid, last = program.parts()
        self._low, self._high = (first, last) if program.half == "decoder" else (last, first)
        self._beside: dict[str, tuple[nn.Module]] = {}  # tuples are not registered: these belong to the network
        self._network: weakref.ref[nn.Module] | None = None
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

    def input_type(self, dtype: torch.dtype) -> torch.dtype:
        """Of what it takes, where activations are in `dtype`."""
        return torch.float32 if self.program.steps[0].exact_input else dtype

    def beside(self) -> dict[str, nn.Module]:
        """Modules whose parameters lie beside this half in the file, by name."""
        return {name[1:]: module for name, (module,) in self._beside.items()}

    def everything(self) -> tuple[Part, ...]:
        """Itself and what lies beside it: all that its steps read."""
        self._beside = {name: (self.part(name),) for name in self._beside}  # loading weights puts others in the network
        return self, *self.beside().values()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy: what is beside it was copied with it. It belongs to no network until one says so."""
        super().__setstate__(state)
        self._network = None

    def belongs_to(self, network: nn.Module) -> None:
        """What is beside this half is found in `network` from now on, which may share it with the other half."""
        self._network = weakref.ref(network)  # both would wait for the garbage collector else, with their weights
        for name in self._beside:  # for a half that outlives it
            self._beside[name] = (find(network, name[1:]),)

    def part(self, name: str) -> nn.Module:
        """Of a step, by the name that it gave."""
        if not name.startswith("/"):
            return find(self, name)
        network = self._network and self._network()
        return find(network, name[1:]) if network is not None else self._beside[name][0]

    def run(self, steps: Sequence[Step], x: Tensor, state: State | None = None) -> Tensor:
        """Some of the Program's steps; no frames where one of them begins later."""
        if self.program.style.single:
            parts = list(self._by_frame(steps, x, state or _whole()))
            made = [y for y in parts if y.shape[2]] or parts[-1:]
            return torch.cat(made, 2) if len(made) > 1 else made[0]
        for step in steps:
            if state is not None and not state.takes_part(step.name):
                return x[:, :, :0]
            x = step.plain(self.part, x, state)
        return x

    def _by_frame(self, steps: Sequence[Step], x: Tensor, state: State) -> Iterator[Tensor]:
        """Every frame of x through all of the steps before the next one, so that few are between them at once, also
        where a clip's end brings many out. Of the frames the last one may be the clip's. At least one result, which may
        have no frames."""
        if not steps or not (x.shape[2] or state.ending):
            yield _nothing(steps, x) if steps else x
            return
        frames, ending, made = (x.split(1, 2) if x.shape[2] > 1 else (x,)), state.ending, False
        for i, frame in enumerate(frames, 1):
            state.ending = ending and i == len(frames)
            y = steps[0].plain(self.part, frame, state)
            if y.shape[2] or (i == len(frames) and (ending or not made)):
                made = True
                yield from self._by_frame(steps[1:], y, state)

    def low(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.run(self._low, x, state)

    def between(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.run(self._mid, x, state)

    def high(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.run(self._high, x, state)

    def each(self, x: Tensor, state: State) -> Iterator[Tensor]:
        """What `high` makes of x, part by part as it comes."""
        if self.program.style.single:
            yield from self._by_frame(self._high, x, state)
        else:
            yield self.high(x, state)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if self.program.half == "encoder" and state is None:
            x = x[:, :, : self.program.whole_frames(x.shape[2])]
        return self.run(self.program.steps, x, state)


def _nothing(steps: Sequence[Step], x: Tensor) -> Tensor:
    """What the steps make of no frames: none of the size that they would have."""
    size = Size(0, *x.shape[3:], x.shape[1])
    for step in steps:
        size = step.size(size, False)
    return x.new_empty(x.shape[0], size.channels, 0, size.height, size.width)


def _whole() -> State:
    """Of a clip that comes at once."""
    state = State()
    state.ending = True
    return state


class Network(nn.Module):
    """Both halves of a VAE with the parameter names of its files. An absent half is None. `packing`: what lies between
    the network's latents and those outside, if anything does."""

    encoder: Half | None
    decoder: Half | None

    def __init__(
        self, config: Any, encoder: Program | None, decoder: Program | None,
        packing: tuple[str, PackedLatents] | None = None,
    ) -> None:  # fmt: skip
        """packing: its name in the file, and it."""
        super().__init__()
        self.config = config
        self._packing = None if packing is None else packing[0]
        self.encoder = None if encoder is None else Half(encoder)
        self.decoder = None if decoder is None else Half(decoder)
        for half in (self.encoder, self.decoder):
            if half is None:
                continue
            for name, module in half.beside().items():
                if name not in self._modules and name not in self._parameters:  # both halves may have it
                    graft(self, name, module)
            half.belongs_to(self)
        if packing is not None:
            self.add_module(*packing)
        for name, module in self.named_modules():
            if hasattr(module, "key"):
                module.key = name  # its history's, and its calibration's

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy: its halves belong to it."""
        super().__setstate__(state)
        for half in (self.encoder, self.decoder):
            if half is not None:
                half.belongs_to(self)

    @property
    def packing(self) -> PackedLatents | None:
        return None if self._packing is None else self._modules[self._packing]  # type: ignore[return-value]

    def outside(self) -> list[str]:
        """Keys of the packing."""
        return [] if self._packing is None else [k for k in self.state_dict() if k.partition(".")[0] == self._packing]

    def names(self, half: str) -> list[str]:
        """Keys of "encoder" or "decoder" in the file, with the packing's among the latter; none if it is absent."""
        part = getattr(self, half)
        first = () if part is None else (half, *part.beside(), *([self._packing] if half == "decoder" else ()))
        return [key for key in self.state_dict() if key.partition(".")[0] in first]

    def drop(self, half: str) -> None:
        """Go on without "encoder" or "decoder"."""
        other = getattr(self, "encoder" if half == "decoder" else "decoder")
        kept = () if other is None else other.beside()
        for name in (half, *getattr(self, half).beside()):
            if name not in kept:
                setattr(self, name, None)

    @staticmethod
    def noise(shape: Sequence[int], seed: int) -> Tensor:
        """What `sample` adds to latents of this shape, in units of their std; the same on every device. A clip's own
        does not depend on those behind it."""
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([torch.randn(*shape[1:], generator=generator) for _ in range(shape[0])])

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
