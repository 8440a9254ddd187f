"""Frames doubled by repeating channels."""

from .dispatch import duplicate

__all__ = ["duplicate"]
