"""Weight files -> Checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .types import Checkpoint

__all__ = ["Checkpoint", "read_checkpoint", "restore_shapes"]


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a safetensors file."""
    try:
        with safe_open(path, "pt") as f:
            return Checkpoint({k: f.get_tensor(k).clone() for k in f.keys()}, dict(f.metadata() or {}), Path(path))  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({e})") from e


def restore_shapes(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]]) -> Checkpoint:
    """Refuse tensors whose shape is not the expected one."""
    for key, shape in expected.items():
        if tuple(checkpoint.tensors[key].shape) != shape:
            raise CheckpointError(f"{checkpoint.path}: {key} is not {shape}")
    return checkpoint
