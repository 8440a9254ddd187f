"""What the planner is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ask:
    """What is to be planned; sizes in latents and latent pixels."""

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
    #: Raises the target, for refusals.
    option: str = "vram_gb"
