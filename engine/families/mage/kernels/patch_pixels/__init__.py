"""A small network for every pixel of a patch, from its position's channels to finished pixels."""

from .dispatch import fits, patch_pixels
from .types import PatchNetwork

__all__ = ["PatchNetwork", "fits", "patch_pixels"]
