"""Candidates for a kind of layer: the table's schedule and a handful of others that compile without spills."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...kernels.conv3d.schedules import SMALL_PLANE, Schedule, fit, pick
from ...kernels.conv3d.tuned import Kind
from ...kernels.conv3d.types import HALF_DEPTH
from ...kernels.targets import Target

#: Neighbouring tiles that share a weight tile: where the outputs fit one tile or tiles are few, where they take
#: several, and where phases multiply the weights.
GROUPS = (1, 16, 64)


def table(target: Target, kind: Kind) -> Schedule:
    """Return the schedule that runs where nothing is tuned."""
    frame = (1, 1) if kind.small else (1, SMALL_PLANE)
    share = target.mma_sync and not kind.strided and kind.accumulate in ("f32", "i32")
    return pick(target, kind.dtype, kind.channels, kind.outputs, frame, kind.phases, kind.row, kind.sums, share)


def candidates(target: Target, kind: Kind) -> list[Schedule]:
    """Return the table's schedule and then others, each once.

    All keep what plans count on: no larger buffers of sums than a dry run states (tiles are not lower than the table's
    lowest, slices not narrower), and 8-bit products summed in fp16 stay within its range."""
    first = table(target, kind)
    deep = first.depth
    made = []
    for shape in _shapes(target, kind):
        several = kind.outputs > shape.columns and not kind.small
        one = replace(shape, group=GROUPS[2 if kind.phases > 1 else int(several)])
        one = fit(one, kind.channels, kind.outputs, kind.row)
        # With a second tile, wide 8-bit steps leave registers for quarters only.
        made.append(replace(one, slices=4) if one.tail and kind.dtype.itemsize == 1 else one)
    deepest = HALF_DEPTH if kind.accumulate == "f16" and kind.dtype.itemsize == 1 else max(deep, 128)
    lowest = 64 if kind.small else 128
    narrowest = min(16, max(kind.outputs // 4, 1))
    # int8 on sm_100 leaves no registers for a second tile, except in the table's own pairs.
    if kind.dtype == torch.int8 and target.sm >= 100:
        made = [s for s in made if not s.tail]
    fits = [s for s in made if s.depth <= deepest and s.positions >= lowest and s.stages >= 2
            and min(s.columns // s.slices, s.tail or s.columns) >= narrowest]  # fmt: skip
    return list(dict.fromkeys([first, *fits]))


def _shapes(target: Target, kind: Kind) -> list[Schedule]:
    half = kind.dtype.itemsize == 2
    if target.sm >= 100 and target.shared_kib > 128:  # sums have their own memory
        d = 64 if half else 128
        return [Schedule(128, 128, d, 4, 4, slices=4), Schedule(128, 128, d, 8, 4, slices=4),
                Schedule(128, 128, d, 8, 3, slices=4),
                *([] if kind.small else [Schedule(128, 256, d, 8, 3, slices=4)])]  # fmt: skip
    if target.tma and target.shared_kib > 128:
        d = 64 if half else 128
        made = [Schedule(128, 128, d, 4, 3), Schedule(128, 128, d, 4, 4), Schedule(128, 256, d, 8, 3)]
        return [*made, Schedule(64, 256, d, 4, 4), Schedule(64, 128, d, 4, 4)] if kind.small else made
    # Sums share the registers with the operands of products.
    d = 32 if half else 64
    if target.mma_sync and kind.accumulate != "mx":
        made = [Schedule(128, 128, d, 4, 3), Schedule(256, 128, d, 8, 3), Schedule(256, 128, d, 8, 4)]
        if kind.accumulate == "f16":  # held in addition to sums in fp32, for fp8 in each step
            made = [*made[1:], Schedule(128, 256, d, 8, 4)] if half else [Schedule(128, 128, d, 8, n) for n in (3, 4)]
        elif kind.small and kind.phases == 1:
            made = [Schedule(64, 128, d, 4, 4), Schedule(64, 128, 2 * d, 4, 3), made[0]]
        # Pairs of tiles leave registers for lower ones only.
        return [s if kind.outputs % s.columns == 0 else Schedule(128, 128, d, 8, 3) for s in made]
    slices = 4 if half else 2
    made = [Schedule(128, 128, d, 8, 3, slices=slices), Schedule(128, 128, d, 8, 4, slices=slices),
            Schedule(128, 64, d, 4, 4), Schedule(128, 64, 2 * d, 4, 2)]  # fmt: skip
    if kind.small and kind.phases == 1:
        made += [Schedule(64, 128, d, 4, 3), Schedule(64, 64, d, 4, 4)]
    return made
