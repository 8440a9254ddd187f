"""Tiles of the Winograd form: pairs of columns, output channels and depth. As in the direct form's table, a schedule
depends on the layer and the full frame only."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from ...targets import Target
from ..schedules import SMALL_PLANE, TYPES, Schedule, fit, of_generation

_HALF, _BYTE = "16 bit", "8 bit"
# Two accumulators: a tile of 128 x 128 holds as many sums as one of 256 x 128 in the direct form. Where sums share
# registers with the operands (sm_80 to 89, 120, int8 on 100), half of that is the most that does not spill.
SCHEDULES: dict[int, dict[tuple[str, str], Schedule]] = {
    90: {
        # The epilogue whole: fp16 of 128 to 512 channels takes 1 to 5 % less than in halves, fp8 1 to 2 %.
        (_HALF, "plane"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3, slices=1, group=8),
        # Measured in fp16: 0.243 ms, and 0.293 of 64 x 128 with four warps.
        (_HALF, "small plane"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3, slices=1),
        # Sums of a norm with so many accumulators would spill.
        (_HALF, "wider"): Schedule(positions=64, columns=128, depth=64, warps=4, stages=3, slices=4, group=8, tail=64),
        (_HALF, "wider with sums"): Schedule(positions=128, columns=64, depth=64, warps=8, stages=3, slices=1, group=8,
                                             tail=32),
        (_BYTE, "plane"): Schedule(positions=128, columns=128, depth=128, warps=8, stages=3, slices=1, group=8),
        (_BYTE, "small plane"): Schedule(positions=128, columns=128, depth=128, warps=8, stages=3, slices=1),
    },
    100: {
        (_HALF, "plane"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3, slices=4),
        (_HALF, "small plane"): Schedule(positions=128, columns=64, depth=64, warps=4, stages=4, slices=4),
        (_HALF, "wider"): Schedule(positions=128, columns=64, depth=64, warps=8, stages=3, slices=2, tail=32),
        (_BYTE, "plane"): Schedule(positions=128, columns=128, depth=128, warps=8, stages=3, slices=4),
        (_BYTE, "small plane"): Schedule(positions=128, columns=64, depth=128, warps=4, stages=4, slices=4),
        ("int8", "plane"): Schedule(positions=64, columns=128, depth=128, warps=8, stages=3, slices=4),
        ("int8", "small plane"): Schedule(positions=64, columns=64, depth=128, warps=4, stages=4, slices=4),
    },
}
for _sm in (80, 120):
    SCHEDULES[_sm] = {
        # 0.76 ms, and 0.93 with eight warps (256, fp16; int8 0.79, 1.02: an H200 in the form of sm_120)
        (_HALF, "plane"): Schedule(positions=64, columns=128, depth=32, warps=4, stages=3, group=16),
        (_HALF, "small plane"): Schedule(positions=64, columns=64, depth=32, warps=4, stages=3),
        (_HALF, "wider"): Schedule(positions=64, columns=64, depth=32, warps=4, stages=3),
        (_BYTE, "plane"): Schedule(positions=64, columns=128, depth=64, warps=4, stages=3, slices=4, group=16),
        (_BYTE, "small plane"): Schedule(positions=64, columns=64, depth=64, warps=4, stages=3),
    }

# In int8 tiles of four warps spill there, and in every type where pointers take registers too: up to 1.8 KB a thread
# by ptxas for sm_86, none with eight.
SCHEDULES[120]["int8", "plane"] = Schedule(positions=64, columns=128, depth=64, warps=8, stages=3)
SCHEDULES[80] |= {
    (_HALF, "plane"): Schedule(positions=64, columns=128, depth=32, warps=8, stages=3, group=16),
    (_BYTE, "plane"): Schedule(positions=64, columns=128, depth=64, warps=8, stages=3, group=16),
}

#: Outputs of a layer that takes this form are whole tiles of so many channels, and its inputs no fewer; in 16 bit of
#: WIDER, too. The direct form takes 1.15 times as long at 128 channels and 1.17 to 1.26 at 256 to 512 (fp16, H200),
#: with its norm 1.03 to 1.13 at 192 (bf16, H100). At 96 it stays: the best of ten tiles took 0.99 of its time without a
#: residual, and planes would take 2.3 GB more of a decode of Wan 2.1.
WIDTH, WIDER = 128, 192


def takes(dtype: torch.dtype, channels: int, out_channels: int) -> bool:
    """Return True if a layer has the Winograd form where that is switched on. It depends on its widths and the type of
    its operands only: the same on any device, for any frame and chunk."""
    widths = (WIDTH,) if dtype in TYPES else (WIDTH, WIDER)
    known = dtype in (torch.float16, torch.bfloat16, *TYPES)
    return known and any(channels >= width and out_channels % width == 0 for width in widths)


def pick(target: Target, dtype: torch.dtype, channels: int, out_channels: int, frame: tuple[int, int],
         sums: bool = True) -> Schedule:
    """Return the one schedule for a layer: `channels` as padded in the buffer, `frame` the full frame's (H, W), `sums`:
    it makes the sums of a norm."""
    table = of_generation(SCHEDULES, target.sm)
    kinds = ["small plane" if frame[0] * frame[1] < SMALL_PLANE else "plane"]
    size = _BYTE if dtype in TYPES else _HALF
    if size == _HALF and out_channels % WIDTH and out_channels % WIDER == 0:
        kinds = ["wider with sums"] * sums + ["wider"]
    rows = product(kinds, (TYPES.get(dtype, size), size))
    chosen = next(table[word, kind] for kind, word in rows if (word, kind) in table)
    return replace(fit(chosen, channels, out_channels), tail=chosen.tail)
