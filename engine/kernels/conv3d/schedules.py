"""Tile shapes per target, operand type and layer. A schedule depends on the layer and the full frame only, so that
every chunk, tail and band of a decode computes the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from ..targets import FP8, Target
from .types import stat_span

Table = TypeVar("Table")


@dataclass(frozen=True)
class Schedule:
    """A tile and how it is computed.

    positions, columns (output channels) and depth of one step; warps; pipeline stages; slices of the epilogue (1, 2,
    4); group: tiles of positions that run through all output channels together; tail: columns of a second, narrower
    tile of the same positions (widths are powers of two: 96 is 64 + 32), 0: none; rest: depth of the last steps, where
    whole ones leave a rest of the channels of a row of taps (three taps of 96 are 2 * 128 + 32), 0: none; shared: the
    taps of a row share a step's positions, which are read once for all of them (`gluon.py` and `taps.py` alone; a
    step is `depth` of each tap)."""

    positions: int
    columns: int
    depth: int
    warps: int
    stages: int
    slices: int = 2
    group: int = 1
    tail: int = 0
    rest: int = 0
    shared: bool = False


class Layer(NamedTuple):
    """The key of a schedule: the operands' type ("fp8", "int8") or width ("16 bit", "8 bit"); the kind of layer
    ("": any without phases; "pair": any whose outputs only two tiles fill, "wide pair": where one is of 128 channels;
    "shared": any whose taps of a row share positions, where whole tiles fill its outputs);
    its outputs (0: any); True if it serves layers that make a norm's sums."""

    operands: str
    kind: str
    outputs: int = 0
    sums: bool = True


