"""Expansion, pixel shuffle and convolution as one convolution on the small input."""

from .compose import Composed, compose, pack
from .dispatch import upsample
from .nearest import compose_nearest, pack_nearest

__all__ = ["Composed", "compose", "compose_nearest", "pack", "pack_nearest", "upsample"]
