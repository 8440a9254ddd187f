"""Memory of plain torch: dry runs of the network's own modules on the meta device."""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..kernels.exact import as_products
from ..kernels.targets import kernels_for
from ..network.architecture import Architecture
from ..network.plain import Half
from ..network.program import TILES, Program, Step
from ..network.sectioned import Sectioned
from ..network.state import State
from ..network.steps import Steps
from ..network.stream import decode_features, decode_frames, encode_features, encode_moments, spans_of, split
from ..runtime.pixels import to_network
from ..runtime.scope import attention_scope
from ..system.devices import allocator, keeps_blocks
from .dryrun import PeakMemory, peak_bytes, unseen
from .meta import meta_model
from .plan import Plan
from .repeated import Known, repeated

Size = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Torch:
    """Way in which plain torch takes memory.

    products: convolutions are matrix products (engine/kernels/exact.py). reserves: freed memory stays reserved, in the
    blocks that it was cut into. margin: reserved memory in relation to that in use, otherwise. kernels: steps that
    launch some have them here."""

    products: bool = False
    reserves: bool = False
    margin: float = 1.0
    kernels: bool = True

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, tf32: bool) -> Torch:
        """Return the way in which torch takes memory on this device."""
        margin = MARGIN if allocator(device) == "expandable" else 1.0
        # A plan for a GPU that is not here assumes that it has kernels.
        here = device.type == "cuda" and torch.cuda.is_available()
        kernels = kernels_for(device, "auto") is not None if here else device.type == "cuda"
        return cls(as_products(device, dtype, tf32), keeps_blocks(device), margin, kernels)


def roomy(plan: Plan, work: int, how: Torch, target: int | None) -> Plan:
    """Return a plan of plain torch that states SLACK more for its run, as far as the target has room.

    Args:
        plan: that is below the target.
        work: bytes of the run in addition to weights and libraries.
        how: the way in which torch takes memory.
        target: bytes; None: no limit.
    """
    most = plan.peak_bytes + math.ceil(SLACK * work) if how.reserves else plan.peak_bytes
    return replace(plan, peak_bytes=most if target is None else max(plan.peak_bytes, min(most, target)))


class Taken(NamedTuple):
    """Peaks in bytes: reserved (the one that plans state) and in use."""

    reserved: int
    live: int


#: Part of its memory that a run may need in addition to what its dry run finds: the driver may place segments in
#: another order, by which torch chooses among blocks of one size, and small tensors lie elsewhere.
SLACK = 0.05
#: Memory stated in relation to that in use where torch's segments are expandable: without a limit they took 1.0 to 1.26
#: times as much (8 runs on an H200).
MARGIN = 1.15
#: Lengths in latents of the clips from which longer ones are extrapolated: 121 frames of Cosmos are 16 latents, of
#: Mochi 21.
LINE, PARABOLA = (4, 10), (8, 20, 32)
#: The same where all latents are gathered, each a tensor of its own: 4093 frames of HunyuanVideo are 1024.
GATHERED = (512, 1024)
#: Where no part of every frame stays, clips of at most this many latents are run dry at full length: LTX 0.9.1, which
#: looks farthest ahead, needs 33 to 39. The parabola was up to 1 % from the peak of clips of 125 latents.
FEW = 40


