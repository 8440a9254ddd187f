"""Passes over the tokens of a transformer."""

from .dispatch import LIMITS, TURNS, gated, multiplied, normalised, rotated, rounded, summed
from .reference import hadamard

__all__ = ["LIMITS", "TURNS", "gated", "hadamard", "multiplied", "normalised", "rotated", "rounded", "summed"]
