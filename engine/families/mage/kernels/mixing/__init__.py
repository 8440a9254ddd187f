"""Passes over a picture between products: norms over channels, a depthwise convolution with its sums, gates made of
these, and windows."""

from .dispatch import blocks, gates, layer_normed, mixed, unwindowed, windowed

__all__ = ["blocks", "gates", "layer_normed", "mixed", "unwindowed", "windowed"]
