"""Tiles of the attention kernels per generation, and the scratch between them."""

from __future__ import annotations

from dataclasses import dataclass

from ..conv3d.schedules import Schedule, of_generation

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
# FILLING: values of results that fill an H200, a tile for each of its processors in the second product. CLIP_BYTES:
# the most bytes of the weights of rows with so many results, over a whole clip.
FILLING, CLIP_BYTES = 132 * 128 * 128, 2**30
# Fewest key tiles of a part of the second product.
PART_TILES = 64
# Rows and key tiles per step of the merge; LONG_MERGE is for blocks of LONG or more tiles, which have few rows.
MERGE, LONG_MERGE, LONG = (32, 32), (8, 128), 256
# Rows and columns of a program that adds the parts.
GATHER = (8, 256)


@dataclass(frozen=True)
class Blocks:
    """The shares of one call's scratch: queries per block, softmax weights in a row of one, tiles of keys, and the
    parts that these are cut into where the rows alone would leave processors idle (4096x4096: 256 rows of 512 channels
    are 8 programs)."""

    rows: int
    stride: int
    tiles: int
    parts: int

    @classmethod
    def of(cls, tokens: int, itemsize: int, scores: Schedule, head: int, clip: bool = False) -> Blocks:
        tiles = -(-tokens // scores.columns)
        stride = tiles * scores.columns
        room = max(SCRATCH_BYTES, min(FILLING // head * stride * itemsize, CLIP_BYTES)) if clip else 0
        rows = block_rows(tokens, stride * itemsize, scores.positions, room)
        return cls(rows, stride, tiles, max(1, min(FILLING // (rows * head), tiles // PART_TILES)))

    @property
    def each(self) -> int:
        """Return the number of key tiles in a part."""
        return -(-self.tiles // self.parts)

    @property
    def merge(self) -> tuple[int, int]:
        return LONG_MERGE if self.tiles >= LONG else MERGE

    def split(self, itemsize: int, head: int) -> tuple[int, int, int]:
        """Return bytes of the weights; with a peak and a sum per query and tile, in fp32; and with the parts'
        results."""
        weights = self.rows * self.stride * itemsize
        factors = weights + 8 * self.tiles * self.rows
        return weights, factors, factors + (4 * self.parts * self.rows * head if self.parts > 1 else 0)


def pick(sm: int) -> tuple[Schedule, Schedule]:
    return of_generation(SCHEDULES, sm)


def block_rows(tokens: int, row_bytes: int, tile: int, room: int = 0) -> int:
    """Return queries per block: whole tiles, equal blocks, weights of `row_bytes` a row within `room` (0:
    SCRATCH_BYTES)."""
    most = max((room or SCRATCH_BYTES) // row_bytes // tile, 1) * tile
    blocks = -(-tokens // most)
    return -(-tokens // blocks // tile) * tile
