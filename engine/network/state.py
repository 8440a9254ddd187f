"""Hold the causal history of one clip outside the modules."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass
class Place:
    """The latent that a chunk of a clip begins with (`at`), and the latents that steps begin with, by step name.

    origin: the clip's latent that the steps' first one is, if all begin with it as a clip of their own."""

    begins: dict[str, int]
    at: int = 0
    origin: int = 0


class State:
    """The last frames every causal convolution still needs, by the convolution's key.

    One State belongs to one clip (or one tile of it). Modules never hold history, so decodes are re-entrant, can be
    dropped half-way and can go on under another chunking: the same State serves the whole clip, a few latents or one
    frame per call, with equal results.
    """

    def __init__(self, seed: int | None = None, place: Place | None = None, given: Any = None) -> None:
        #: Seed of noise that is added within the network; None: no noise.
        self.seed = seed
        self.histories: dict[str, torch.Tensor] = {}
        #: Frames that wait for the clip's end, in their order, by the key of the step.
        self.waiting: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        #: Keys of norms over chunks that have seen their first chunk.
        self.through: set[str] = set()
        self.counts: Counter[str] = Counter()
        #: Values that steps compute once per clip, by step name.
        self.constants: dict[str, Any] = {}
        #: What a family's own component gives its steps; None: the core runs them.
        self.given = given
        #: The next call is the clip's last: convolutions that look ahead see its last frame repeated.
        self.ending = False
        #: Where each step begins, for a later part of a clip; None: at the clip's start.
        self.place = place
        #: The step being called began, or begins, after the clip's start.
        self.inside = False

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return `make()`, which is called once per clip."""
        if name not in self.constants:
            self.constants[name] = make()
        return self.constants[name]

    def takes_part(self, name: str) -> bool:
        """Return whether the named step sees the next chunk; this sets `inside`."""
        if self.place is None:
            return True
        begins = self.place.begins[name]
        self.inside = begins > 0
        return begins <= self.place.at

    def count(self, key: str, x: torch.Tensor) -> int:
        """Return how many frames of the clip came under `key` before those of x [B, C, T, H, W]: at least one if the
        step began after the clip's start."""
        before = self.counts[key] + self.inside
        self.counts[key] += x.shape[2]
        return before

    def aligned(self, key: str, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return as many frames of x [B, C, T, H, W] as `like` has, which was made from x and may be late; keep the
        rest."""
        waiting = self.histories.get(key)
        if waiting is None and x.shape[2] == like.shape[2]:
            return x
        x = x if waiting is None else torch.cat((waiting, x), 2)
        self.keep(key, x[:, :, like.shape[2] :])
        return x[:, :, : like.shape[2]]

    def keep(self, key: str, frames: torch.Tensor) -> None:
        """Store a copy of `frames` under `key`; a view would keep the whole input alive (2.8x the bytes, decoder)."""
        old = self.histories.get(key)
        if old is not None and old.shape == frames.shape and old.dtype == frames.dtype and not torch.is_grad_enabled():
            old.copy_(frames)
        else:
            self.histories[key] = frames.clone()

    def nbytes(self) -> int:
        waiting = (t for frames in self.waiting.values() for t in frames)
        return sum(t.numel() * t.element_size() for t in (*self.histories.values(), *waiting))


def grouped(x: torch.Tensor, state: State | None, key: str, every: int) -> torch.Tensor:
    """Return x [B, C, T, H, W] after the frames kept from earlier calls, as far as they fill groups of `every`; keep
    the rest. A clip's first frame is repeated to fill a group."""
    if state is None or key not in state.histories:
        x = torch.cat((x[:, :, :1].expand(-1, -1, every - 1, -1, -1), x), 2)
    else:
        x = torch.cat((state.histories[key].to(x), x), 2)
    ready = x.shape[2] // every * every
    if state is not None:
        state.keep(key, x[:, :, ready:])
    return x[:, :, :ready]


def drawn(seed: int, place: str, *shape: int) -> torch.Tensor:
    """Draw normal float32 values on the CPU, the same on every machine. place: their purpose, as text."""
    digest = hashlib.sha256(f"{seed} {place}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
