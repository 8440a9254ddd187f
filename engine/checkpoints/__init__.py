"""Weight files: reading, names, shapes, conversion."""

from .convert import convert_checkpoint, save_checkpoint
from .reader import read_checkpoint
from .shapes import restore_shapes
from .types import Checkpoint

__all__ = ["Checkpoint", "convert_checkpoint", "read_checkpoint", "restore_shapes", "save_checkpoint"]
