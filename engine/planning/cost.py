"""How many bytes of causal history may stay on the GPU so that a fused run keeps below a memory target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..run.parking import Parking
from ..run.plan import Steps
from ..run.run import Run

#: Sizes of a parked history's buffer on the GPU: tall bands take fewer calls, low ones save memory.
BAND_BYTES = (384 << 20, 128 << 20)
#: What copies take, for the bands that there is room for at once: with three, one may still wait for memory whose own
#: copy is the one before.
TURNS = {4: 1.0, 3: 1.1, 2: 1.0}
#: With this many, bands are not fetched beside the work: each waits for the memory of the one that is computed.
SERIAL = 2
#: The same for a byte that stays on the GPU, copied in and out: 2 / 1.87 TB/s there.
NEAR_WORK = 700
#: The same for a band: on average half of its last programs' time, 256 x 128 positions and channels of 27 x 256
#: products each, on all of an H200's 132 processors.
BAND_WORK = 132 * 256 * 128 * 27 * 256
#: Histories on the GPU take a multiple of this, so that plans stay as they are while other memory varies a little.
NEAR_STEP = 64 << 20
#: What a clip's first chunk takes longer where it is of several latents, so several frames, two of which have weights
#: of their own: the host launched 340 ms for what an H200 computes in 150; 97 and 31 for a single frame (SeedVR2 at
#: 1280x720 under 6 and 4 GB).
START_WORK = int(124e-3 * 650e12)
#: Left free when histories could fill the target, beside what the target itself leaves: torch's allocator reserved
#: up to 0.18 GB more than plans stated, in all.
SPARE_BYTES = 128 << 20


@dataclass(frozen=True)
class Rates:
    """What plans weigh against each other: operations of a convolution per second, and bytes per second that come from
    host memory while as many go back. Those of an H200 in fp16 over PCIe 5.0, where nobody has measured others."""

    work: float = 650e12
    link: float = 50e9

    @property
    def far_work(self) -> int:
        """Operations while one byte comes from the host and another goes back, with a margin: copies do not always
        follow each other."""
        return round(FAR_MARGIN * self.work / self.link)


FAR_MARGIN = 15 / 13


@dataclass(frozen=True)
class Sizes:
    """What a run takes."""

    device: int
    host: int
    #: Operations in a chunk, or what the copies of a parked history take instead where that is longer.
    work: int
    #: Bytes that come from host memory in a chunk; as many go back.
    far: int = 0

    @classmethod
    def of(cls, run: Run, rates: Rates = Rates()) -> Sizes:
        work, all_far, far_work = 0, 0, rates.far_work
        for key, visit in run.visits.items():
            uses, near, far = run.parked.moved(key)
            own, room = visit.work + BAND_WORK * uses + NEAR_WORK * near, min(run.parked.depth(key), max(TURNS))
            copies = int(TURNS[room] * far_work * far) if far else 0
            work += own + copies if room == SERIAL else max(own, copies)
            all_far += far
        return cls(run.nbytes, run.host_bytes, work, all_far)


def quickest(measure: Callable[[Parking | None], Sizes], room: int, host: int | None) -> tuple[Parking, Sizes] | None:
    """The parking below `room` bytes on the device and `host` bytes beside it that takes least time; None if none is.

    `measure` walks the run dry with it.
    """
    best: tuple[Parking, Sizes] | None = None
    for size in BAND_BYTES:
        for buffers in TURNS:
            parking = Parking(None, size, buffers)
            left = room - measure(parking).device
            if left < 0:
                continue
            parking = replace(parking, near=max(left - SPARE_BYTES, 0) // NEAR_STEP * NEAR_STEP)
            sizes = measure(parking)
            if (host is None or sizes.host <= host) and (best is None or sizes.work < best[1].work):
                best = parking, sizes
    return best


def quickest_steps(
    options: Iterable[Steps], measure: Callable[[Steps, Parking | None], Sizes], latents: int, room: int,
    host: int | None,
) -> tuple[Steps, Parking] | None:  # fmt: skip
    """Of these steps the ones, and the parking, that take least time for a clip of `latents`; as `quickest`."""
    best: tuple[float, Steps, Parking] | None = None
    for steps in options:
        found = quickest(functools.partial(measure, steps), room, host)
        if found is None:
            continue
        work = found[1].work / steps.latents * latents + START_WORK * (steps.latents > 1)
        if best is None or work < best[0]:
            best = work, steps, found[0]
    return None if best is None else best[1:]


def rolling(measure: Callable[[Parking | None], Sizes], room: int) -> Parking | None:
    """Of pictures: bands, and as much of their streams as there is room for, in `room` bytes on the device; None where
    nothing fits. What does not is computed again wherever it is needed, which takes longer."""
    for size in (*BAND_BYTES, 0):
        least = Parking(None, size, streams=0)
        if measure(least).device > room:
            continue
        streams = room // NEAR_STEP * NEAR_STEP
        while streams > 0:
            parking = replace(least, streams=streams)
            over = measure(parking).device - room
            if over <= 0:
                return parking
            streams -= -(-over // NEAR_STEP) * NEAR_STEP
        return least
    return None


def leanest(
    measure: Callable[[Parking | None], Sizes], host: int | None, still: bool = False
) -> tuple[Parking, Sizes]:
    """What a run needs at least: everything in host memory, but what `host` bytes of that have no room for, and the
    smallest buffers, or of pictures nothing kept that can be computed again."""
    ways = []
    for parking in [Parking(None, 0)] + [Parking(None, 0, streams=0)] * still:
        sizes = measure(parking)
        while host is not None and sizes.host > host:
            parking = replace(parking, near=parking.near + -(-(sizes.host - host) // NEAR_STEP) * NEAR_STEP)
            sizes = measure(parking)
        ways.append((parking, sizes))
    return min(ways, key=lambda way: way[1].device)
