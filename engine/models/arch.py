"""What the engine needs to know of an architecture besides its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Architecture:
    """Name (that of its key set in checkpoint/names.py), compression factors and constructors of one VAE family.

    `configure(shapes, norm_groups)` reads the sizes from a file's tensor shapes; `build(config)` makes the module.
    """

    name: str
    spatial: int
    temporal: int
    #: Latents outside the network are the network's times this.
    scale: float
    configure: Callable[[Mapping[str, tuple[int, ...]], int | None], Any]
    build: Callable[[Any], nn.Module]
