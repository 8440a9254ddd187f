"""Normalise, activate, quantise and pad in one pass."""

from .dispatch import coefficients, norm_act, statistics
from .types import Norm, Store

__all__ = ["Norm", "Store", "coefficients", "norm_act", "statistics"]
