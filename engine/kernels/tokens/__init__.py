"""Passes over the tokens of a transformer."""

from .op import LIMITS, attended, attends, gated, multiplied, normalised, rotated, rounded, sum_rows, summed
from .reference import hadamard

__all__ = ["LIMITS", "attended", "attends", "gated", "hadamard", "multiplied", "normalised", "rotated", "rounded",
           "sum_rows", "summed"]
