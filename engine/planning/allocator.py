"""What torch reserves on a GPU for memory that it hands out: its caching allocator, followed block by block."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

#: Sizes are multiples of this.
UNIT = 512
#: At most this comes from segments of SMALL_SEGMENT, up to LARGE from those of LARGE_SEGMENT, more from a segment of
#: its own, a multiple of ROUND.
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT, ROUND = 10 << 20, 20 << 20, 2 << 20


@dataclass(eq=False, slots=True)
class Block:
    """Bytes in a row of a segment, between two others of it. place: its address, as far as order goes: each segment
    lies below the ones before it, as a driver hands them out (H200: what torch reserved came out to the byte)."""

    size: int
    small: bool
    place: int
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    behind: Block | None = field(default=None, repr=False)


class Allocator:
    """Of one stream, with torch's own settings. Segments stay reserved; the smallest free block that fits is cut, and
    what is given back joins its free neighbours."""

    def __init__(self) -> None:
        self.reserved = 0
        #: Free blocks by size and place, of the small ones' segments and of the others.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def take(self, size: int) -> Block:
        """A block of so many bytes, which may be a little larger."""
        size = -(-size // UNIT) * UNIT or UNIT
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size,))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= UNIT if small else rest > SMALL:
            self._cut(block, size)
        return block

    def touch(self, size: int) -> None:
        """As a block that is given back at once: one that fits is as it was then."""
        free = self._free[size <= SMALL]
        if not free or free[-1][0] < size:
            self.give(self.take(size))

    def give(self, block: Block) -> None:
        free = self._free[block.small]  # as of all of its segment
        for other in (block.before, block.behind):
            if other is not None and other.free:
                del free[bisect_left(free, (other.size, other.place))]
                self._join(block, other)
        self._keep(block)

    def _segment(self, size: int, small: bool) -> Block:
        large = LARGE_SEGMENT if size < LARGE else -(-size // ROUND) * ROUND
        self.reserved += SMALL_SEGMENT if small else large
        return Block(SMALL_SEGMENT if small else large, small, -self.reserved)

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.small, block.place + size)
        block.size, rest.before, rest.behind = size, block, block.behind
        if rest.behind is not None:
            rest.behind.before = rest
        block.behind = rest
        self._keep(rest)

    def _join(self, block: Block, other: Block) -> None:
        block.size += other.size
        if other is block.before:
            block.place, block.before = other.place, other.before
            if block.before is not None:
                block.before.behind = block
        else:
            block.behind = other.behind
            if block.behind is not None:
                block.behind.before = block

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.place, block))
