"""The engine: reads weight files and runs the networks within a memory target. Never imports comfy."""

from __future__ import annotations

from .checkpoint import Checkpoint, read_checkpoint
from .errors import Cancelled, CheckpointError, InputError, PlanError, ZeroWasteError
from .loader import demo_vae_path, load
from .vae import VideoVAE

__all__ = [
    "Cancelled",
    "Checkpoint",
    "CheckpointError",
    "InputError",
    "PlanError",
    "VideoVAE",
    "ZeroWasteError",
    "demo_vae_path",
    "load",
    "read_checkpoint",
]
