"""Tiles of the attention kernels per generation, and the scratch between them."""

from __future__ import annotations

from dataclasses import dataclass

from ..conv3d.schedules import of_generation


@dataclass(frozen=True)
class Schedule:
    """Output positions and columns, depth of one step; warps; stages."""

    positions: int
    columns: int
    depth: int
    warps: int
    stages: int


# (scores, values) per generation: queries x keys over the head, and queries x columns over the keys. Both have the same
# rows, and a step of the second lies within one key tile of the first. sm_90 is measured on an H200; the others fit
# their shared memory and do not spill.
SCHEDULES: dict[int, tuple[Schedule, Schedule]] = {
    90: (
        Schedule(positions=128, columns=128, depth=64, warps=4, stages=3),
        Schedule(positions=128, columns=128, depth=128, warps=8, stages=3),
    ),
    100: (
        Schedule(positions=128, columns=128, depth=64, warps=8, stages=3),
        Schedule(positions=128, columns=128, depth=64, warps=8, stages=3),
    ),
    120: (
        Schedule(positions=128, columns=128, depth=32, warps=8, stages=3),
        Schedule(positions=128, columns=128, depth=32, warps=8, stages=3),
    ),
    80: (
        Schedule(positions=128, columns=128, depth=32, warps=8, stages=3),
        Schedule(positions=128, columns=128, depth=32, warps=8, stages=3),
    ),
}
# Softmax weights kept at once; queries run in equal blocks of rows that fit (3,712 of 14,400 at 1280x720).
SCRATCH_BYTES = 128 * 2**20
# Over a whole clip they may be so many bytes, for rows whose results are so many values: a tile for each processor of
# an H200 in the second product.
CLIP_BYTES, CLIP_VALUES = 2**30, 132 * 128 * 128
# Rows and key tiles per step of the merge.
MERGE_ROWS, MERGE_TILES = 32, 32


@dataclass(frozen=True)
class Blocks:
    """How one call shares its scratch: queries per block, softmax weights in a row of one, and tiles of keys."""

    rows: int
    stride: int
    tiles: int

    @classmethod
    def of(cls, tokens: int, itemsize: int, scores: Schedule, clip: int = 0) -> Blocks:
        """clip: of a whole one, channels of the head."""
        tiles = -(-tokens // scores.columns)
        stride = tiles * scores.columns
        room = max(SCRATCH_BYTES, min(CLIP_VALUES // clip * stride * itemsize, CLIP_BYTES)) if clip else 0
        return cls(block_rows(tokens, stride * itemsize, scores.positions, room), stride, tiles)

    def split(self, itemsize: int) -> tuple[int, int]:
        """Bytes of the weights, and of all: behind them lie a peak and a sum per query and tile, in fp32."""
        weights = self.rows * self.stride * itemsize
        return weights, weights + 8 * self.tiles * self.rows


def pick(sm: int) -> tuple[Schedule, Schedule]:
    return of_generation(SCHEDULES, sm)


def block_rows(tokens: int, row_bytes: int, tile: int, room: int = 0) -> int:
    """Queries per block: whole tiles, equal blocks, weights of `row_bytes` a row within `room` (0: SCRATCH_BYTES)."""
    most = max((room or SCRATCH_BYTES) // row_bytes // tile, 1) * tile
    blocks = -(-tokens // most)
    return -(-tokens // blocks // tile) * tile
