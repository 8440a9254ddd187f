"""Upsampling that doubles frames, rows and columns by repeating channels."""

from .dispatch import duplicate

__all__ = ["duplicate"]
