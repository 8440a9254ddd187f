"""Upsampling that doubles frames, rows and columns by repeating channels."""

from .op import duplicate

__all__ = ["duplicate"]
