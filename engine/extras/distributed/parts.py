"""Parts of the results of a call, each made by one device, their input, and the report of all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...errors import PlanError
from ...execution.core import Core
from ...execution.results import Finished
from ...execution.video import StreamVideo
from ...network.steps import UNKNOWN
from ...report import Report
from ...request import Request

#: States of a part.
WAITING, RUNNING, DONE = range(3)
#: Latents per chunk in parts with a warm-up, in which only the first steps of the network take part: there the host
#: takes longer to launch kernels than the device to compute. Launching takes 10 to 17 ms per latent of SeedVR2 at
#: 1280x720, with a thread for each of two H200s.
LATENTS_WITH_LEAD = 2


@dataclass(eq=False)
class Part:
    """Results [first, end) of a clip, made by device number `device`.

    level: how often earlier parts needed a safer type, because values overflowed. again: the part is to be stopped and
    made at another level. share: fraction of it that has passed the network. ready: finished results that wait for
    their turn."""

    clip: int
    first: int
    end: int
    device: int
    level: int = 0
    state: int = WAITING
    again: bool = False
    share: float = 0.0
    report: Report | None = None
    ready: deque[Finished] = field(default_factory=deque)

    @property
    def after(self) -> int:
        """Return the level at which the next part begins."""
        return self.level + (self.report.events["nan_reruns"] if self.report is not None else 0)

    def restart(self, level: int) -> None:
        self.level, self.state, self.again, self.share, self.report = level, WAITING, False, 0.0, None
        self.ready.clear()


def describe(report: Report, parts: Sequence[Part], what: str, held: int | None) -> None:
    """Fill in a call's report from the reports of its parts.

    Args:
        report: report of the whole call.
        parts: all parts, in order.
        what: name of the results ("frames" or "latents").
        held: largest number of results that waited for their turn; None where none had to.
    """
    made = [p for p in parts if p.report is not None]
    if not made:
        return
    first, reports = made[0].report, [p.report for p in made]
    report.parts = [(range(p.first, p.end), p.report) for p in made]
    report.mode, report.operands, report.off, report.db = first.mode, first.operands, first.off, first.db
    waited = "" if held is None else f", at most {held} {what} waiting"
    report.plan = f"{len({p.device for p in made})} devices, {len(made)} parts{waited}; {first.plan}"
    report.precision = max(reports, key=lambda r: len(r.precision)).precision
    report.predicted_gb = max(r.predicted_gb or 0.0 for r in reports)
    report.parked_gb = sum(r.parked_gb for r in reports)
    for name in ("reserved_gb", "allocated_gb", "before_gb"):
        found = [value for r in reports if (value := getattr(r, name)) is not None]
        setattr(report, name, max(found, default=None))
    for r in {id(r): r for r in reports}.values():
        report.events.update(r.events)


class Feed:
    """Input of one clip, addressed by the results that are made of it; here all of it is there from the start."""

    def has(self, first: int, end: int) -> bool:
        """Check whether the input of results [first, end) has been read."""
        return True

    def fill(self, first: int, end: int) -> None:
        """Read the input of results [first, end). Called by the caller's thread."""

    def drop(self, first: int) -> None:
        """Free input that results from `first` on do not need."""


GIVEN = Feed()


@dataclass(frozen=True)
class Streamed(Feed):
    """Frames of a stream of known length, for an encoder."""

    core: Core
    video: StreamVideo

    def has(self, first: int, end: int) -> bool:
        return self.video.has(self._frames(first, end)[1])

    def fill(self, first: int, end: int) -> None:
        self.video.fill(self._frames(first, end)[1])

    def drop(self, first: int) -> None:
        self.video.drop(self._frames(first, first + 1)[0])

    def _frames(self, first: int, end: int) -> tuple[int, int]:
        """Return the frames [first, end) that results [first, end) are made of."""
        program, architecture = self.core.model.encoder.program, self.core.architecture
        if program.unstreamed:
            return 0, UNKNOWN
        return architecture.reads(*program.window(first, end, architecture.latents(self.video.count)))


def behind_a_lead(
    core: Core, half: str, size: tuple[int, int, int], request: Request, check: Callable[[], None]
) -> Request:
    """Return the request with LATENTS_WITH_LEAD latents per chunk, unless that would change more than the chunk.

    It is unchanged for encoders, where a chunk was asked for or the network decides on it, and unless both plans are
    fused, without parking, tiles and notes.

    Args:
        core: VAE of the device that makes the part.
        half: "decoder" or "encoder".
        size: latents, rows and columns of latent pixels.
        request: options of the call.
        check: called between dry runs; may raise, to cancel.
    """
    if half == "encoder" or request.chunk or core.architecture.in_tiles:
        return request
    if core.model.decoder.program.fixed(size[0]) is not None:
        return request
    longer = replace(request, chunk=LATENTS_WITH_LEAD)
    try:
        plans = [core._plan(half, size, r, check=check) for r in (request, longer)]
    except PlanError:
        return request
    alike = all(p.fused and p.parking is None and not p.tiled and not p.note for p in plans)
    return longer if alike and plans[0].steps.latents < LATENTS_WITH_LEAD else request
