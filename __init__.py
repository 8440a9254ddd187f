"""ZeroWaste VAE: exact, fast and memory-predictable video VAE decoding and encoding.

One tree, two uses: a ComfyUI custom-node folder and the installed package `zerowaste_vae`.
"""

from __future__ import annotations

from .engine import (
    Cancelled,
    Checkpoint,
    CheckpointError,
    InputError,
    PlanError,
    VideoVAE,
    ZeroWasteError,
    demo_vae_path,
    load,
    read_checkpoint,
)

__version__ = "0.1.0"
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


def comfy_entrypoint() -> object:
    """Called by ComfyUI only: what needs ComfyUI is imported here, so that the engine works without it."""
    from .nodes.extension import Extension

    return Extension()
