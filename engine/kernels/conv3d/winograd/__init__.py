"""The convolution with fewer products: Winograd F(2, 3) along x."""

from .planes import buffer_shape, pack_planes, planes_of
from .schedules import takes

__all__ = ["buffer_shape", "pack_planes", "planes_of", "takes"]