# Per generation. sm_90 measured on an H200, sm_80 to 89 and 120 in their form there; sm_100 chosen so that nothing
# spills and shared memory stays under the limit. All of them are cross-compiled in the tests.
_HALF, _BYTE = "16 bit", "8 bit"
TYPES = {FP8: "fp8", torch.int8: "int8"}
# The rows that sm_80 to 89 and 120 have in common: products fed from registers (mma.sync), shared memory of 99 KiB.
# Tiles of 64 x 64 for each warp read least of it; wider ones do not fit the registers. Comments give the ms of a row
# and those of Triton's loop with its best tile, in the form of sm_89 on an H200, with no more blocks on a processor
# than 100 KiB hold.
_MMA: dict[Layer, Schedule] = {
    # Where the taps of a row share positions, tall tiles read least of the L2 cache. These rows' TFLOP/s in the form of
    # sm_120, and those of the rows below: 128: 414, 393; 256: 463, 445; 384: 441, 428; 512: 469, 460.
    Layer(_HALF, "shared"): Schedule(positions=256, columns=128, depth=32, warps=8, stages=2, group=16, shared=True),
    # 336, 329
    Layer(_HALF, "shared", 96): Schedule(
        positions=256, columns=64, depth=32, warps=8, stages=2, tail=32, shared=True
    ),
    # 396, 376
    Layer(_HALF, "shared", 192): Schedule(
        positions=256, columns=64, depth=32, warps=4, stages=2, group=16, shared=True
    ),
    # TOP/s (`taps.py`). 128: 811, 742; 256: 935, 883; 384: 937, 886; 512: 952, 913
    Layer("int8", "shared"): Schedule(positions=256, columns=128, depth=64, warps=8, stages=2, group=16, shared=True),
    # 707, 638
    Layer("int8", "shared", 192): Schedule(
        positions=256, columns=64, depth=64, warps=4, stages=2, group=4, shared=True
    ),
    # 128: 0.97, 1.11
    Layer(_HALF, "narrow"): Schedule(positions=256, columns=128, depth=64, warps=8, stages=2),
    # 256: 1.75, 2.11; 512: 3.70, 4.34
    Layer(_HALF, "wide"): Schedule(positions=128, columns=256, depth=64, warps=8, stages=2, group=16),
    # 512: 0.045, 0.058; 384: 0.094, 0.150
    Layer(_HALF, "small plane"): Schedule(positions=128, columns=128, depth=32, warps=4, stages=3),
    # A pair gets one more stage than it says here. 96: 0.58, 0.84
    Layer(_HALF, "pair"): Schedule(positions=128, columns=128, depth=32, warps=4, stages=2),
    # Four warps would spill.
    Layer(_HALF, "wide pair"): Schedule(positions=128, columns=128, depth=32, warps=8, stages=3),
    # 1.69, 2.37
    Layer(_HALF, "", 160): Schedule(positions=128, columns=128, depth=32, warps=8, stages=4, tail=32),
    # 2.26, 2.64: four warps would spill.
    Layer(_HALF, "", 192): Schedule(positions=128, columns=128, depth=32, warps=8, stages=3, tail=64),
    Layer(_HALF, "", 320): Schedule(positions=128, columns=128, depth=32, warps=8, stages=4, tail=32),
    # 2.19, 2.54
    Layer(_HALF, "", 384): Schedule(positions=256, columns=128, depth=64, warps=8, stages=2, group=16),
    # 512: 4.45, 5.16
    Layer(_HALF, "time phases"): Schedule(positions=128, columns=256, depth=64, warps=8, stages=2, group=64),
    # 256: 1.44, 1.88
    Layer(_HALF, "space phases"): Schedule(positions=128, columns=256, depth=64, warps=8, stages=2, group=64),
    Layer(_HALF, "space phases", 192): Schedule(positions=128, columns=64, depth=64, warps=4, stages=3, group=64),
    Layer(_BYTE, "narrow"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3),
    Layer(_BYTE, "wide"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3, group=16),
    Layer(_BYTE, "small plane"): Schedule(positions=64, columns=128, depth=64, warps=4, stages=3),
    Layer(_BYTE, "pair"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3),
    Layer(_BYTE, "wide pair"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3),
    Layer(_BYTE, "time phases"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3, group=16),
    Layer(_BYTE, "space phases"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3, group=16),
    Layer("fp8", "", 160): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3, slices=4, tail=32),
    Layer("fp8", "", 320): Schedule(positions=128, columns=128, depth=64, warps=8, stages=3, slices=4, tail=32),
    # 128: 0.54, 0.64
    Layer("int8", "narrow"): Schedule(positions=256, columns=128, depth=128, warps=8, stages=2),
    # 256: 1.75, 2.13; 512: 3.42, 4.18
    Layer("int8", "wide"): Schedule(positions=128, columns=256, depth=128, warps=8, stages=2, group=16),
    # With larger slices of the epilogue it spills.
    Layer("int8", "wide", 768): Schedule(positions=128, columns=256, depth=128, warps=8, stages=2, slices=4, group=16),
    # With an epilogue in halves 512: 0.029, 0.032; 384: 0.063, 0.066
    Layer("int8", "small plane"): Schedule(positions=128, columns=128, depth=64, warps=4, stages=3),
    # 96: 0.78, 0.95
    Layer("int8", "pair"): Schedule(positions=128, columns=128, depth=64, warps=4, stages=2),
    # With larger slices of the epilogue these spill.
    Layer("int8", "", 160): Schedule(positions=256, columns=128, depth=64, warps=8, stages=3, slices=4, tail=32),
    Layer("int8", "", 192): Schedule(positions=128, columns=64, depth=64, warps=4, stages=3, group=16),
    Layer("int8", "", 320): Schedule(positions=256, columns=128, depth=64, warps=8, stages=3, slices=4, tail=32),
    Layer("int8", "", 384): Schedule(positions=256, columns=128, depth=128, warps=8, stages=2, slices=4, group=16),
    # 512: 2.26, 2.61
    Layer("int8", "time phases"): Schedule(positions=128, columns=256, depth=128, warps=8, stages=2, group=64),
    # 256: 1.72, 2.06
    Layer("int8", "space phases"): Schedule(positions=128, columns=256, depth=128, warps=8, stages=2, group=64),
    Layer("int8", "space phases", 192): Schedule(positions=128, columns=64, depth=128, warps=4, stages=3, group=64),
    Layer(_BYTE, "space phases", 192): Schedule(positions=128, columns=64, depth=64, warps=4, stages=3, group=64),
}
SCHEDULES: dict[int, dict[Layer, Schedule]] = {
    90: {
        Layer(_HALF, "narrow"): Schedule(positions=128, columns=128, depth=64, warps=4, stages=3),
        Layer(_HALF, "wide"): Schedule(positions=128, columns=256, depth=64, warps=8, stages=3, group=16),
        Layer(_HALF, "small plane"): Schedule(positions=64, columns=256, depth=64, warps=4, stages=4),
        Layer(_HALF, "time phases"): Schedule(positions=128, columns=128, depth=64, warps=4, stages=3, group=64),
        Layer(_HALF, "space phases"): Schedule(positions=128, columns=128, depth=64, warps=4, stages=3, group=64),
        Layer(_BYTE, "narrow"): Schedule(positions=128, columns=128, depth=128, warps=4, stages=3),
        Layer(_BYTE, "wide"): Schedule(positions=128, columns=128, depth=128, warps=4, stages=3),
        Layer(_BYTE, "small plane"): Schedule(positions=64, columns=256, depth=128, warps=4, stages=4),
        Layer(_BYTE, "time phases"): Schedule(positions=128, columns=128, depth=128, warps=4, stages=3, group=64),
        Layer(_BYTE, "space phases"): Schedule(positions=128, columns=128, depth=128, warps=4, stages=3, group=64),
        # Wan's widths at 1280x720. Comments give a row's ms, and those of the tile that the kinds above would give.
        # Strides leave no registers for larger slices.
        Layer(_HALF, "", 160): Schedule(positions=128, columns=128, depth=64, warps=4, stages=3, slices=4, tail=32),
        Layer("fp8", "", 96): Schedule(positions=128, columns=64, depth=128, warps=4, stages=4, tail=32),
        # 0.65, 0.68
        Layer("int8", "", 96): Schedule(positions=128, columns=64, depth=128, warps=4, stages=3, slices=1, tail=32),
        Layer(_BYTE, "", 160): Schedule(positions=128, columns=128, depth=128, warps=4, stages=3, tail=32),
        Layer(_BYTE, "", 192): Schedule(positions=128, columns=128, depth=64, warps=4, stages=4, slices=4, tail=64),
        Layer(_BYTE, "space phases", 192): Schedule(
            positions=128, columns=128, depth=128, warps=8, stages=3, group=64, tail=64
        ),
        Layer(_BYTE, "", 320): Schedule(positions=128, columns=256, depth=128, warps=8, stages=3, slices=4, tail=64),
        # All its layers in fp8: 1.32, 1.39.
        Layer(_BYTE, "", 384): Schedule(positions=128, columns=256, depth=128, warps=8, stages=3, slices=4, tail=128),
        Layer(_BYTE, "", 640): Schedule(positions=128, columns=128, depth=128, warps=4, stages=3, group=8),
        # 1.20, 1.23
        Layer("fp8", "", 1024): Schedule(positions=128, columns=256, depth=128, warps=8, stages=3, group=16),
        # 1.28, 1.32; on small planes 0.17, 0.24
        Layer("int8", "", 1024): Schedule(positions=128, columns=128, depth=128, warps=4, stages=3, group=16),
        # 512: 1.22, 1.36
        Layer("fp8", "wide", sums=False): Schedule(positions=128, columns=256, depth=128, warps=8, stages=3, group=16),
    },
    100: {
        Layer(_HALF, "narrow"): Schedule(positions=128, columns=128, depth=64, warps=4, stages=4, slices=4),
        Layer(_HALF, "wide"): Schedule(positions=128, columns=256, depth=64, warps=8, stages=3, slices=4),
        Layer(_HALF, "small plane"): Schedule(positions=128, columns=128, depth=64, warps=8, stages=4, slices=4),
        Layer(_BYTE, "narrow"): Schedule(positions=128, columns=128, depth=128, warps=4, stages=4, slices=4),
        Layer(_BYTE, "wide"): Schedule(positions=128, columns=256, depth=128, warps=8, stages=3, slices=4),
        Layer(_BYTE, "small plane"): Schedule(positions=128, columns=128, depth=128, warps=8, stages=4, slices=4),
        Layer(_HALF, "time phases"): Schedule(
            positions=128, columns=128, depth=64, warps=8, stages=4, slices=4, group=16
        ),
        Layer(_HALF, "space phases"): Schedule(
            positions=128, columns=128, depth=64, warps=8, stages=4, slices=4, group=16
        ),
        Layer(_BYTE, "time phases"): Schedule(
            positions=128, columns=128, depth=128, warps=8, stages=4, slices=4, group=16
        ),
        Layer(_BYTE, "space phases"): Schedule(
            positions=128, columns=128, depth=128, warps=8, stages=4, slices=4, group=16
        ),
        # A pair of tiles spills.
        Layer("int8", "", 384): Schedule(positions=128, columns=128, depth=128, warps=8, stages=3, slices=4),
    },
    120: _MMA,
    80: _MMA,
}
# Below this many positions tiles of 128 rows leave many processors idle (90 x 160 is the lowest stage of 720p).
SMALL_PLANE = 90 * 160
# Image rows whose positions share tiles: tiles restart at each such block, so that a band which starts at a multiple of
# it has the frame's own tiles and partial sums. Low blocks let ranks have equal parts (352 and 368 of 720 rows); the
# empty part of the last tile of each is 0.2 % of all in rows of 1280, 1.2 % in rows of 160.
ROW_BLOCK = 32


