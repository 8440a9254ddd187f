"""The last convolution, stored in the output's own layout and type."""

from ..conv3d import Pixels
from .op import BYTES, MOST_OUTPUTS, RAW, UNIT, columns_weight, scratch_floats, to_pixels

__all__ = ["BYTES", "MOST_OUTPUTS", "RAW", "UNIT", "Pixels", "columns_weight", "scratch_floats", "to_pixels"]
