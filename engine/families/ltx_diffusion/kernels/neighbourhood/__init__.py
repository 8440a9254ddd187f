"""Attention of every token to the tokens around it."""

from .op import neighbourhood
from .windows import Window

__all__ = ["Window", "neighbourhood"]
