"""What a run follows: steps, tiles, parked histories, and the memory they take."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from ..memory import in_gb
from .parking import Parking
from .tiles import Grid


@dataclass(frozen=True)
class Steps:
    """Latents per chunk, and frames per call at the highest resolutions. 0: all there are. lead: latents of a clip's
    first chunk, 0: as many as of the others."""

    latents: int = 0
    frames: int = 0
    lead: int = 0

    def at(self, latent: int) -> int:
        """Latents of the chunk that begins with this one."""
        return self.lead or self.latents if latent == 0 else self.latents

    def spans(self, latents: int) -> list[tuple[int, int]]:
        """(first, end) of the chunks of a clip."""
        edges = [0]
        while edges[-1] < latents:
            edges.append(min(edges[-1] + self.at(edges[-1]), latents))
        return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class Plan:
    """How a clip goes through the network.

    `peak_bytes` counts weights, history, activations and library workspaces on the device: torch's allocated bytes.
    Its caching allocator may reserve more while the card has room, and gives that back before it runs out.
    """

    steps: Steps
    grid: Grid
    peak_bytes: int
    fused: bool = False
    #: Histories that wait in host memory, if any, and the bytes they take there.
    parking: Parking | None = None
    host_bytes: int = 0
    #: Of those, what comes to the device in a chunk; as much goes back.
    far_bytes: int = field(default=0, compare=False)

    #: A target that was the default one and had to be raised to this, if so.
    raised: int | None = field(default=None, compare=False)
    #: What "auto" had to give up for a plan, and what would spare it.
    note: str = field(default="", compare=False)

    @property
    def tiled(self) -> bool:
        return len(self.grid) > 1

    def describe(self) -> str:
        tiles = f"{len(self.grid)} blended tiles" if self.tiled else "untiled"
        frames = f", {self.steps.frames} frame(s) per step at full size" if self.steps.frames else ""
        kernels = "fused kernels" if self.fused else "plain torch"
        parked = f", {in_gb(self.host_bytes)} of histories parked in host memory" if self.host_bytes else ""
        size = f"about {in_gb(self.peak_bytes)}"
        note = f" ({self.note})" if self.note else ""
        return f"{kernels}, {tiles}, {self.steps.latents} latent(s) per chunk{frames}{parked}, {size}{note}"
