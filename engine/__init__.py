"""The engine: reads weight files and runs the networks within a memory target. Never imports comfy.

Names that need torch are imported when first used, so that the command line can answer --help without loading it and
say in one line that it is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import Cancelled, CheckpointError, InputError, PlanError, ZeroWasteError
from .extras import POINTS
from .system.extension import fill

if TYPE_CHECKING:
    from .checkpoints import Checkpoint, read_checkpoint
    from .extras.media.clips import read_video
    from .extras.media.latents import LatentFile, LatentWriter, latent_metadata, read_latent, write_latent
    from .extras.media.mp4 import write_mp4
    from .loader import demo_vae_path, load
    from .options import Options
    from .planning.plan import Plan
    from .report import Report
    from .vae import VideoVAE

fill(POINTS)

_HOMES = {
    "Checkpoint": ".checkpoints",
    "LatentFile": ".extras.media.latents",
    "LatentWriter": ".extras.media.latents",
    "Options": ".options",
    "Plan": ".planning.plan",
    "Report": ".report",
    "VideoVAE": ".vae",
    "demo_vae_path": ".loader",
    "latent_metadata": ".extras.media.latents",
    "load": ".loader",
    "read_checkpoint": ".checkpoints",
    "read_latent": ".extras.media.latents",
    "read_video": ".extras.media.clips",
    "write_latent": ".extras.media.latents",
    "write_mp4": ".extras.media.mp4",
}

__all__ = [
    "Cancelled",
    "Checkpoint",
    "CheckpointError",
    "InputError",
    "LatentFile",
    "LatentWriter",
    "Options",
    "Plan",
    "PlanError",
    "Report",
    "VideoVAE",
    "ZeroWasteError",
    "demo_vae_path",
    "latent_metadata",
    "load",
    "read_checkpoint",
    "read_latent",
    "read_video",
    "write_latent",
    "write_mp4",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
