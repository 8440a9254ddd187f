"""Steps to plan with, and the bytes of causal history that a fused run keeps on the GPU below a memory target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..kernels.targets import Target
from ..network.steps import Steps
from ..runtime.context import ExecutionContext
from ..runtime.parking import Parking
from ..system.extension import provider

#: Chunks longer than this gain nothing but need more memory.
MAX_LATENTS = 4
#: Sizes of a parked history's buffer on the GPU: tall bands take fewer calls, low ones save memory.
BAND_BYTES = (384 << 20, 128 << 20)
#: Bands that there is room for at once -> factor on the time of copies: with three, a copy may have to wait for memory
#: that the copy just before it still uses.
TURNS = {4: 1.0, 3: 1.1, 2: 1.0}
#: With this many, bands are not fetched while others are computed: each waits for the memory of the computed one.
SERIAL = 2
#: Operations that take as long as copying one byte out and in within the GPU: 2 / 1.87 TB/s there.
NEAR_WORK = 700
#: Operations lost by each band: on average half the time of its last programs, 256 x 128 positions and channels of
#: 27 x 256 products each, on all of an H200's 132 processors.
BAND_WORK = 132 * 256 * 128 * 27 * 256
#: Histories on the GPU take a multiple of this, so that plans do not change while other memory varies a little.
NEAR_STEP = 64 << 20
#: Operations that stand for the extra time of a clip's first chunk where it has several latents, so several frames, two
#: of which have weights of their own: the host needed 340 ms to launch what an H200 computes in 150; 97 and 31 ms for a
#: single frame (SeedVR2 at 1280x720 under 6 and 4 GB).
START_WORK = int(124e-3 * 650e12)
#: Bytes left free where histories could fill the target, in addition to what the target itself leaves free: torch's
#: allocator reserved up to 0.18 GB more than plans stated, in all.
SPARE_BYTES = 128 << 20

#: Memory for recording: cuBLAS's workspace for a second stream (32 MiB on an H200), operators' temporaries in a pool
#: of their own, and the graphs themselves; 46 MiB measured with two graphs.
GRAPH_BYTES = 64 << 20


@dataclass(frozen=True)
class Rates:
    """Speeds of a machine by which plans are compared.

    work: operations of a convolution per second. link: bytes per second that come from host memory while as many go
    back. The defaults are those of an H200 in fp16 over PCIe 5.0, for machines that were not measured."""

    work: float = 650e12
    link: float = 50e9

    @property
    def far_work(self) -> int:
        """Return the operations in the time that one byte comes from the host and another goes back.

        It includes FAR_MARGIN, because copies do not always follow each other without a gap."""
        return round(FAR_MARGIN * self.work / self.link)


FAR_MARGIN = 15 / 13


class Tuned(Protocol):
    """The point "schedules": what was measured on a GPU, in place of the tables and rates of the core."""

    def of(self, device: torch.device, here: Target | None = None) -> object:
        """Read what is kept for a GPU and the kernels of `here`, once in a process, and offer its schedules to
        `kernels/conv3d/tuned.py`."""

    def rates(self, device: torch.device) -> Rates:
        """Return the measured rates, or the defaults."""

    def words(self, device: torch.device, here: Target | None = None) -> str:
        """Return where the schedules of a GPU come from, as text."""


def tuned(device: torch.device) -> Tuned | None:
    """Return what was measured on a device; None: nothing was, as on every CPU."""
    return provider("schedules") if device.type == "cuda" else None


@dataclass(frozen=True)
class Sizes:
    """Memory and time of a run: bytes on the device and in host memory, and the work of a chunk."""

    device: int
    host: int
    #: Operations of a chunk; for a convolution whose parked history takes longer to copy, the equivalent of the copies.
    work: int
    #: Bytes that come from host memory in a chunk; as many go back.
    far: int = 0

    @classmethod
    def of(cls, run: ExecutionContext, rates: Rates = Rates()) -> Sizes:
        """Return the sizes of a planned run on a machine with these rates."""
        work, all_far, far_work = 0, 0, rates.far_work
        for key, visit in run.visits.items():
            uses, near, far = run.parked.moved(key)
            own, room = visit.work + BAND_WORK * uses + NEAR_WORK * near, min(run.parked.depth(key), max(TURNS))
            copies = int(TURNS[room] * far_work * far) if far else 0
            work += own + copies if room == SERIAL else max(own, copies)
            all_far += far
        return cls(run.nbytes, run.host_bytes, work, all_far)


def quickest(measure: Callable[[Parking | None], Sizes], room: int, host: int | None) -> tuple[Parking, Sizes] | None:
    """Return the fastest parking within the limits, with its sizes; None where none fits.

    Args:
        measure: returns the sizes of a dry run with a parking.
        room: bytes on the device.
        host: bytes of host memory (None: no limit).
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


def clip_work(sizes: Sizes, steps: Steps, latents: int) -> float:
    """Return the operations that stand for the time of a clip of so many latents."""
    return sizes.work / steps.latents * latents + START_WORK * (steps.latents > 1)


def quickest_steps(
    options: Iterable[Steps], measure: Callable[[Steps, Parking | None], Sizes], latents: int, room: int,
    host: int | None,
) -> tuple[Steps, Parking] | None:  # fmt: skip
    """Return the steps and the parking that take the least time for a clip; None where none fits.

    Args:
        options: steps to choose from.
        measure: returns the sizes of a dry run with steps and a parking.
        latents: of the clip.
        room: bytes on the device.
        host: bytes of host memory (None: no limit).
    """
    best: tuple[float, Steps, Parking] | None = None
    for steps in options:
        found = quickest(functools.partial(measure, steps), room, host)
        if found is None:
            continue
        work = clip_work(found[1], steps, latents)
        if best is None or work < best[0]:
            best = work, steps, found[0]
    return None if best is None else best[1:]


def rolling(measure: Callable[[Parking | None], Sizes], room: int) -> Parking | None:
    """Return the parking for pictures that fits in `room` bytes on the device; None where none does.

    It has bands, and keeps as many bytes of whole frames between convolutions as there is room for. Values that do not
    fit are computed again wherever they are needed, which takes longer."""
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


def leanest(measure: Callable[[Parking | None], Sizes], host: int | None, still: bool = False) -> tuple[Parking, Sizes]:
    """Return the parking that needs the least memory on the device, with its sizes.

    All histories are in host memory as far as `host` bytes hold them (None: no limit), and buffers are the smallest.
    For pictures (`still`), keeping no values that can be computed again is tried, too."""
    ways = []
    for parking in [Parking(None, 0)] + [Parking(None, 0, streams=0)] * still:
        sizes = measure(parking)
        while host is not None and sizes.host > host:
            parking = replace(parking, near=parking.near + -(-(sizes.host - host) // NEAR_STEP) * NEAR_STEP)
            sizes = measure(parking)
        ways.append((parking, sizes))
    return min(ways, key=lambda way: way[1].device)


def plain_steps(latents: int, chunk: int) -> Iterator[Steps]:
    """Yield steps of plain torch from most memory to least.

    A chunk that the user chose is kept, with fewer frames per step; 0: none was chosen."""
    sizes = [chunk] if chunk else [n for n in (MAX_LATENTS, 2, 1) if n == 1 or n <= latents]
    for n in sizes:
        yield Steps(min(n, latents), 0)
    for frames in (2, 1):
        yield Steps(min(sizes[-1], latents), frames)
