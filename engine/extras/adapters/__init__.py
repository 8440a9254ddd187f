"""Objects with the interfaces of other programs' VAEs, which run on this engine."""

from .for_diffusers import DiffusersVAE, for_diffusers
from .seedvr2 import SeedVR2VAE
from .wan_video import WanVideoVAE

__all__ = ["DiffusersVAE", "SeedVR2VAE", "WanVideoVAE", "for_diffusers"]
