"""Tiles of the Winograd form: pairs of columns, output channels and depth. As in the direct form's table, a schedule
depends on the layer and the full frame only."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...targets import Target
from ..schedules import SMALL_PLANE, TYPES, Schedule, fit, generation

_HALF, _BYTE = "16 bit", "8 bit"
# Two accumulators: a tile of 128 x 128 holds what one of 256 x 128 does in the direct form. Where products come from
# registers (sm_80 to 89, 120) half of that is the most that does not spill.
SCHEDULES: dict[int, dict[tuple[str, str], Schedule]] = {
    90: {
        (_HALF, "plane"): Schedule(128, 128, 64, 8, 3, group=8),
        (_HALF, "small plane"): Schedule(64, 128, 64, 4, 3),
        (_BYTE, "plane"): Schedule(128, 128, 128, 8, 3, group=8),
        (_BYTE, "small plane"): Schedule(64, 128, 128, 4, 3),
    },
    100: {
        (_HALF, "plane"): Schedule(128, 128, 64, 8, 3, 4),
        (_HALF, "small plane"): Schedule(128, 64, 64, 4, 4, 4),
        (_BYTE, "plane"): Schedule(128, 128, 128, 8, 3, 4),
        (_BYTE, "small plane"): Schedule(128, 64, 128, 4, 4, 4),
    },
    120: {
        (_HALF, "plane"): Schedule(64, 128, 32, 8, 3),
        (_HALF, "small plane"): Schedule(64, 64, 32, 4, 3),
        (_BYTE, "plane"): Schedule(64, 128, 64, 8, 3),
        (_BYTE, "small plane"): Schedule(64, 64, 64, 4, 3),
    },
    80: {
        (_HALF, "plane"): Schedule(64, 128, 32, 8, 3),
        (_HALF, "small plane"): Schedule(64, 64, 32, 4, 3),
        (_BYTE, "plane"): Schedule(64, 128, 64, 8, 3),
        (_BYTE, "small plane"): Schedule(64, 64, 64, 4, 3),
    },
}


def pick(target: Target, dtype: torch.dtype, channels: int, out_channels: int, frame: tuple[int, int]) -> Schedule:
    """The one schedule for a layer: `channels` as padded in the buffer, `frame` the full frame's (H, W)."""
    size = _BYTE if dtype in TYPES else _HALF
    kind = "small plane" if frame[0] * frame[1] < SMALL_PLANE else "plane"
    table = SCHEDULES[generation(target.sm)][size, kind]
    chosen = fit(table, channels, out_channels)
    if not chosen.tail:
        return chosen
    # Four accumulators: where they are wider than a tile of the table, half as many pairs.
    rows = table.bm // 2 if chosen.bn + chosen.tail > 128 else table.bm
    return replace(chosen, bm=max(rows, 32), stages=table.stages, slices=4)
