"""Expansion, pixel shuffle and convolution as one convolution on the small input."""

from .compose import Composed, compose, pack
from .dispatch import upsample

__all__ = ["Composed", "compose", "pack", "upsample"]
