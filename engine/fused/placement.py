"""How many bytes of causal history may stay on the GPU so that a fused run keeps below a memory target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .parking import Parking
from .run import Run

#: Sizes of a parked history's buffer on the GPU: tall bands take fewer calls, low ones save memory.
BAND_BYTES = (192 << 20, 64 << 20)
#: Operations of a convolution while one byte comes from the host and another goes back. An H200 makes 650 TFLOP/s in
#: fp16 and moves 50 GB/s each way over PCIe 5.0 at once, 13000; a margin, as copies do not always follow each other.
FAR_WORK = 16000
#: The same for a byte that stays on the GPU: read and written twice at 4.2 TB/s.
NEAR_WORK = 650
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
        # With two buffers, one is computed in while the other is emptied and filled: copies take turns.
        turns, work = 1 if run.parked.parking.buffers > 2 else 2, 0
        for key, visit in run.visits.items():
            near, far = run.parked.moved(key)
            work += max(visit.work + NEAR_WORK * near, turns * FAR_WORK * far)
        return cls(run.nbytes, run.host_bytes, work)


def quickest(measure: Callable[[Parking | None], Sizes], room: int, host: int | None) -> tuple[Parking, Sizes] | None:
    """The placement below `room` bytes on the device and `host` bytes beside it that takes least time; None if none is.

    `measure` walks the run dry under a placement.
    """
    best: tuple[Parking, Sizes] | None = None
    for size in BAND_BYTES:
        for buffers in (3, 2):
            parking = Parking(None, size, buffers)
            left = room - measure(parking).device
            if left < 0:
                continue
            parking = replace(parking, near=max(left - SPARE_BYTES, 0))
            sizes = measure(parking)
            if (host is None or sizes.host <= host) and (best is None or sizes.work < best[1].work):
                best = parking, sizes
    return best


def leanest(measure: Callable[[Parking | None], Sizes]) -> Sizes:
    """Everything in host memory and the smallest buffers: what a run needs at least."""
    return measure(Parking(None, 0))
