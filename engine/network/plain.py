"""Hold the parameters of a Program under their names in files, and execute it eagerly with a State on PyTorch's
operators."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .offload import Part
from .packing import PackedLatents
from .program import TILES, Program, Step
from .state import State
from .tree import find, graft
from .values import Size


class Half(nn.Module):
    """An encoder or decoder, [B, C, T, H, W] -> the same layout, in three parts with their own granularity.

    Decoder: `low` takes latents and sees whole frames, `between` takes the results of `low`, `high` any number of
    frames; blended tiles start at between's input. Encoder: `high` takes any number of frames, `between` the results of
    first 1 + 4n of them and later 4n, `low` latents; tiles end at low's input. (Files have a `mid` of their own.)
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
        """Return the number of steps before the mark TILES: a decoder's on whole frames, an encoder's on tiles."""
        return self.program.before(TILES)

    def input_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the input, given the type `dtype` of activations."""
        return torch.float32 if self.program.steps[0].exact_input else dtype

    def beside(self) -> dict[str, nn.Module]:
        """Return, by name, the modules whose parameters the file stores outside this component."""
        return {name[1:]: module for name, (module,) in self._beside.items()}

    def everything(self) -> tuple[Part, ...]:
        """Return all that the steps read: this module and those of `beside`."""
        self._beside = {name: (self.part(name),) for name in self._beside}  # loading weights replaces these
        return self, *self.beside().values()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which belongs to no network until `belongs_to` is called; the modules of `beside` were copied
        with it."""
        super().__setstate__(state)
        self._network = None

    def belongs_to(self, network: nn.Module) -> None:
        """Look up the modules of `beside` in `network` from now on; both components may share them."""
        self._network = weakref.ref(network)  # a cycle would keep the weights until the garbage collector runs
        for name in self._beside:  # for a component that outlives the network
            self._beside[name] = (find(network, name[1:]),)

    def part(self, name: str) -> nn.Module:
        """Return a step's module by the name that the step gave it."""
        if not name.startswith("/"):
            return find(self, name)
        network = self._network and self._network()
        return find(network, name[1:]) if network is not None else self._beside[name][0]

    def run(self, steps: Sequence[Step], x: Tensor, state: State | None = None) -> Tensor:
        """Execute some of the Program's steps; return no frames where one of them begins later."""
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
        """Execute all steps on each frame of x before the next frame, so that few frames are in progress at once, also
        where a clip's end releases many. The last frame of x may be the clip's last. Yield at least one result, which
        may have no frames."""
        if not steps or not (x.shape[2] or state.ending):
            yield _nothing(steps, x) if steps else x
            return
        frames, ending, made = (x.split(1, 2) if x.shape[2] > 1 else (x,)), state.ending, False
        for i, frame in enumerate(frames, 1):
            state.ending = ending and i == len(frames)
            step = steps[0]
            for y in step.each(self.part, frame, state):
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
        """Yield the results of `high` for x as they are finished."""
        if self.program.style.single:
            yield from self._by_frame(self._high, x, state)
        else:
            yield self.high(x, state)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        if self.program.piece and state is None:
            return self._in_pieces(x)
        if self.program.half == "encoder" and state is None:
            x = self.program.whole(x)
        return self.run(self.program.steps, x, state)


    def _in_pieces(self, x: Tensor) -> Tensor:
        """Execute the Program on a whole clip, in the pieces that are part of the model."""
        state = State()
        if self.program.half == "encoder":
            parts = [self.run(self.program.steps, x[:, :, a:b], state) for a, b in self.program.spans(x.shape[2])]
        else:
            features = self.between(self.low(x, state), state)
            parts = [self.high(part, state) for part in features.split(self.program.piece, 2)]
        return torch.cat(parts, 2)


def _nothing(steps: Sequence[Step], x: Tensor) -> Tensor:
    """Return a result with no frames, of the size that the steps would give."""
    size = Size(0, *x.shape[3:], x.shape[1])
    for step in steps:
        size = step.size(size, False)
    return x.new_empty(x.shape[0], size.channels, 0, size.height, size.width)


def _whole() -> State:
    """Return a State for a clip that is passed in one call."""
    state = State()
    state.ending = True
    return state


class Network(nn.Module):
    """Encoder and decoder of a VAE with the parameter names of its files; an absent one is None. `packing` converts
    between the network's latents and external ones, for networks that need it."""

    encoder: Half | None
    decoder: Half | None

    def __init__(
        self, config: Any, encoder: Program | None, decoder: Program | None,
        packing: tuple[str, PackedLatents] | None = None,
    ) -> None:  # fmt: skip
        """Build the modules; `packing` is a pair of its name in the file and the module."""
        super().__init__()
        self.config = config
        self._packing = None if packing is None else packing[0]
        self.encoder = None if encoder is None else Half(encoder)
        self.decoder = None if decoder is None else Half(decoder)
        for half in (self.encoder, self.decoder):
            if half is None:
                continue
            for name, module in half.beside().items():
                if name not in self._modules and name not in self._parameters:  # encoder and decoder may share it
                    graft(self, name, module)
            half.belongs_to(self)
        if packing is not None:
            self.add_module(*packing)
        for name, module in self.named_modules():
            if hasattr(module, "key"):
                module.key = name  # the key of its history and of its calibration

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy and attach its components to it."""
        super().__setstate__(state)
        for half in (self.encoder, self.decoder):
            if half is not None:
                half.belongs_to(self)

    @property
    def packing(self) -> PackedLatents | None:
        return None if self._packing is None else self._modules[self._packing]  # type: ignore[return-value]

    def outside(self) -> list[str]:
        """Return the state dict keys of the packing."""
        return [] if self._packing is None else [k for k in self.state_dict() if k.partition(".")[0] == self._packing]

    def names(self, half: str) -> list[str]:
        """Return the keys of "encoder" or "decoder" in the file, those of the packing among the decoder's; none if it
        is absent."""
        part = getattr(self, half)
        first = () if part is None else (half, *part.beside(), *([self._packing] if half == "decoder" else ()))
        return [key for key in self.state_dict() if key.partition(".")[0] in first]

    def drop(self, half: str) -> None:
        """Remove "encoder" or "decoder" from the network."""
        other = getattr(self, "encoder" if half == "decoder" else "decoder")
        kept = () if other is None else other.beside()
        for name in (half, *getattr(self, half).beside()):
            if name not in kept:
                setattr(self, name, None)

    @staticmethod
    def noise(shape: Sequence[int], seed: int) -> Tensor:
        """Return the noise that `sample` adds to latents of this shape, in units of their std; it is the same on every
        device. The noise of a clip does not depend on later clips of the batch."""
        generator = torch.Generator().manual_seed(seed)
        kind = {"dtype": torch.float32, "device": "cpu"}
        return torch.stack([torch.randn(*shape[1:], generator=generator, **kind) for _ in range(shape[0])])

    @classmethod
    def sample(cls, moments: Tensor, seed: int | None = None, noise: Tensor | None = None) -> Tensor:
        """Return the latent of moments [B, 2C, T, h, w]: the mean, or mean + std * noise.

        Args:
            seed: of the noise; None: no noise unless `noise` is given.
            noise: used where `seed` is None; for a part of a latent, the same part of its noise.
        """
        mean, logvar = moments.chunk(2, 1)
        if seed is not None:
            noise = cls.noise(mean.shape, seed)
        if noise is None:
            return mean
        return torch.addcmul(mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0)), noise.to(mean))
