"""How many bytes of causal history may stay on the GPU so that a fused run keeps below a memory target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..run.parking import Parking
from ..run.run import Run

#: Sizes of a parked history's buffer on the GPU: tall bands take fewer calls, low ones save memory.
BAND_BYTES = (384 << 20, 128 << 20)
#: Operations of a convolution while one byte comes from the host and another goes back. An H200 makes 650 TFLOP/s in
#: fp16 and moves 50 GB/s each way over PCIe 5.0 at once, 13000; a margin, as copies do not always follow each other.
FAR_WORK = 15000
#: What copies take for each number of buffers. With two, one is computed in while the other is emptied and filled; with
#: three, a copy may still wait for a buffer whose own copy is the one before.
TURNS = {4: 1.0, 3: 1.1, 2: 2.0}
#: The same for a byte that stays on the GPU, copied in and out: 2 / 1.87 TB/s there.
NEAR_WORK = 700
#: The same for a band: on average half of its last programs' time, 256 x 128 positions and channels of 27 x 256
#: products each, on all of an H200's 132 processors.
BAND_WORK = 132 * 256 * 128 * 27 * 256
#: Histories on the GPU take a multiple of this, so that plans stay as they are while other memory varies a little.
NEAR_STEP = 64 << 20
#: Left free when histories could fill the target: torch's allocator reserved up to 0.18 GB more than plans stated.
SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class Sizes:
    """What a run takes."""

    device: int
    host: int
    #: Operations in a chunk, or what the copies of a parked history take instead where that is longer.
    work: int

    @classmethod
    def of(cls, run: Run) -> Sizes:
        turns, work = TURNS[run.parked.parking.buffers], 0
        for key, visit in run.visits.items():
            uses, near, far = run.parked.moved(key)
            work += max(visit.work + BAND_WORK * uses + NEAR_WORK * near, int(turns * FAR_WORK * far))
        return cls(run.nbytes, run.host_bytes, work)


def quickest(measure: Callable[[Parking | None], Sizes], room: int, host: int | None) -> tuple[Parking, Sizes] | None:
    """The placement below `room` bytes on the device and `host` bytes beside it that takes least time; None if none is.

    `measure` walks the run dry under a placement.
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


def leanest(measure: Callable[[Parking | None], Sizes]) -> Sizes:
    """Everything in host memory and the smallest buffers: what a run needs at least."""
    return measure(Parking(None, 0))