def sums_bytes(out: tuple[int, ...], groups: int, phases: tuple[int, int] = (1, 1), tiles: bool = False) -> int:
    """Return the most bytes, on any GPU, of the sums that a convolution's epilogue makes of `out` [D, H, W, K]. phases:
    rows and columns that each position of the input makes. tiles: in Winograd form, of which a block is 8 rows of 32
    columns at least."""
    d, h, w, k = out
    py, px = phases
    rows, pitch = h // py, w // px + 2
    tile = 64 if rows * (w // px) < SMALL_PLANE else 128  # the lowest of all schedules
    full, rest = divmod(rows, ROW_BLOCK)
    blocks = full * -(-ROW_BLOCK * pitch // tile) + -(-rest * pitch // tile)
    # The narrowest slice of an epilogue is a quarter of the channels, and none is below 16 from 64 channels on.
    narrowest = min(16, max(k // 4, 1))
    if tiles:
        blocks, narrowest = -(-h // 8) * -(-w // 32), 4 if k % 128 else 16
    span = stat_span(k, groups, narrowest)
    return 4 * 2 * d * blocks * py * px * (k // span)


def of_generation(tables: Mapping[int, Table], sm: int) -> Table:
    """Return the table for a compute capability: its own, or that of the newest generation before it. Each form has
    tables of its own, and need not have them for the same generations."""
    return tables[max((key for key in tables if key <= sm), default=min(tables))]


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()


def fit(schedule: Schedule, channels: int, out_channels: int, row: int = 1) -> Schedule:
    """Shrink a tile to a narrow layer: steps must divide the channels of a tap or make up those of a row of taps
    (`row`: their number), width need not exceed the outputs."""
    depth, rest = schedule.depth, 0
    part = channels & -channels
    if part == channels:
        depth = min(depth, channels)
    elif part < depth:
        run = row * channels
        depth = min(depth, 1 << run.bit_length() - 1)
        rest = run % depth & -(run % depth)
    if schedule.tail:  # made for these outputs
        return replace(schedule, depth=depth, rest=rest)
    width = min(schedule.columns, max(_power_of_two(out_channels), 16))
    tail = 0
    if out_channels % width:
        pair = _two_tiles(out_channels, width)
        if pair:
            width, tail = pair
        # Otherwise narrower tiles, while the wider ones would compute more than an eighth for nothing.
        while not pair and width > 32 and -(-out_channels // width) * width * 7 > out_channels * 8:
            width //= 2
    # With so many accumulators only quarters of the tile fit the registers.
    slices = 4 if width + tail > 256 else schedule.slices
    # A pair of up to 192 leaves room for one more stage (616 against 594 TFLOP/s at 192 on an H200).
    stages = schedule.stages + (tail > 0 and width + tail <= 192)
    return replace(schedule, depth=depth, columns=width, tail=tail, rest=rest, slices=slices, stages=stages)


def _two_tiles(out_channels: int, most: int) -> tuple[int, int] | None:
    """Return the widest pair of tiles, both powers of two, that fills the outputs without a rest: 96 is 64 + 32 (1.9
    times as fast as three of 32 on an H200, 1.4 times as one padded tile of 128), 384 is 256 + 128."""
    while most >= 32:
        tail = most // 2
        while tail >= 16:
            if out_channels % (most + tail) == 0:
                return most, tail
            tail //= 2
        most //= 2
    return None


def pick(target: Target, dtype: torch.dtype, channels: int, out_channels: int, frame: tuple[int, int],
         phases: int = 1, row: int = 1, sums: bool = False, share: bool = False) -> Schedule:
    """Return the one schedule for a layer.

    Args:
        channels: as padded in the buffer.
        frame: the full frame's (H, W).
        phases: 8 or 4 where the layer upsamples time and space, or space.
        row: the taps in a row of its window.
        sums: it makes the sums of a norm.
        share: its loop is `gluon.py`'s, in which the taps of a row can share positions: its steps are one position long
            and its products not summed in fp16, which loses by it.
    """
    table, small = of_generation(SCHEDULES, target.sm), frame[0] * frame[1] < SMALL_PLANE
    what = dtype, channels, out_channels, small, phases, row, sums, share
    known = id(table), what
    if (found := _picked.get(known)) is None:
        found = _picked[known] = table, _pick(table, *what)
    return found[1]


#: Earlier results of `pick`, with their table: choosing again is a tenth of a launch's time on the host.
_picked: dict[tuple[Any, ...], tuple[Mapping[Layer, Schedule], Schedule]] = {}


def _pick(table: Mapping[Layer, Schedule], dtype: torch.dtype, channels: int, out_channels: int, small: bool,
          phases: int, row: int, sums: bool, share: bool) -> Schedule:
    size = _HALF if dtype not in TYPES else _BYTE
    word = TYPES.get(dtype, size)
    if share and 1 < row <= 3 and phases == 1 and not small:  # weights of more taps do not fit shared memory
        for layer in (Layer(word, "shared", out_channels), Layer(size, "shared", out_channels),
                      Layer(word, "shared"), Layer(size, "shared")):  # fmt: skip
            s = table.get(layer)
            if s and channels % s.depth == 0 and out_channels % (s.columns + s.tail) == 0:
                return s
    kind = "narrow" if out_channels <= 128 else "small plane" if small else "wide"
    if kind == "small plane" and out_channels % table[Layer(size, kind)].columns:
        kind = "wide"  # its low tiles have no room for a second one
    # Four phases of 512 and more in 16 bit are as wide as any layer (626 against 536 TFLOP/s on an H200).
    if phases > 1 and not (phases == 4 and out_channels >= 512 and size == _HALF):
        kind = "time phases" if phases == 8 else "space phases"
        own = kind
    else:
        own = ""
    rows = [(own, out_channels, True), (kind, out_channels, True), *([] if sums else [(kind, 0, False)]),
            (kind, 0, True)]  # fmt: skip
    layers = [Layer(operands, *place) for place in rows for operands in (word, size)]
    chosen = next(table[layer] for layer in layers if layer in table)
    made = fit(chosen, channels, out_channels, row)
    if made.tail and not chosen.tail:
        two = "wide pair" if made.columns > 64 else "pair"
        pairs = [table[layer] for layer in (Layer(word, two), Layer(size, two)) if layer in table]
        if pairs:
            made = fit(replace(pairs[0], group=chosen.group), channels, out_channels, row)
    return made
