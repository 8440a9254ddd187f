"""Tile shapes per target, operand type and layer. A schedule depends on the layer and the full frame only, so that
every chunk, tail and band of a decode computes the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..targets import FP8, Target
from .types import stat_span


@dataclass(frozen=True)
class Schedule:
    """Output positions, output channels and depth of one step; warps; pipeline stages; epilogue slices (1, 2, 4);
    tiles of positions that run through all output channels together; channels of a second, narrower tile of the same
    positions (widths are powers of two: 96 is 64 + 32), 0: none; depth of the last steps, where whole ones leave a rest
    of the channels of a row of taps (three taps of 96 are 2 * 128 + 32), 0: none."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    slices: int = 2
    group: int = 1
    tail: int = 0
    rest: int = 0


# (operands, kind of layer or how many outputs it has) -> schedule, per generation. sm_90 measured on an H200; the
# others chosen so that nothing spills and shared memory stays under the generation's limit (cross-compiled in the
# tests), not timed.
_HALF, _BYTE = "16 bit", "8 bit"
TYPES = {FP8: "fp8", torch.int8: "int8"}
SCHEDULES: dict[int, dict[tuple[str, str], Schedule]] = {
    90: {
        (_HALF, "narrow"): Schedule(128, 128, 64, 4, 3),
        (_HALF, "wide"): Schedule(128, 256, 64, 8, 3, group=16),
        (_HALF, "small plane"): Schedule(64, 256, 64, 4, 4),
        (_HALF, "time phases"): Schedule(128, 128, 64, 4, 3, group=64),
        (_HALF, "space phases"): Schedule(128, 128, 64, 4, 3, group=64),
        (_BYTE, "narrow"): Schedule(128, 128, 128, 4, 3),
        (_BYTE, "wide"): Schedule(128, 128, 128, 4, 3),
        (_BYTE, "small plane"): Schedule(64, 256, 128, 4, 4),
        (_BYTE, "time phases"): Schedule(128, 128, 128, 4, 3, group=64),
        (_BYTE, "space phases"): Schedule(128, 128, 128, 4, 3, group=64),
        # Wan's widths at 1280x720. Behind some: ms, and those of the tile that the kinds above would give.
        (_HALF, "160"): Schedule(128, 128, 64, 4, 3, 4, tail=32),  # strides leave no registers for larger slices
        ("fp8", "96"): Schedule(128, 64, 128, 4, 4, tail=32),
        ("int8", "96"): Schedule(128, 64, 128, 4, 3, 1, tail=32),  # 0.65, 0.68
        (_BYTE, "160"): Schedule(128, 128, 128, 4, 3, tail=32),
        (_BYTE, "192"): Schedule(128, 128, 64, 4, 4, 4, tail=64),
        (_BYTE, "space phases 192"): Schedule(128, 128, 128, 8, 3, group=64, tail=64),
        (_BYTE, "320"): Schedule(128, 256, 128, 8, 3, 4, tail=64),
        (_BYTE, "384"): Schedule(128, 256, 128, 8, 3, 4, tail=128),  # all its layers in fp8 1.32, 1.39
        (_BYTE, "640"): Schedule(128, 128, 128, 4, 3, group=8),
        ("fp8", "1024"): Schedule(128, 256, 128, 8, 3, group=16),  # 1.20, 1.23
        ("int8", "1024"): Schedule(128, 128, 128, 4, 3, group=16),  # 1.28, 1.32; on small planes 0.17, 0.24
        ("fp8", "wide without sums"): Schedule(128, 256, 128, 8, 3, group=16),  # 512: 1.22, 1.36
    },
    100: {
        (_HALF, "narrow"): Schedule(128, 128, 64, 4, 4, 4),
        (_HALF, "wide"): Schedule(128, 256, 64, 8, 3, 4),
        (_HALF, "small plane"): Schedule(128, 128, 64, 8, 4, 4),
        (_BYTE, "narrow"): Schedule(128, 128, 128, 4, 4, 4),
        (_BYTE, "wide"): Schedule(128, 256, 128, 8, 3, 4),
        (_BYTE, "small plane"): Schedule(128, 128, 128, 8, 4, 4),
        (_HALF, "time phases"): Schedule(128, 128, 64, 8, 4, 4, 16),
        (_HALF, "space phases"): Schedule(128, 128, 64, 8, 4, 4, 16),
        (_BYTE, "time phases"): Schedule(128, 128, 128, 8, 4, 4, 16),
        (_BYTE, "space phases"): Schedule(128, 128, 128, 8, 4, 4, 16),
        ("int8", "384"): Schedule(128, 128, 128, 8, 3, 4),  # a pair of tiles spills
    },
    120: {
        (_HALF, "narrow"): Schedule(128, 128, 32, 8, 3),
        (_HALF, "wide"): Schedule(128, 128, 32, 8, 3),
        (_HALF, "small plane"): Schedule(64, 128, 32, 4, 3),
        (_BYTE, "narrow"): Schedule(128, 128, 64, 8, 3),
        (_BYTE, "wide"): Schedule(128, 128, 64, 8, 3),
        (_BYTE, "small plane"): Schedule(64, 128, 64, 4, 3),
        (_HALF, "time phases"): Schedule(128, 128, 32, 8, 3, 4, 16),
        (_HALF, "space phases"): Schedule(128, 128, 32, 8, 3, group=16),
        (_BYTE, "time phases"): Schedule(128, 128, 64, 8, 3, group=16),
        (_BYTE, "space phases"): Schedule(128, 128, 64, 8, 3, group=16),
    },
    80: {
        (_HALF, "narrow"): Schedule(128, 128, 32, 8, 3),
        (_HALF, "wide"): Schedule(128, 128, 32, 8, 3),
        (_HALF, "small plane"): Schedule(64, 128, 32, 4, 3),
        (_BYTE, "narrow"): Schedule(128, 128, 64, 8, 3),
        (_BYTE, "wide"): Schedule(128, 128, 64, 8, 3),
        (_BYTE, "small plane"): Schedule(64, 128, 64, 4, 3),
        (_HALF, "time phases"): Schedule(128, 128, 32, 8, 3, group=16),
        (_HALF, "space phases"): Schedule(128, 128, 32, 8, 3, group=16),
        (_BYTE, "time phases"): Schedule(128, 128, 64, 8, 3, group=16),
        (_BYTE, "space phases"): Schedule(128, 128, 64, 8, 3, group=16),
    },
}
# Below this many positions tiles of 128 rows leave many processors idle (90 x 160 is the lowest stage of 720p).
SMALL_PLANE = 90 * 160
# Image rows whose positions share tiles: tiles restart at each such block, so that a band which starts at a multiple of
# it has the frame's own tiles and partial sums. Even pitches (frames of even width) then fill whole tiles of 128.
ROW_BLOCK = 64


