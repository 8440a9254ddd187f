"""Tiles of the two passes and the scratch between them."""

from __future__ import annotations

from ..conv3d.schedules import Schedule
from ..targets import Target

# Positions per program of the pass that adds up the shifted columns.
GATHER_POSITIONS = 512
# Partial products kept at once; larger calls run band by band.
SCRATCH_BYTES = 96 * 2**20


def pick(target: Target, channels: int, kt: int) -> Schedule:
    """Return the schedule: 128 columns (32 for a kernel with one tap in time) of fp32 products live in registers with
    two 32-column accumulators."""
    width = 128 if kt == 3 else 32
    if target.shared_kib > 128:
        # One step per frame: the weights stay resident. Not on sm_100, whose registers would spill around them.
        whole = target.sm < 100 and channels & -channels == channels <= 128
        depth = channels if whole else min(channels & -channels, 64)
        stages = 3 if whole else 2
        return Schedule(positions=128, columns=width, depth=depth, warps=8, stages=stages, slices=1)
    depth = min(channels & -channels, 32)
    return Schedule(positions=128, columns=width, depth=depth, warps=8, stages=2, slices=1)
