"""Passes over the tokens of a transformer."""

from .dispatch import LIMITS, gated, normalised, rotated, rounded, summed

__all__ = ["LIMITS", "gated", "normalised", "rotated", "rounded", "summed"]
