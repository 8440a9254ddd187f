"""Products of transformer blocks with the norms before them and what follows them in one pass."""

from .angles import Place, angles
from .dispatch import added, fuses, gated_product, projected, turned
from .schedules import GROUP

__all__ = ["GROUP", "Place", "added", "angles", "fuses", "gated_product", "projected", "turned"]
