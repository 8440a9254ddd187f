"""Interface between a call and what runs a model: the fused operators, plain torch, or a family's own components."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ..planning.plan import Plan
from ..report import Report
from .guard import Guard
from .results import Results
from .reuse import Runs


class Ready(Protocol):
    """An encoder or decoder, ready to run on a device."""

    def through(self, data: Any, plan: Plan, results: Results, guard: Guard, wanted: range) -> Iterator[int]:
        """Take latents [B, C, T, h, w], or the frames of an encode (`video.Video`), through the component.

        Args:
            data: of all clips.
            plan: that the component was made for.
            results: destination of the wanted frames, or moments, of each clip.
            guard: keeps count of what is finished.

        Yields: before each part of the work, the number of latents that it needs by then.
        """


class Component(Protocol):
    """Encoder and decoder of one model on one route, for the plans of `planning/plans.py`'s class on that route.

    runs: its runs, where a plan is `kept`. A family's own one also has `begin`."""

    runs: Runs

    def half(self, name: str, plan: Plan, device: torch.device, scale: float, seed: int | None) -> Ready:
        """Return "encoder" or "decoder" for a run. scale: latents are divided by it. seed: of noise in a decoder."""

    def packed_bytes(self, half: str) -> int:
        """Return the bytes on the device of what it made of the weights of "encoder" or "decoder"."""

    def release(self, keep: str = "") -> int:
        """Free what it made of weights, except of the component `keep`; return their bytes."""

    def begin(self, report: Report, size: tuple[int, int, int], seed: int | None) -> None:
        """Note in the report what a decode begins with. size: latents and their rows and columns. seed: of noise."""
