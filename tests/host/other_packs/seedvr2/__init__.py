"""Sockets, settings, modules and calls on the model cache of the SeedVR2 upscaler 2.5.24 (commit 4490bd1f), without its
diffusion: encoded batches are decoded again."""

from .src.interfaces.video_upscaler import NODE_CLASS_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS"]
