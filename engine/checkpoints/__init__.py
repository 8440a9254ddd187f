"""Weight files: reading, names, shapes."""

from .memory import in_memory
from .reader import from_stored, read_checkpoint
from .scales import quantised
from .shapes import restore_shapes
from .types import Checkpoint

__all__ = [
    "Checkpoint", "from_stored", "in_memory", "quantised", "read_checkpoint", "restore_shapes",
]  # fmt: skip
