"""Passes over a picture between products: norms over channels, and a depthwise convolution with its sums."""

from .dispatch import blocks, layer_normed, mixed

__all__ = ["blocks", "layer_normed", "mixed"]
