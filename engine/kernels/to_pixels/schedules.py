"""Tiles of the two passes and the scratch between them."""

from __future__ import annotations

from ..conv3d.schedules import Schedule
from ..targets import Target

# Positions per program of the pass that adds up the shifted columns.
GATHER_POSITIONS = 512
# Partial products kept at once; larger calls run band by band.
SCRATCH_BYTES = 96 * 2**20


def pick(target: Target, channels: int, kt: int) -> Schedule:
    """128 columns (32 for a kernel without taps in time) of fp32 products live beside two 32-column accumulators."""
    width = 128 if kt == 3 else 32
    if target.shared_kib > 128:
        return Schedule(128, width, min(channels & -channels, 128), 8, 3, 1)
    return Schedule(128, width, min(channels & -channels, 32), 8, 2, 1)
