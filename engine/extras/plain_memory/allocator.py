"""Model of torch's caching allocator, block by block: how many bytes it reserves on a GPU for given requests.

It is needed for plans of plain torch: these reserve 1.03 to 1.8 times the bytes in use, depending on the network, so no
one margin would both be kept and refuse no plan that fits."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

#: Block sizes are multiples of this, in bytes.
UNIT = 512
#: Requests of at most SMALL bytes come from segments of SMALL_SEGMENT bytes, requests below LARGE from segments of
#: LARGE_SEGMENT; a larger request gets a segment of its own, a multiple of ROUND.
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT, ROUND = 10 << 20, 20 << 20, 2 << 20


@dataclass(eq=False, slots=True)
class Block:
    """Contiguous bytes of a segment, linked to the blocks before and after it.

    place: a number that orders blocks as their addresses do."""

    size: int
    small: bool
    place: int
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    behind: Block | None = field(default=None, repr=False)


class Allocator:
    """Model of torch's caching allocator for one stream with default settings.

    Segments stay reserved. A request cuts the smallest free block that fits; a freed block merges with its free
    neighbours. reserved: bytes of all segments. Each segment lies below the earlier ones, as a driver places them in a
    new process (H200: the bytes that torch reserved there were predicted exactly)."""

    def __init__(self) -> None:
        self.reserved = 0
        #: Free blocks sorted by size and place: True for segments of small blocks, False for the others.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def take(self, size: int) -> Block:
        """Return a block of at least `size` bytes; it may be a little larger."""
        size = -(-size // UNIT) * UNIT or UNIT
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size,))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, small)
        block.free = False
        left = block.size - size
        if left > SMALL or (small and left):
            behind = block.behind
            rest = Block(left, small, block.place + size, True, block, behind)
            if behind is not None:
                behind.before = rest
            block.size, block.behind = size, rest
            insort(free, (left, rest.place, rest))
        return block

    def touch(self, size: int) -> None:
        """Take a block of `size` bytes and give it back at once; a free block that fits is left unchanged."""
        free = self._free[size <= SMALL]
        if not free or free[-1][0] < size:
            self.give(self.take(size))

    def give(self, block: Block) -> None:
        """Free a block and merge it with its free neighbours."""
        free = self._free[block.small]  # all blocks of a segment are of one kind
        before, behind = block.before, block.behind
        if before is not None and before.free:
            del free[bisect_left(free, (before.size, before.place))]
            block.size, block.place = block.size + before.size, before.place
            block.before = before = before.before
            if before is not None:
                before.behind = block
        if behind is not None and behind.free:
            del free[bisect_left(free, (behind.size, behind.place))]
            block.size += behind.size
            block.behind = behind = behind.behind
            if behind is not None:
                behind.before = block
        block.free = True
        insort(free, (block.size, block.place, block))

    def _segment(self, size: int, small: bool) -> Block:
        large = LARGE_SEGMENT if size < LARGE else -(-size // ROUND) * ROUND
        size = SMALL_SEGMENT if small else large
        self.reserved += size
        return Block(size, small, -self.reserved)
