"""Tiles of the neighbourhood kernel per generation."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from .....kernels.conv3d.schedules import of_generation
from .windows import TERMS, whole


@dataclass(frozen=True)
class Schedule:
    """Queries of one program (they fill a tile as far as its sides allow) and their frames; keys per step; warps;
    stages."""

    queries: int
    frames: int
    keys: int
    warps: int
    stages: int

    def tile(self, kernel: tuple[int, int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return rows and columns of a tile of queries, and of its keys' region: those with the fewest steps for each
        query whose `order` leaves other places than whole rows to the last step."""
        return _tile(self.queries, self.frames, self.keys, kernel)


#: The longest window that tiles are made for.
LONGEST = 28
_TWO = Schedule(queries=64, frames=2, keys=64, warps=4, stages=3)
SCHEDULES: dict[int, Schedule] = {80: _TWO, 90: _TWO, 100: _TWO, 120: _TWO}
#: Of the kernel for wgmma: tiles of 4x4x4 queries have the fewest keys for each.
WIDE, WIDE_TILE = Schedule(queries=64, frames=4, keys=64, warps=4, stages=3), (4, 4)


def wide_fits(kernel: tuple[int, int, int], size: tuple[int, int]) -> bool:
    """Return whether the kernel for wgmma takes a window, and a tile's region of keys: the keys of all its frames that
    fill no step of a frame fill one together."""
    rest = size[0] * size[1] % WIDE.keys
    return rest > 0 and WIDE.keys % rest == 0 and kernel[0] + WIDE.frames - 1 <= WIDE.keys // rest


def pick(sm: int) -> Schedule:
    return of_generation(SCHEDULES, sm)


@functools.cache  # every launch asks, and finding it takes 0.05 ms
def _tile(
    most: int, frames: int, keys: int, kernel: tuple[int, int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return what `Schedule.tile` describes, for a schedule's queries, frames and keys."""
    found = []
    for rows, columns in itertools.product(range(1, TERMS), repeat=2):
        queries, (high, wide) = rows * columns, (rows + kernel[1] - 1, columns + kernel[2] - 1)
        if rows > columns or rows + columns > TERMS or queries * frames > most:
            continue
        for across in (wide, 1 << (wide - 1).bit_length()):
            steps = -(-high * across // keys)
            if high * whole(across) >= (steps - 1) * keys:
                found.append((steps / queries, -queries, (rows, columns), (high, across)))
    *_, tile, size = min(found)
    return tile, size
