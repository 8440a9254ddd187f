"""Products of transformer blocks with the norms before them and what follows them in one pass."""

from .angles import Place, angles
from .op import added, feed_forward, feeds, fuses, gated_product, projected, turned, turned_columns
from .schedules import GROUP

__all__ = [
    "GROUP", "Place", "added", "angles", "feed_forward", "feeds", "fuses", "gated_product", "projected", "turned",
    "turned_columns",
]  # fmt: skip
