"""Plan of a run: steps, tiles, parked histories, and the memory they take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..network.steps import Steps
from ..network.tiles import Grid
from ..request import NATIVE_BLENDS, Request
from ..runtime.parking import Parking
from ..system.memory import in_gb
from ..system.words import REFERENCE, html_table, many

#: Memory for recording: cuBLAS's workspace for a second stream (32 MiB on an H200), operators' temporaries in a pool
#: of their own, and the graphs themselves; 46 MiB measured with two graphs.
GRAPH_BYTES = 64 << 20


@dataclass(frozen=True)
class Own:
    """Plan of a network that tiles itself.

    tiles: computed at a time. grid: rows and columns of tiles in a frame. resident: layers whose weights are on the
    device, of all `layers`; 0, 0 if no weights could be elsewhere. blend: how a decode blends tiles
    (`request.NATIVE_BLENDS`). trained: in the tiles that its weights were trained with, not in those of its family."""

    tiles: int
    grid: tuple[int, int]
    resident: int = 0
    layers: int = 0
    blend: str = "separate"
    trained: bool = False

    def describe(self) -> str:
        rows, columns = self.grid
        kind = ", as it was trained" if self.trained else ""
        of = f"the model's own {columns} x {rows} tiles ({self.blend} blend{kind}), {self.tiles} at a time"
        hosted = self.layers - self.resident
        return of + (f", weights of {hosted} of {self.layers} layers streamed from host memory" if hosted else "")


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
    #: For a network that tiles itself; its grid is then one tile.
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
        """Check if plain torch runs the plan, not the fused kernels or a transformer's layers."""
        return not self.fused and not (self.own and self.own.layers)

    def tiles_as(self, request: Request) -> bool:
        """Check if this plan of a decode has the native tiles that a request asks for; others have the defaults."""
        blend, trained = (NATIVE_BLENDS[0], False) if self.own is None else (self.own.blend, self.own.trained)
        return (blend, trained) == (request.native_blend, request.trained)

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
    if plan.own is not None and plan.own.resident < plan.own.layers:
        return "weights come from host memory in every chunk"
    if plan.parking is not None:
        histories = "histories come from host memory and go back in every chunk"
        return histories if plan.host_bytes else "frames go through in bands"
    if not one_step(plan.steps.latents, plan.steps.frames, rate):
        return "a chunk's frames go through in several steps"
    return None
