"""The convolution with 16 products for each 36: Winograd F(2x2, 3x3), in registers."""

from .pack import pack_tiles, takes

__all__ = ["pack_tiles", "takes"]
