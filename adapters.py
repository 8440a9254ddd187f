"""Objects with the interfaces of other programs' VAEs, which run on this engine (docs/python.md)."""

from __future__ import annotations

from .engine.extras.adapters import DiffusersVAE, SeedVR2VAE, WanVideoVAE, for_diffusers

__all__ = ["DiffusersVAE", "SeedVR2VAE", "WanVideoVAE", "for_diffusers"]
