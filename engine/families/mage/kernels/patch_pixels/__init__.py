"""A small network for every pixel of a patch, from its position's channels to finished pixels."""

from .op import PatchNetwork, fits, patch_pixels

__all__ = ["PatchNetwork", "fits", "patch_pixels"]
