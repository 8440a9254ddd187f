"""Normalise, activate, quantise and pad in one pass."""

from .op import coefficients, norm_act, statistics
from .types import Condition, Norm, Store, latent_of_frame

__all__ = ["Condition", "Norm", "Store", "coefficients", "latent_of_frame", "norm_act", "statistics"]
