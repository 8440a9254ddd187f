"""Plan of a run: steps, tiles, parked histories, and the memory they take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from ..network.steps import Steps
from ..network.tiles import Grid
from ..report import Report
from ..request import Request
from ..runtime.parking import Parking
from ..system.memory import in_gb
from ..system.words import REFERENCE, html_table, many


class Own(Protocol):
    """What the plan of a family's own component holds in addition.

    way: what of a request changes its results, as `Request.way`. kept: as of Plan.
    unrecorded: why its chunks are not recorded in graphs; None: nothing speaks against it.
    """

    @property
    def way(self) -> tuple[str, ...]: ...
    @property
    def kept(self) -> bool: ...
    @property
    def unrecorded(self) -> str | None: ...

    def describe(self) -> str:
        """Return what runs in words."""

    def report(self, report: Report, kind: str, off: dict[str, str], graphs: bool) -> None:
        """Fill in a report on a run, and the optimisations that are `off`. kind: of 8-bit products, or the precision.
        graphs: they are on, and the run is on a GPU."""


@dataclass(frozen=True)
class Plan:
    """How a clip goes through the network, and the memory that this takes.

    `peak_bytes` counts weights, history, activations and library workspaces on the device. On a GPU that is the memory
    which torch reserves for them: for plain torch more than is in use at once, as freed blocks do not fit later
    requests."""

    steps: Steps
    grid: Grid
    peak_bytes: int
    fused: bool = False
    #: Histories that wait in host memory, if any, and the bytes there: of these, or of plain torch's noise and frames.
    parking: Parking | None = None
    host_bytes: int = 0
    #: Bytes of parked histories that come to the device in a chunk; as many go back.
    far_bytes: int = field(default=0, compare=False)
    #: Seconds of the clip by the machine's rates, to compare exact plans with; of plain torch only those of copies.
    seconds: float = field(default=0.0, compare=False)
    #: For a family's own component; the grid is then one tile.
    own: Own | None = None

    #: Part of `peak_bytes` allocated before the run that stays: the other component's packed weights. Targets do not
    #: count it, nor other memory of this process.
    beside: int = field(default=0, compare=False)
    #: Target in bytes, if the default one had to be raised to it.
    raised: int | None = field(default=None, compare=False)
    #: Eager execution launches kernels of ours where the device has them.
    launches: bool = field(default=False, compare=False)
    #: The fused network runs on torch's operators in place of the kernels: on a CPU.
    reference: bool = field(default=False, compare=False)
    #: Text: the property that "auto" had to give up for a plan, and a way to keep it.
    note: str = field(default="", compare=False)

    @property
    def own_bytes(self) -> int:
        """Return the bytes that targets limit."""
        return self.peak_bytes - self.beside

    def with_beside(self, size: int) -> Plan:
        """Return the plan for a device on which `size` bytes are allocated before the run and stay."""
        return self if size == self.beside else replace(self, peak_bytes=self.own_bytes + size, beside=size)

    @property
    def work(self) -> Plan:
        """Return the plan without the memory that it states: two plans with equal work take the same."""
        return replace(self, peak_bytes=0)

    @property
    def tiled(self) -> bool:
        return len(self.grid) > 1

    @property
    def plain(self) -> bool:
        """Check if plain torch runs the plan, not the fused kernels or a family's own component."""
        return not self.fused and not (self.own and self.own.kept)

    @property
    def kept(self) -> bool:
        """Check if the memory of a run is one ExecutionContext's, which may stay for the next one with its graphs."""
        return self.fused if self.own is None else self.own.kept

    def tiles_as(self, request: Request) -> bool:
        """Check if this plan of a decode has the native tiles that a request asks for; others have the defaults."""
        return (Request().way if self.own is None else self.own.way) == request.way

    @property
    def bare(self) -> bool:
        """Check if the plan launches no kernels of ours."""
        return self.plain and not self.launches

    @property
    def rolls(self) -> bool:
        """Check whether values of a picture that do not fit are computed again wherever they are needed."""
        return self.parking is not None and self.parking.streams is not None

    def __repr__(self) -> str:
        """Return the plan as its one line, for people."""
        return f"<Plan {self.describe()}>"

    def _repr_html_(self) -> str:
        """Return the plan as a table, for notebooks."""
        parts = self.describe().removesuffix(f" ({self.note})" if self.note else "").split(", ")
        return html_table("Plan", [("", part) for part in parts] + [("note", self.note)])

    def describe(self) -> str:
        if self.own is not None:
            note = f" ({self.note})" if self.note else ""
            return f"{self.own.describe()}, about {in_gb(self.peak_bytes)}{note}"
        tiles = f"{len(self.grid)} blended tiles" if self.tiled else "untiled"
        frames = f", {many(self.steps.frames, 'frame')} per step at full size" if self.steps.frames else ""
        eager = "steps with kernels of their own" if self.launches else "plain torch"
        fused = REFERENCE if self.reference else "fused kernels"
        kernels = fused if self.fused else eager
        what = "histories parked" if self.fused else "noise"
        chunks = f"{many(self.steps.latents, 'latent')} per chunk{frames}"
        if self.steps.passes > 1:
            chunks, what = f"{self.steps.passes} passes of the whole clip", "frames between them and noise"
        parked = f", {in_gb(self.host_bytes)} of {what} in host memory" if self.host_bytes else ""
        again = ", what does not fit recomputed band by band" if self.rolls else ""
        size = f"about {in_gb(self.peak_bytes)}"
        note = f" ({self.note})" if self.note else ""
        return f"{kernels}, {tiles}, {chunks}{parked}{again}, {size}{note}"


def one_step(latents: int, frames: int, rate: int = 4) -> bool:
    """Check whether a chunk's frames pass the highest resolutions at once.

    Args:
        latents, frames: as in Steps.
        rate: largest number of frames per latent.
    """
    return not frames or frames >= rate * latents


def why_none(wanted: bool, plan: Plan, rate: int = 4) -> str | None:
    """Return the reason why the chunks of a plan are not recorded, or None.

    Args:
        wanted: graphs are switched on.
        plan: the plan of the call.
        rate: largest number of frames per latent.
    """
    if not wanted:
        return "switched off"
    if plan.tiled:
        return "blended tiles are not recorded"
    if plan.own is not None and plan.own.unrecorded:
        return plan.own.unrecorded
    if plan.parking is not None:
        histories = "histories come from host memory and go back in every chunk"
        return histories if plan.host_bytes else "frames go through in bands"
    if not one_step(plan.steps.latents, plan.steps.frames, rate):
        return "a chunk's frames go through in several steps"
    return None
