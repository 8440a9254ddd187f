"""Tiles of the two passes and the scratch between them."""

from __future__ import annotations

from ..conv3d.schedules import Schedule
from ..targets import Target

# Positions per program of the pass that adds up the shifted columns.
GATHER_POSITIONS = 512
# Partial products kept at once; larger calls run band by band.
SCRATCH_BYTES = 96 * 2**20


def pick(target: Target, channels: int, columns: int) -> Schedule:
    """`columns`: 9 * K rounded up to a power of two; three accumulators of that width are live."""
    depth = min(channels & -channels, 64 if target.shared_kib < 128 else 128)
    return Schedule(128 if columns <= 32 else 64, columns, depth, 4, 3, 1)
