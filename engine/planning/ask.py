"""The request to a planner: component, size of the clip and the user's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..request import Request
from ..system.memory import GIB, in_gb
from . import refusals

#: Least bytes beside a run that messages name.
WORTH_SAYING = GIB // 10


@dataclass(frozen=True)
class Ask:
    """A request to the planner.

    half: "decoder" or "encoder". latents: of the clip. height, width: of the frame, in latent pixels. chunk: latents of
    a chunk that the user asked for (0: the planner chooses). output: type of the results. band: rows of exact tiles
    that the user asked for, in pixels (0: none). host: bytes of host memory for parked histories (None: no limit, 0:
    none). rest: rows and columns of pixels that fill no latent pixel. check: called between dry runs; may raise."""

    half: str
    latents: int
    height: int
    width: int
    chunk: int
    output: torch.dtype
    band: int
    host: int | None
    rest: tuple[int, int]
    check: Callable[[], None]
    #: All that the user asked for, for a family's own component.
    request: Request
    #: Name of the option that raises the target, for refusals.
    option: str = "vram_gb"
    #: Latents of the clip whose noise is drawn at once and waits in host memory; None: these, 0: of none.
    drawn: int | None = None
    #: As of `Limits`.
    cpu: bool = False
    #: Bytes that this process holds apart from the run, for messages.
    beside: int = field(default=0, compare=False)

    def told(self, target: int | None) -> str:
        """Return a target in words, with the memory of this process that it does not include."""
        held, left = in_gb(self.beside), in_gb(target)
        return refusals.BESIDE.format(left=left, held=held) if self.beside >= WORTH_SAYING else left
