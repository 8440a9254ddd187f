"""Zero-Waste VAE: exact, fast and memory-predictable video and image VAE decoding and encoding.

One tree, two uses: a ComfyUI custom-node folder and the installed package `zerowaste_vae`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import engine

if TYPE_CHECKING:
    from .engine import (
        Cancelled,
        Checkpoint,
        CheckpointError,
        InputError,
        LatentFile,
        LatentWriter,
        Options,
        Plan,
        PlanError,
        Report,
        VideoVAE,
        ZeroWasteError,
        demo_vae_path,
        latent_metadata,
        load,
        read_checkpoint,
        read_latent,
        read_video,
        write_latent,
        write_mp4,
    )

__version__ = "0.1.0"
#: ComfyUI serves this folder: help pages of the nodes.
WEB_DIRECTORY = "./web"
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
    """Return one of the engine's names, imported when first used (see engine/__init__.py)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(engine, name)


def __dir__() -> list[str]:
    """Return the public names, for `dir` and for completion."""
    return sorted([*__all__, "__version__"])


def comfy_entrypoint() -> object:
    """Return the extension; called by ComfyUI only. Code that needs ComfyUI is imported here, so that the engine works
    without it."""
    from .engine.extras.compat.one_copy import share
    from .nodes.extension import Extension

    share(__name__)
    return Extension()
