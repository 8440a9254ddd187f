"""Causal history of one clip, kept outside the modules."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch


@dataclass
class Place:
    """The latent that a chunk of a clip begins with, and those that steps begin with, by name."""

    begins: dict[str, int]
    at: int = 0


class State:
    """The last frames every causal convolution still needs, by the convolution's key.

    One State belongs to one clip (or one tile of it). Modules never hold history, so decodes are re-entrant, can be
    dropped half-way and can go on under another chunking: the same State serves the whole clip, a few latents or one
    frame per call, with equal results.
    """

    def __init__(self, seed: int | None = None, place: Place | None = None) -> None:
        #: Of noise that is added within the network; None: there is none.
        self.seed = seed
        self.histories: dict[str, torch.Tensor] = {}
        #: Frames that all wait for the clip's end, in their order, by what they wait for.
        self.waiting: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        #: Norms over chunks whose first chunk is through.
        self.through: set[str] = set()
        self.counts: Counter[str] = Counter()
        #: What steps compute once for a clip, by their names.
        self.constants: dict[str, torch.Tensor] = {}
        #: The next call is the clip's last: what looks ahead sees its last frame repeated.
        self.ending = False
        #: Where each step begins, for a later part of a clip; None: at the clip's start.
        self.place = place
        #: The step that is called began, or begins, behind the clip's start.
        self.inside = False

    def takes_part(self, name: str) -> bool:
        """Whether the step of this name sees the next chunk; sets `inside`."""
        if self.place is None:
            return True
        begins = self.place.begins[name]
        self.inside = begins > 0
        return begins <= self.place.at

    def count(self, key: str, x: torch.Tensor) -> int:
        """How many frames of the clip have come under `key` before those of x [B, C, T, H, W]: some, where the step
        began behind the clip's start."""
        before = self.counts[key] + self.inside
        self.counts[key] += x.shape[2]
        return before

    def aligned(self, key: str, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """As many frames of x [B, C, T, H, W] as `like` has, which came of x and may be late; the rest waits."""
        waiting = self.histories.get(key)
        if waiting is None and x.shape[2] == like.shape[2]:
            return x
        x = x if waiting is None else torch.cat((waiting, x), 2)
        self.keep(key, x[:, :, like.shape[2] :])
        return x[:, :, : like.shape[2]]

    def keep(self, key: str, frames: torch.Tensor) -> None:
        """File a copy of `frames` under `key`; a view would keep the whole input alive (2.8x the bytes, decoder)."""
        old = self.histories.get(key)
        if old is not None and old.shape == frames.shape and old.dtype == frames.dtype and not torch.is_grad_enabled():
            old.copy_(frames)
        else:
            self.histories[key] = frames.clone()

    def nbytes(self) -> int:
        waiting = (t for frames in self.waiting.values() for t in frames)
        return sum(t.numel() * t.element_size() for t in (*self.histories.values(), *waiting))


def grouped(x: torch.Tensor, state: State | None, key: str, every: int) -> torch.Tensor:
    """[B, C, T, H, W] behind the frames that have waited for it, as far as they fill groups of `every`; the rest waits.
    A clip's first frame comes as often as makes a group."""
    if state is None or key not in state.histories:
        x = torch.cat((x[:, :, :1].expand(-1, -1, every - 1, -1, -1), x), 2)
    else:
        x = torch.cat((state.histories[key].to(x), x), 2)
    ready = x.shape[2] // every * every
    if state is not None:
        state.keep(key, x[:, :, ready:])
    return x[:, :, :ready]
