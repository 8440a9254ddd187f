"""GPUs that share a VAE's work with the one that the host runs it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..engine import VideoVAE
from ..engine.devices.kinds import resolve
from ..engine.run.plan import Plan


@contextmanager
def others(
    engine: VideoVAE, gpus: str, plan: Plan | None, make_room: Callable[[int, torch.device], object]
) -> Iterator[dict[str, str]]:
    """Yield the options of a decode or encode that share the work, with room for the plan made on the other GPUs. None
    of our memory stays there afterwards: the host does not know of it."""
    if gpus == "auto":
        yield {}
        return
    for device in resolve(gpus, engine.device):
        if device != engine.device and plan is not None:
            make_room(plan.peak_bytes, device)
    try:
        yield {"devices": gpus}
    finally:
        engine.release_copies()