class PlainWalk:
    """Dry runs of one model in plain torch.

    Each covers two chunks of one clip (the second one meets a full history), or more where frames come late, and its
    peak is cached."""

    def __init__(self, architecture: Architecture, config: Any, dtype: torch.dtype, flash_attention: bool) -> None:
        self._architecture, self._config = architecture, config
        self._dtype = dtype
        self._spatial, self._temporal = architecture.spatial, architecture.temporal
        self._flash_attention = flash_attention
        self._front = functools.lru_cache(maxsize=1024)(self._walk_front)
        self._clip = functools.lru_cache(maxsize=1024)(self._walk_clip)
        #: (component, convolutions as products) -> records of its steps.
        self._known: dict[tuple[str, bool], defaultdict[Step, Known]] = defaultdict(lambda: defaultdict(dict))

    def peak(
        self, half: str, latents: int, steps: Steps, frame: Size, tile: Size, rest: Size, how: Torch,
        most: float = math.inf,
    ) -> int:  # fmt: skip
        """Return the peak in bytes in addition to the weights.

        Args:
            half: "encoder" or "decoder".
            latents: of the clip.
            steps: latents of a chunk and frames per step.
            frame, tile: height and width in latent pixels; equal for whole frames.
            rest: rows and columns of pixels that fill no latent pixel.
            how: the way in which torch takes memory.
            most: bytes above which the exact peak does not matter: the dry run then ends early, and the result is an
                estimate that is more than `most`.
        """
        return math.ceil(how.margin * self._taken(half, latents, steps, frame, tile, rest, how, most / how.margin))

    def _taken(
        self, half: str, latents: int, steps: Steps, frame: Size, tile: Size, rest: Size, how: Torch, most: float
    ) -> int:
        """Return the peak as dry runs find it."""
        program = getattr(self._model, half).program
        found = (s.memory(latents, *tile, self._dtype.itemsize, steps.passes, how.kernels) for s in program.steps)
        stated = [size for size in found if size is not None]
        if stated:
            return math.ceil((1 + SLACK * how.reserves) * sum(stated))
        if tile == frame and not program.gathers:
            lengths = self._lengths(program, latents, steps)
            return self._long(lambda n: self._clip(half, n, steps, frame, rest, 0, how), *lengths, most)
        # The part on whole frames and the part on tiles run one after the other.
        front, channels = self._before_tiles(half, latents, steps, frame, how)
        if front > most:
            return front
        single = self._parts(program)[1]
        waits = program.gathers and tile == frame
        waiting = self._dtype.itemsize * channels * math.prod(frame) * latents if waits else 0
        lengths = self._lengths(single, latents, steps)
        tiles = self._long(lambda n: self._clip(half, n, steps, tile, rest, channels, how), *lengths, most - waiting)
        return max(front, waiting + tiles)

    def _parts(self, program: Program) -> tuple[Program, Program]:
        """Split a program into the part that runs on whole frames and the part that runs on tiles."""
        if not keeps(program):  # then neither part does; else only one of them may
            return program, program
        at = program.before(TILES)
        parts = [replace(program, items=items) for items in (program.steps[:at], program.steps[at:])]
        whole, single = parts if program.half == "decoder" else parts[::-1]
        return whole, single

    def _before_tiles(self, half: str, latents: int, steps: Steps, frame: Size, how: Torch) -> tuple[int, int]:
        """Return the peak bytes of the part that runs on whole frames, and the channels between it and the tiles."""
        program, channels = getattr(self._model, half).program, 0

        def front(latents: int) -> Taken:
            nonlocal channels
            taken, channels = self._front(half, latents, steps.latents, frame, how)
            return taken

        if program.gathers:
            return self._long(front, latents, GATHERED), channels
        return self._long(front, *self._lengths(self._parts(program)[0], latents, steps)), channels

    def _lengths(self, program: Program, latents: int, steps: Steps) -> tuple[int, Sequence[int]]:
        """Return the latents after which the peak of a program grows no more, and the lengths of clips to run dry.

        These are at most `latents`: two chunks, and the latents after which as many frames wait in it as ever will."""
        if keeps(program):
            return latents, LINE if program.waits else PARABOLA
        if program.late and program.chunk:
            after = 2 * program.chunk[1]
        else:
            after = program.reach[1] / (self._temporal if program.half == "encoder" else 1)
        enough = min(latents, 2 * steps.latents + math.ceil(after))
        return enough, (enough,) if enough <= FEW else PARABOLA

    def _long(self, walk: Callable[[int], Taken], latents: int, short: Sequence[int], most: float = math.inf) -> int:
        """Return the peak of a clip of so many latents, extrapolated from the lengths in `short` where it is longer.

        Where a part of every frame stays, memory in use grows by the same bytes with each latent. Reserved memory does
        so too where frames wait one by one for the clip's end, or are gathered, and grows faster where single tensors
        grow: longer clips are then on a line, or on a parabola, through shorter ones. Compared with dry runs of all
        latents: a line is within 3 % (30 latents of 424x240 pixels, the one point tried), and within 0.5 % where they
        are gathered (1500 and 5000 latents of 512x512 and 640x360 pixels). A longer clip uses at least the memory of a
        shorter one: where that is more than `most`, no more are run, and the result is this memory in proportion to the
        latents, which is a good guess for `largest`."""
        if latents <= short[-1]:
            return walk(latents).reserved
        for n in short[:-1]:
            if walk(n).live > most:
                return walk(n).live * latents // n
        *earlier, before, last = (walk(n) for n in short)
        t = (latents - short[-1]) / (short[1] - short[0])
        slope = last.reserved - before.reserved
        bend = max(slope - (before.reserved - earlier[0].reserved), 0) if earlier else 0
        reserved = last.reserved + t * slope + t * (t + 1) / 2 * bend
        return math.ceil(max(reserved, last.live + t * (last.live - before.live)))

    @functools.cached_property
    def _model(self) -> nn.Module:
        model = meta_model(self._architecture, self._config)
        if self._dtype == torch.float32:
            return model
        with torch.inference_mode(False):
            return copy.deepcopy(model).to(self._dtype)

    def _walk_front(self, half: str, latents: int, chunk: int, frame: Size, how: Torch) -> tuple[Taken, int]:
        """Run the part on whole frames at latent resolution; return its peak and the channels between it and tiles."""
        memory, channels = PeakMemory(how.products, how.reserves), 0
        part = self._repeated(half, how, memory)
        if half == "encoder":
            # Features of a small tile have as many channels as those of any other.
            shape = (1, part.program.takes, 1, 2 * self._spatial, 2 * self._spatial)
            whole = getattr(self._model, half)
            video = torch.empty(shape, device="meta", dtype=whole.input_type(self._dtype))
            with torch.inference_mode(False), torch.no_grad(), PeakMemory():
                channels = whole.between(whole.high(video, State()), State()).shape[1]

        def program() -> None:
            nonlocal channels
            if half == "decoder":
                z = self._features(latents, chunk, frame, self._model.config.latent_channels)
                for features in decode_features(part, z, _nothing):
                    channels = features.shape[1]
            else:
                _run(encode_moments(part, self._features(latents, chunk, frame, channels), _nothing))

        return self._peak(program, memory), channels

    def _walk_clip(
        self, half: str, latents: int, steps: Steps, size: Size, rest: Size, channels: int, how: Torch
    ) -> Taken:
        """Run a clip of whole frames; with `channels`, of tiles, up to the part on whole frames or from there on."""
        memory = PeakMemory(how.products, how.reserves)
        part = _Sampled(self._repeated(half, how, memory), memory)

        def program() -> None:
            if half == "decoder":
                features = self._features(latents, steps.latents, size, channels or self._model.config.latent_channels)
                if not channels:
                    features = decode_features(part, features, _nothing)
                for chunk in decode_frames(part, features, steps, _nothing, part.split):
                    _run(chunk)
            else:
                video = self._video(latents, steps, size, rest)
                features = encode_features(part, video, steps, _nothing, part.split)
                _run(features if channels else encode_moments(part, features, _nothing))

        return self._peak(program, memory)

    def _repeated(self, half: str, how: Torch, memory: PeakMemory) -> Half:
        return repeated(getattr(self._model, half), memory, self._known[half, how.products])

    def _peak(self, program: Callable[[], None], memory: PeakMemory) -> Taken:
        with attention_scope(self._flash_attention), unseen():  # steps themselves run inside `seen`
            return Taken(peak_bytes(program, memory), memory.live)

    def _features(self, latents: int, chunk: int, size: Size, channels: int) -> Iterable[Tensor]:
        for first in range(0, latents, chunk):
            count = min(chunk, latents - first)
            yield torch.empty(1, channels, count, *size, device="meta", dtype=self._dtype)

    def _video(self, latents: int, steps: Steps, size: Size, rest: Size) -> Iterable[Tensor]:
        rows, cols = (self._spatial * n + r for n, r in zip(size, rest, strict=True))
        meta, encoder = torch.device("meta"), self._model.encoder
        colours, dtype = encoder.program.takes, encoder.input_type(self._dtype)
        frames = self._temporal * latents if encoder.program.piece else self._temporal * (latents - 1) + 1
        sectioned = isinstance(encoder.program, Sectioned)
        spans = encoder.program.spans_of(latents, steps.latents) if sectioned else None
        for a, b in spans or spans_of(encoder.program, frames, steps.latents):
            yield to_network(torch.empty(1, b - a, rows, cols, colours, device=meta, dtype=torch.float32), meta, dtype)


