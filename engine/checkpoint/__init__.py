"""Weight files: read, name, reshape, convert."""

from .reader import read_checkpoint
from .shapes import restore_shapes
from .types import Checkpoint

__all__ = ["Checkpoint", "read_checkpoint", "restore_shapes"]
