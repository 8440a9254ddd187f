"""Memory of one clip in a fused run, and the clip's place in time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.conv3d import Geometry, Weight
from ..kernels.norm_act import Norm
from .arena import ALIGN, Arena
from .delay import Delay
from .parking import Parked, Parking
from .pressure import out_of_memory
from .rings import Plane, Ring
from .walk import Walk
from .weights import Conv

_RESIDENT = Parking(frozenset(), 0)
#: Bytes freed first when an operator's own temporaries find no memory; part of the allowance for those in plans.
RESERVE_BYTES = 32 << 20


@dataclass(frozen=True)
class Call:
    """Common properties of a convolution's calls.

    They are its weight, the result's frames, the rows and columns of the input's positions, and the result's type
    `out`."""

    weight: Weight
    geometry: Geometry
    frames: int
    frame: tuple[int, int]
    groups: int
    residual: bool
    half_accumulate: bool
    bias: int
    out: torch.dtype
    #: Operations per chunk.
    work: int


@dataclass
class Visit:
    """Frames of history that a convolution keeps, and its operations per chunk."""

    history: int
    work: int = 0


class Memory:
    """All memory that a clip's execution writes to. Before `allocate` it only records how much that is.

    dtype: type of activations. head: input of convolutions before a clip, its first frame ("replicate") or zeros
    ("zero"). border: their input around a frame, its edge ("replicate"), the pixels mirrored at the edge ("reflect"),
    or zeros. still: there is no history, every frame is a picture of its own. after: convolutions in time look a frame
    ahead (1) or not (0). forgets: a convolution whose first input of a clip is a single frame keeps no history of
    it."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, parking: Parking | None = None, head: str = "replicate",
        border: str = "zero", still: bool = False, after: int = 0, forgets: bool = False,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        self.device = device
        self.head, self.border, self.still, self.after, self.forgets = head, border, still, after, forgets
        #: Residual streams that wait for convolutions which look ahead, by the key of the last one.
        self.delays: dict[str, Delay] = {}
        #: The clip is over: convolutions that look ahead get the frame that follows it, one after the other, as long as
        #: none has more frames than planned. Those in `ended` have got it.
        self.drains = False
        self.ended: set[str] = set()
        #: From the dry run: the most frames that each convolution gets at once, and that each step makes.
        self.most: dict[str, int] = {}
        #: From the dry run: stages, by the number that follow, after which all frames of a chunk go on at once.
        self._joined: dict[int, bool] = {}
        self.arena = Arena()
        self.rings: dict[tuple[Plane, torch.dtype], Ring] = {}
        self.parked = Parked(parking or _RESIDENT, device)
        self.walk = Walk()
        #: Frames that each stage and each convolution has taken in so far.
        self.done: Counter[str] = Counter()
        #: From the dry run: the needs of each convolution in a chunk, by key, in order.
        self.visits: dict[str, Visit] = {}
        #: From the dry run: calls of the convolutions, except those whose steps compute them part by part.
        self.calls: dict[str, Call] = {}
        self.dry = True
        #: Called with each convolution and its new input [D, H, W, C] as stored; for measuring, where none is parked.
        self.watch: Callable[[Conv, Tensor], None] | None = None
        #: Called when an operator finds no memory, before it is tried once more.
        self.relieve: Callable[[], None] = _nothing
        #: Memory ran short and the reserve is gone.
        self.pressed = False
        #: 0, and NaN from the clip's first value on that is not finite, wherever it arises: norms and the input of
        #: resampling report it, before 8 bit turns it into a number. float32 [] on the device, from `allocate` on.
        self.health: Tensor | None = None
        #: The clip's latents [T, h, w, C], if norms see them.
        self.latents: Tensor | None = None
        #: A whole clip's features [T, h, w, C], if the network gathers them; None if it does not, or in a dry run.
        self.gathered: Tensor | None = None
        self._gathers: tuple[int, ...] = ()
        #: Operators are being recorded, not run: one that fails is not tried again.
        self.recording = False
        self._reserve: Tensor | None = None
        #: The clip has begun and no `chunk` of it is being computed.
        self.between = False

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device."""
        return self.arena.peak + self.walk.peak + self.parked.nbytes + self.gathered_bytes + sum(
            holder.nbytes for holder in (*self.rings.values(), *self.delays.values())
        )  # fmt: skip

    @property
    def gathered_bytes(self) -> int:
        return math.prod(self._gathers) * self.dtype.itemsize if self._gathers else 0

    @property
    def host_bytes(self) -> int:
        return self.parked.host_bytes

    @property
    def allocated(self) -> bool:
        return self.health is not None

    def gather(self, *shape: int) -> None:
        """Reserve, in a dry run, features of this shape [T, h, w, C] while the clip lasts."""
        self._gathers = shape

    def host(self, guest: Memory) -> None:
        """Reserve, in a dry run, room for `guest` in this one's arena.

        It is allocated `within` the arena when nothing else is in it."""
        with self.arena.scope():
            self.arena.take((guest.inner_bytes,), torch.uint8)
        self.walk.peak = max(self.walk.peak, guest.walk.peak)

    @property
    def inner_bytes(self) -> int:
        """Return the bytes that `allocate` needs `within` another run."""
        return self.arena.peak + sum(-(-r.nbytes // ALIGN) * ALIGN for r in self.rings.values())

    def allocate(self, within: Tensor | None = None) -> None:
        """Allocate the memory that the dry run asked for; from now on steps compute.

        within: bytes to use for it, if any."""
        # Later calls may use it too. If made in a caller's inference mode, only calls in that mode could write to it.
        with torch.inference_mode(False):
            left = self.arena.allocate(self.device, within)
            for ring in self.rings.values():
                left = ring.allocate(self.device, left)
            for delay in self.delays.values():
                delay.allocate(self.device)
            self.parked.allocate()
            if self._gathers:
                self.gathered = torch.empty(self._gathers, dtype=self.dtype, device=self.device)
            self.health = torch.zeros((), device=self.device, dtype=torch.float32)
        self.dry = self.walk.open = False
        self.restart()
        if within is None:
            self.recover()

    def free(self) -> None:
        """Free the memory, and with it the clip; `allocate` may follow again, and fail."""
        self.parked.free()
        self.arena.free()
        for holder in (*self.rings.values(), *self.delays.values()):
            holder.data = None
        self._reserve = self.health = self.gathered = self.latents = None
        self.between = False

    def restart(self) -> None:
        """Start a new clip of the same size in the same memory."""
        self.done.clear()
        self.ended.clear()
        self.between = self.drains = False
        if self.health is not None:
            self.health.zero_()
        for ring in self.rings.values():
            ring.restart()
        self.parked.restart()

    def scout(self, walk: Callable[[], None], ends: bool = False) -> None:
        """Run the next steps dry before they are computed, so that parked histories can be fetched before their turn.

        ends: nothing of the clip comes after these steps."""
        if not self.parked.nbytes:
            return
        done, ended = self.done.copy(), self.ended.copy()
        self.parked.coming.clear()
        self.parked.ends = ends
        self.dry = True
        try:
            walk()
        finally:
            self.dry = False
            self.done, self.ended = done, ended

    # -- short of memory ------------------------------------------------------------------------------------------

    def attempt(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return work(...); if memory runs out, free the reserve and the findings of `relieve`, and try once more.

        The arena and the rings exist already, so only an operator's own temporaries can be missing, and it allocates
        those before it writes anything: nothing is lost. A second failure is raised."""
        try:
            return work(*args, **options)
        except Exception as error:
            if self.recording or not out_of_memory(error):
                raise
        self._reserve = None
        self.pressed = True
        self.relieve()
        return work(*args, **options)

    def recover(self) -> bool:
        """Allocate the reserve (again); return whether it is there."""
        size = RESERVE_BYTES if self.device.type == "cuda" else 0
        try:
            self._reserve = torch.empty(size, dtype=torch.uint8, device=self.device)
        except Exception as error:
            if not out_of_memory(error):
                raise
        self.pressed = self._reserve is None
        return not self.pressed

    def rest(self) -> None:
        """Keep the memory, except what only a current run needs: `recover` and a new `relieve` make it ready again."""
        self._reserve = None
        self.relieve = _nothing

    def conditioned(self, norm: Norm, channels: int, first: int) -> Norm:
        """Return a norm of `channels` with what it takes of the clip's latents from frame `first` on."""
        if norm.condition is None:
            return norm
        table = self.arena.take((math.prod(self.latents.shape[1:3]), 2 * channels), torch.float32)
        return replace(norm, condition=replace(norm.condition, latents=self.latents, first=first, table=table))

    def forget(self, key: str) -> None:
        """Let the next call of a convolution begin its clip."""
        self.done[key] = 0
        for holder in [holder for holder, held in self.holders() if held == key]:
            holder.forget(key)

    def rewind(self) -> None:
        """Move the histories, between chunks, back to the slots that the clip's first chunk used."""
        for ring in self.rings.values():
            ring.rewind()

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Compute one chunk's steps inside: if they fail, the histories are a mix of old and new ones."""
        self.between = False
        yield
        self.between = True

    def coming(self, key: str, frames: int, drains: bool) -> tuple[int, int, bool]:
        """Return (frames that a convolution in time gets, frames that it makes, whether a later one may drain).

        Args:
            key: the convolution.
            frames: its new frames, without the one that follows the clip.
            drains: the convolution may get the frame that follows the clip.
        """
        if not self.after or self.walk.open:
            return frames, frames, drains
        follows = 0
        if drains and key not in self.ended:
            drains = frames < self.most[key]
            follows = int(drains)
        got = frames + follows
        return got, got if self.done[key] else max(got - 1, 0), drains

    def foresee(self, keys: Iterable[str], frames: int, drains: bool) -> tuple[int, bool]:
        """Return the frames that come out of convolutions in time, one after the other, and `drains` for later steps.

        Args:
            keys: the convolutions in order.
            frames: new frames of the first one.
            drains: as in `coming`.
        """
        for key in keys:
            _, frames, drains = self.coming(key, frames, drains)
        return frames, drains

    def planned(self, name: str, frames: int) -> int:
        """Return the most frames that the step `name` makes, where frames may be added in place; else `frames`."""
        if not self.after:
            return frames
        if self.walk.open:
            self.most[name] = max(self.most.get(name, 0), frames)
        return max(frames, self.most[name])

    def joins(self, follow: int, frames: int, step: int) -> bool:
        """Check whether a stage and the next one run as one, because all frames of a chunk make one step.

        Then no frames wait between them, which leaves memory for histories that would otherwise be parked. Runs that
        park none have room, and join no stages.

        Args:
            follow: number of stages that follow this one.
            frames: of the chunk.
            step: frames that the next stage takes at once; 0 for any number.
        """
        if self.walk.open:
            joined = self._joined.get(follow, self.parked.parking.keys is None and not self.after)
            self._joined[follow] = joined and (not step or frames <= step)
        return self._joined.get(follow, False)

    def grown(self, x: Tensor, frames: int) -> Tensor:
        """Return x with so many frames, in the memory that `planned` made room for."""
        return x.as_strided((frames, *x.shape[1:]), x.stride()) if not x.is_meta else x.new_empty(frames, *x.shape[1:])

    def delay(self, key: str, frames: int, x: Tensor) -> Delay:
        """Return the place where at most `frames` of a stream like x [D, H, W, C] wait for the convolution `key`."""
        if key not in self.delays:
            name = f"{key} residual"
            self.delays[key] = Delay(name, frames, tuple(x.shape[1:]), x.dtype, lambda: self.done)
        return self.delays[key]

    def holders(self) -> Iterator[tuple[Ring | Parked | Delay, str]]:
        """Yield each convolution's key with the object that holds its history."""
        for ring in self.rings.values():
            for key in ring.histories:
                yield ring, key
        for key in self.parked.holding:
            yield self.parked, key
        for delay in self.delays.values():
            yield delay, delay.name

    @property
    def spares(self) -> bool:
        """Return whether the plan takes as little memory as it can: what can be made again is not kept."""
        return self.parked.parking.keys is None

    def take(self, *shape: int) -> Tensor:
        """Return a tensor from the arena, in the type of activations."""
        return self.arena.take(shape, self.dtype)

    def advance(self, h: int, w: int) -> None:
        """Note that every convolution at this resolution has got the pass's frames."""
        for (plane, _), ring in self.rings.items():
            if plane[:2] == (h + 2, w + 2):
                ring.advance(moved=not self.dry)


def _nothing() -> None:
    """Free nothing more."""
