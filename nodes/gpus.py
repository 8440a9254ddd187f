"""GPUs beside the one that the host runs a VAE on."""

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
    """What a decode or encode takes to share the work, with room made on the others for what the plan takes. Nothing of
    ours stays there afterwards: the host does not know of it."""
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
