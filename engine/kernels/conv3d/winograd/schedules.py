"""Tiles of the Winograd form: pairs of columns, output channels and depth. As in the direct form's table, a schedule
depends on the layer and the full frame only."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...targets import Target
from ..schedules import SMALL_PLANE, TYPES, Schedule, fit, generation

_HALF, _BYTE = "16 bit", "8 bit"
# Two accumulators: a tile of 128 x 128 holds what one of 256 x 128 does in the direct form. Where sums are in registers
# that products are fed from, too (sm_80 to 89, 120, int8 on 100), half of that is the most that does not spill, and a
# second tile rarely fits.
SCHEDULES: dict[int, dict[tuple[str, str], Schedule]] = {
    90: {
        (_HALF, "plane"): Schedule(128, 128, 64, 8, 3, group=8),
        (_HALF, "small plane"): Schedule(64, 128, 64, 4, 3),
        (_BYTE, "plane"): Schedule(128, 128, 128, 8, 3, group=8),
        (_BYTE, "small plane"): Schedule(64, 128, 128, 4, 3),
        (_HALF, "96"): Schedule(128, 64, 64, 8, 3, 4, tail=32),
        (_HALF, "160"): Schedule(64, 128, 64, 8, 3, 4, tail=32),
        (_HALF, "192"): Schedule(64, 128, 64, 8, 3, 4, tail=64),
        (_HALF, "320"): Schedule(64, 128, 64, 8, 3, 4, tail=32),
        (_BYTE, "96"): Schedule(128, 64, 128, 8, 3, 4, tail=32),
        (_BYTE, "160"): Schedule(64, 128, 128, 8, 3, 4, tail=32),
        (_BYTE, "192"): Schedule(64, 128, 128, 8, 3, 4, tail=64),
        (_BYTE, "320"): Schedule(64, 128, 128, 8, 3, 4, tail=32),
    },
    100: {
        (_HALF, "plane"): Schedule(128, 128, 64, 8, 3, 4),
        (_HALF, "small plane"): Schedule(128, 64, 64, 4, 4, 4),
        (_HALF, "phases"): Schedule(128, 128, 64, 8, 3, group=64),
        (_BYTE, "plane"): Schedule(128, 128, 128, 8, 3, 4),
        (_BYTE, "small plane"): Schedule(128, 64, 128, 4, 4, 4),
        (_HALF, "96"): Schedule(128, 32, 64, 8, 3, 4),
        (_HALF, "160"): Schedule(64, 128, 64, 8, 3, 4, tail=32),
        (_HALF, "192"): Schedule(128, 64, 64, 8, 3, 4),
        (_HALF, "320"): Schedule(64, 128, 64, 8, 3, 4, tail=32),
        (_BYTE, "160"): Schedule(64, 128, 128, 8, 3, 4, tail=32),
        (_BYTE, "192"): Schedule(128, 64, 128, 8, 3, 4),
        (_BYTE, "320"): Schedule(64, 128, 128, 8, 3, 4, tail=32),
        ("int8", "plane"): Schedule(64, 128, 128, 8, 3, 4),
        ("int8", "small plane"): Schedule(64, 64, 128, 4, 4, 4),
        ("int8", "96"): Schedule(64, 32, 128, 4, 3, 4),
        ("int8", "160"): Schedule(64, 32, 128, 4, 3, 4),
        ("int8", "192"): Schedule(64, 64, 128, 4, 3, 4),
        ("int8", "320"): Schedule(64, 64, 128, 4, 3, 4),
    },
}
for _sm in (80, 120):
    SCHEDULES[_sm] = {
        (_HALF, "plane"): Schedule(64, 128, 32, 8, 3),
        (_HALF, "small plane"): Schedule(64, 64, 32, 4, 3),
        (_BYTE, "plane"): Schedule(64, 128, 64, 8, 3),
        (_BYTE, "small plane"): Schedule(64, 64, 64, 4, 3),
        (_HALF, "96"): Schedule(64, 32, 32, 8, 3),
        (_HALF, "160"): Schedule(64, 32, 32, 8, 3),
        (_HALF, "192"): Schedule(64, 64, 32, 4, 3),
        (_HALF, "320"): Schedule(64, 64, 32, 4, 3),
        (_BYTE, "96"): Schedule(64, 32, 64, 4, 3),
        (_BYTE, "160"): Schedule(64, 32, 64, 4, 3),
        (_BYTE, "192"): Schedule(64, 64, 64, 4, 3),
        (_BYTE, "320"): Schedule(64, 64, 64, 4, 3),
    }


def pick(target: Target, dtype: torch.dtype, channels: int, out_channels: int, frame: tuple[int, int],
         phases: int = 1) -> Schedule:
    """The one schedule for a layer: `channels` as padded in the buffer, `frame` the full frame's (H, W), `phases` of
    an upsampler, whose kernel takes whole steps of a tap and one tile at a time."""
    table = SCHEDULES[generation(target.sm)]
    kind = "small plane" if frame[0] * frame[1] < SMALL_PLANE and phases == 1 else "plane"
    size = _BYTE if dtype in TYPES else _HALF
    words = (TYPES.get(dtype, size), size)
    if phases > 1:
        keys = [(word, k) for k in ("phases", kind) for word in words]
        chosen = next(table[key] for key in keys if key in table)
        return replace(chosen, bk=min(chosen.bk, channels & -channels), group=64)
    keys = [(word, k) for k in (str(out_channels), kind) for word in words]
    return fit(next(table[key] for key in keys if key in table), channels, out_channels)
