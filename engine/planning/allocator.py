"""What torch reserves on a GPU for memory that it hands out: its caching allocator, followed block by block."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

#: Sizes are multiples of this.
UNIT = 512
#: At most this comes from segments of SMALL_SEGMENT, up to LARGE from those of LARGE_SEGMENT, more from a segment of
#: its own, a multiple of ROUND.
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT, ROUND = 10 << 20, 20 << 20, 2 << 20


def downwards(segment: int) -> bool:
    """Each segment lies below the ones before it, as a driver hands them out to a new process (H200: what torch
    reserved came out to the byte)."""
    return False


#: Whether the n-th segment lies above the ones before it. In a process that has given memory back, segments lie in
#: what that has left, in any order. Of blocks of one size torch takes the lowest, so what it reserves differs: in 27 of
#: 184 walks of plain torch, by up to 12 %. Of eleven of these, nine took the most of 16 random orders in one of these
#: three, the others 1 and 6 % less.
ORDERS: tuple[Callable[[int], bool], ...] = (
    downwards, lambda segment: segment % 2 == 0, lambda segment: segment % 2 == 1,
)  # fmt: skip


@dataclass(eq=False, slots=True)
class Block:
    """Bytes in a row of a segment, between two others of it. place: its address, as far as order goes."""

    size: int
    small: bool
    place: int
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    behind: Block | None = field(default=None, repr=False)


class Allocator:
    """Of one stream, with torch's own settings. Segments stay reserved; the smallest free block that fits is cut, and
    what is given back joins its free neighbours."""

    def __init__(self, above: Callable[[int], bool] = downwards) -> None:
        self.reserved = 0
        self._above, self._segments = above, 0
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
        """As a block that is given back at once: one that fits is as it was then."""
        free = self._free[size <= SMALL]
        if not free or free[-1][0] < size:
            self.give(self.take(size))

    def give(self, block: Block) -> None:
        free = self._free[block.small]  # as of all of its segment
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
        self._segments += 1
        return Block(size, small, self.reserved - size if self._above(self._segments) else -self.reserved)


class AnyOrder:
    """An Allocator in each of ORDERS, with the same requests."""

    def __init__(self) -> None:
        self._each = [Allocator(above) for above in ORDERS]

    @property
    def reserved(self) -> int:
        """In the order in which it is most."""
        return max(allocator.reserved for allocator in self._each)

    def take(self, size: int) -> list[Block]:
        return [allocator.take(size) for allocator in self._each]

    def touch(self, size: int) -> None:
        for allocator in self._each:
            allocator.touch(size)

    def give(self, blocks: list[Block]) -> None:
        for allocator, block in zip(self._each, blocks, strict=True):
            allocator.give(block)