def keeps(program: Program) -> bool:
    """Check if a part of every frame stays until the clip ends."""
    return program.waits or (math.inf in program.reach and not (program.late and program.chunk))


def needs_length(architecture: Architecture, program: Program) -> bool:
    """Check if plans need the length of a clip that is otherwise read as it runs: its memory grows with each frame."""
    return not architecture.in_tiles and keeps(program) and not program.unstreamed


class _Sampled:
    """Component whose `high` runs only the first and the last steps of a chunk dry.

    The last one also meets a full history and all earlier frames; of the steps between, only the results are counted.
    A step that finds and leaves everything as the previous one did needs the same memory."""

    def __init__(self, part: nn.Module, memory: PeakMemory) -> None:
        self._part, self._memory = part, memory
        self.low, self.between, self.program = part.low, part.between, part.program
        #: Frames that the latest step took, and the shape of its result.
        self._took = 0
        self._left: torch.Size | None = None
        self._more = 0
        self._found: list[torch.Size] = []
        self._again = self._between = False

    def high(self, x: Tensor, state: State) -> Tensor:
        if self._between:
            frames = x.shape[2] * max(self._left[2], 1) // self._took  # a step may have no result yet
            return x.new_empty(*self._left[:2], frames, *self._left[3:])
        y = self._walked(x, state, lambda: self._part.high(x, state))
        if y is None:
            return x.new_empty(self._left)
        self._took, self._left = x.shape[2], y.shape
        return y

    def each(self, x: Tensor, state: State) -> Iterator[Tensor]:
        """Run the step and yield nothing: callers keep none of the parts."""
        if not self._between:
            self._walked(x, state, lambda: _run(self._part.each(x, state)))
        yield from ()

    def _walked(self, x: Tensor, state: State, work: Callable[[], T]) -> T | None:
        """Return work(), or None where it needs and leaves the same as the previous time, or the two previous pictures.
        """
        found = [x.shape, *_sizes(state)]
        again = found == self._found
        # The second picture runs in the blocks that the first one has left.
        if again and (self._again or not self.program.style.still) and not state.ending:
            self._memory.need(self._more)
            return None
        self._again = again
        made, self._more = self._memory.above(work)
        self._found = found if found[1:] == _sizes(state) else []
        return made

    def split(self, x: Tensor, size: int) -> Iterator[Tensor]:
        """Split as `stream.split` does, but with all full steps between the first and the last one as one part."""
        full = x.shape[2] // size if size else 1
        if full < 3 or self.program.late:
            yield from split(x, size)
            return
        sizes = [size, (full - 2) * size, size, x.shape[2] - full * size]
        for i, part in enumerate(x.split(sizes if sizes[-1] else sizes[:-1], 2)):
            self._between = i == 1
            yield part


def _sizes(state: State) -> list[torch.Size]:
    """Return the shapes of histories and of frames that wait for the clip's end."""
    waiting = (frame for frames in state.waiting.values() for frame in frames)
    return [kept.shape for kept in (*state.histories.values(), *waiting)]


def _run(parts: Iterable[object]) -> None:
    """Consume an iterator and keep none of its results."""
    deque(parts, 0)


def _nothing() -> None:
    """Stand in for a check of cancellation: dry runs are too short to be cancelled."""
