"""3-D convolution over bordered channels-last buffers."""

from .op import conv3d
from .reference import frames_of
from .schedules import sums_bytes
from .types import Balance, Epilogue, Geometry, Partials, Pixels, Weight, pack_weight, padded_channels
from .winograd2d import pack_tiles

__all__ = [
    "Balance",
    "Epilogue",
    "Geometry",
    "Partials",
    "Pixels",
    "Weight",
    "conv3d",
    "frames_of",
    "pack_tiles",
    "pack_weight",
    "padded_channels",
    "sums_bytes",
]
