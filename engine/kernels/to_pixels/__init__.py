"""The last convolution, stored in the output's own layout and type."""

from ..conv3d import Pixels
from .dispatch import MOST_OUTPUTS, columns_weight, scratch_floats, to_pixels
from .types import BYTES, RAW, UNIT

__all__ = ["BYTES", "MOST_OUTPUTS", "RAW", "UNIT", "Pixels", "columns_weight", "scratch_floats", "to_pixels"]