def sums_bytes(out: tuple[int, ...], groups: int, phases: tuple[int, int] = (1, 1)) -> int:
    """Bytes of the sums that a convolution's epilogue makes of `out` [D, H, W, K], at most, on any GPU. phases: rows
    and columns that each position of the input makes."""
    d, h, w, k = out
    py, px = phases
    rows, pitch = h // py, w // px + 2
    tile = 64 if rows * (w // px) < SMALL_PLANE else 128  # the lowest of all schedules
    full, rest = divmod(rows, ROW_BLOCK)
    tiles = full * -(-ROW_BLOCK * pitch // tile) + -(-rest * pitch // tile)
    # The narrowest slice of an epilogue is a quarter of the channels, and none is below 16 from 64 channels on.
    span = stat_span(k, groups, min(16, max(k // 4, 1)))
    return 4 * 2 * d * tiles * py * px * (k // span)


def generation(sm: int) -> int:
    """The schedule table's key for a compute capability."""
    return 80 if sm < 90 else 90 if sm < 100 else 100 if sm < 120 else 120


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()


def fit(schedule: Schedule, channels: int, out_channels: int, row: int = 1) -> Schedule:
    """Shrink a tile to a narrow layer: steps must divide the channels of a tap or make up those of a row of taps
    (`row`: how many it has), width need not exceed the outputs."""
    depth, rest = schedule.bk, 0
    part = channels & -channels
    if part == channels:
        depth = min(depth, channels)
    elif part < depth:
        run = row * channels
        depth = min(depth, 1 << run.bit_length() - 1)
        rest = run % depth & -(run % depth)
    if schedule.tail:  # made for these outputs
        return replace(schedule, bk=depth, rest=rest)
    width = min(schedule.bn, max(_power_of_two(out_channels), 16))
    tail = 0
    if out_channels % width:
        pair = _two_tiles(out_channels, width)
        if pair:
            width, tail = pair
        # Else narrower tiles, while those they save compute more than an eighth for nothing.
        while not pair and width > 32 and -(-out_channels // width) * width * 7 > out_channels * 8:
            width //= 2
    # Beside so many accumulators only quarters of the tile fit the registers.
    slices = 4 if width + tail > 256 else schedule.slices
    # A pair of up to 192 leaves room for one more stage (616 against 594 TFLOP/s at 192 on an H200).
    stages = schedule.stages + (tail > 0 and width + tail <= 192)
    return replace(schedule, bk=depth, bn=width, tail=tail, rest=rest, slices=slices, stages=stages)


def _two_tiles(out_channels: int, most: int) -> tuple[int, int] | None:
    """The widest pair of tiles, both powers of two, that fills the outputs without a rest: 96 is 64 + 32 (1.9 times as
    fast as three of 32 on an H200, 1.4 times as one padded tile of 128), 384 is 256 + 128."""
    while most >= 32:
        tail = most // 2
        while tail >= 16:
            if out_channels % (most + tail) == 0:
                return most, tail
            tail //= 2
        most //= 2
    return None


def pick(target: Target, dtype: torch.dtype, channels: int, out_channels: int, frame: tuple[int, int],
         phases: int = 1, row: int = 1, sums: bool = False) -> Schedule:
    """The one schedule for a layer: `channels` as padded in the buffer, `frame` the full frame's (H, W), `phases` 8 or
    4 where the layer upsamples time and space, or space, `row` the taps in a row of its window, `sums`: whether it
    makes those of a norm."""
    size = _HALF if dtype not in TYPES else _BYTE
    table = SCHEDULES[generation(target.sm)]
    kind = "narrow" if out_channels <= 128 else "small plane" if frame[0] * frame[1] < SMALL_PLANE else "wide"
    if kind == "small plane" and out_channels % table[size, kind].bn:
        kind = "wide"  # its low tiles have no room for a second one
    # Four phases of 512 and more in 16 bit are as wide as any layer (626 against 536 TFLOP/s on an H200).
    if phases > 1 and not (phases == 4 and out_channels >= 512 and size == _HALF):
        kind = "time phases" if phases == 8 else "space phases"
        own = f"{kind} {out_channels}"
    else:
        own = str(out_channels)
    kinds = (own, kind) if sums else (own, f"{kind} without sums", kind)
    found = [(t, k) for k in kinds for t in (TYPES.get(dtype), size) if (t, k) in table]
    return fit(table[found[0]], channels, out_channels, row)
