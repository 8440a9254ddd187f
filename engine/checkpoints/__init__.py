"""Weight files: reading, names, shapes, conversion."""

from .convert import convert_checkpoint, save_checkpoint
from .reader import from_stored, read_checkpoint
from .scales import quantised
from .shapes import restore_shapes
from .types import Checkpoint

__all__ = [
    "Checkpoint", "convert_checkpoint", "from_stored", "quantised", "read_checkpoint", "restore_shapes",
    "save_checkpoint",
]  # fmt: skip
