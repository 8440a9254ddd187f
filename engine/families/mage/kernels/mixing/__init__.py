"""Passes over a picture between products: norms over channels, a depthwise convolution with its sums, gates made of
these, and windows."""

from .op import blocks, gates, layer_normed, mixed, places_in, unwindowed, windowed, windows_of

__all__ = ["blocks", "gates", "layer_normed", "mixed", "places_in", "unwindowed", "windowed", "windows_of"]
