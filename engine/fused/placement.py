"""Which causal histories wait in host memory so that a fused run stays below a memory target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .parking import Parking
from .run import Run, Visit

#: Sizes of a parked history's buffer on the GPU: tall bands keep it busy, low ones save memory.
BAND_BYTES = (1 << 30, 512 << 20, 192 << 20, 64 << 20)


@dataclass(frozen=True)
class Sizes:
    """What a run takes; `visits` as in Run."""

    device: int
    host: int
    traffic: int  # bytes that come from the host in a chunk; as many go back at most
    visits: dict[str, Visit]

    @classmethod
    def of(cls, run: Run) -> Sizes:
        parking = run.parked.parking
        traffic = sum(v.times * v.nbytes for key, v in run.visits.items() if parking.holds(key))
        return cls(run.nbytes, run.host_bytes, traffic, dict(run.visits))


def lightest(measure: Callable[[Parking | None], Sizes], room: int, host: int | None) -> tuple[Parking, Sizes] | None:
    """The placement below `room` bytes on the device and `host` bytes beside it that moves least; None if none is.

    `measure` walks the run dry under a placement.
    """
    keys = _cheapest_first(measure(None).visits)
    best: tuple[Parking, Sizes] | None = None
    for size in BAND_BYTES:
        for buffers in (3, 2):
            found = _least_parked(measure, keys, size, buffers, room)
            if found is None or (host is not None and found[1].host > host):
                continue
            if best is None or cost(*found) < cost(*best):
                best = found
    return best


def cost(parking: Parking, sizes: Sizes) -> int:
    """Bytes of a chunk's traffic, twice where copies to and from the host must take turns: with two buffers, one is
    computed in while the other is emptied and filled."""
    return sizes.traffic * (1 if parking.buffers > 2 else 2)


def leanest(measure: Callable[[Parking | None], Sizes]) -> Sizes:
    """Everything parked in the smallest buffers: what a run needs at least."""
    return measure(Parking(None, 0))


def _least_parked(
    measure: Callable[[Parking | None], Sizes], keys: list[str], size: int, buffers: int, room: int
) -> tuple[Parking, Sizes] | None:
    def place(count: int) -> tuple[Parking, Sizes]:
        parking = Parking(frozenset(keys[:count]), size, buffers)
        return parking, measure(parking)

    few, many = 1, len(keys)
    if not keys or place(many)[1].device > room:
        return None
    while few < many:
        middle = (few + many) // 2
        if place(middle)[1].device <= room:
            many = middle
        else:
            few = middle + 1
    return place(many)


def _cheapest_first(visits: dict[str, Visit]) -> list[str]:
    """Keys by how often their history would travel. Among equals, rings of few convolutions first, for a ring's free
    slots go with its last one; within a ring in an order that leaves even gaps between the first ones, so that each
    fetch can hide behind convolutions that stay."""
    members = defaultdict(list)
    for key, visit in visits.items():
        if visit.nbytes:
            members[visit.times, visit.ring].append(key)
    groups = sorted(members.items(), key=lambda item: (item[0][0], len(item[1]), -visits[item[1][0]].nbytes))
    return [keys[i] for _, keys in groups for i in _spread(len(keys))]


def _spread(count: int) -> Iterator[int]:
    """0..count - 1, each prefix about evenly spaced (bit-reversed order)."""
    bits = max(count - 1, 1).bit_length()
    for i in range(1 << bits):
        reverse = int(f"{i:0{bits}b}"[::-1], 2)
        if reverse < count:
            yield reverse
