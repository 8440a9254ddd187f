"""Expansion, pixel shuffle and convolution as one convolution on the small input."""

from .op import Composed, compose, compose_nearest, pack, pack_nearest, upsample

__all__ = ["Composed", "compose", "compose_nearest", "pack", "pack_nearest", "upsample"]
