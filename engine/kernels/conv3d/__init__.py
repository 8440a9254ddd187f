"""3-D convolution over bordered channels-last buffers."""

from .dispatch import conv3d
from .types import Epilogue, Geometry, Partials, Pixels, Weight, pack_weight, padded_channels

__all__ = ["Epilogue", "Geometry", "Partials", "Pixels", "Weight", "conv3d", "pack_weight", "padded_channels"]
