"""Execute a Program on the fused operators: packing, and chunks in an ExecutionContext (a dry one for plans)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.to_pixels import BYTES, RAW, UNIT, Pixels
from ..options import DEFAULTS, Options
from ..precision.forms import Operands
from ..runtime.context import ExecutionContext
from ..runtime.parking import Parking
from .chain import Link, Result, given, pack_chain, sizes, take, through
from .offload import lent
from .ops import attention
from .packed import in_winograd, tensor_bytes
from .plain import Half
from .steps import frames_of
from .values import Size, Sums

#: Tiles are clamped after they are blended.
UNCLAMPED = Pixels(UNIT.gain, UNIT.offset, float("-inf"), float("inf"))
Emit = Callable[[Tensor], None]
#: Marks a stage as enclosed by others, whatever their resolutions.
_INNER = frozenset({(0, 0)})


class Fused:
    """Packed weights of a component (encoder or decoder) and the order of its steps; one instance serves any number of
    ExecutionContexts. Residual streams are [frames, H, W, C]."""

    def __init__(
        self, half: Half, dtype: torch.dtype, options: Options = DEFAULTS, operands: Operands | None = None,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Pack the weights.

        Args:
            dtype: of activations.
            operands: operand types of the convolutions, if they differ from `dtype`.
            device: where to pack, step by step, if the weights wait elsewhere; None: where they lie.
        """
        program = half.program
        self.begins, self.staged = program.begins, program.staged
        self.dtype, self.style, self.takes = dtype, program.style, program.takes
        #: gathers: the steps that see whole frames see whole clips. chunks: latents of a clip's first chunk and of
        #: later ones, if these are fixed. piece: as `Program.piece`.
        self.gathers, self.chunks, self.piece = program.gathers, program.chunk, program.piece
        operands = operands or Operands(dtype, winograd=options.winograd is True and not program.style.direct)
        part = half.part if device is None else lambda name: lent(device, half.part(name))[0]
        operands = replace(operands, scale=program.scale)
        links = iter(pack_chain(program.steps, part, operands, options))
        self.stages = [tuple(next(links) for _ in steps) for steps in program.stages()]
        self._rates = program.rates
        #: Channels that attention sees; 0: the component has no attention.
        attentions = [s for s in program.every() if isinstance(s, attention.Attention)]
        self.attends = max((s.width for s in attentions), default=0)
        #: Side of the windows that all attention stays within, 0: it sees whole frames.
        self.window = min((s.window for s in attentions), default=0)
        self.formed, self.nbytes = in_winograd(self), tensor_bytes(self)  # formed: (in Winograd form, all)

    def begin(self, device: torch.device, parking: Parking | None) -> ExecutionContext:
        """Return a dry ExecutionContext placed after the clip's start, where latents stand for most frames."""
        how = (getattr(self.style, name) for name in ("head", "border", "still", "after", "forgets"))
        run = ExecutionContext(self.dtype, device, parking, *how)
        names = (link.step.name for stage in self.stages for link in stage)
        run.done.update({**dict.fromkeys(names, 1), "latents": 1, "frames": 1})
        return run

    @contextmanager
    def _guest(self, run: ExecutionContext, make: Callable[[], ExecutionContext]) -> Iterator[ExecutionContext]:
        """Provide a separate ExecutionContext inside the arena of `run` for the steps that see the whole clip."""
        guest = make()
        with run.arena.scope():
            guest.allocate(run.arena.take((guest.inner_bytes,), torch.uint8))
            guest.relieve, guest.health, guest.watch = run.relieve, run.health, run.watch
            yield guest

    def start(self, run: ExecutionContext, begins: tuple[int, ...], steps: slice) -> None:
        """Start a new clip, or a part of one, for some of the steps, which wait for their turns; `begins` has the first
        latent of every step, as from `Program.begins`."""
        run.restart()
        if not self.staged:  # the part is treated as a separate clip
            return
        run.done["latents"] = begins[steps][0]
        for link, latent, rate in zip(itertools.chain(*self.stages), begins, self._rates, strict=False):
            for step in (link.step, *link.step.inner()):
                run.done[step.name] = frames_of(latent, rate)

    def whole(self, run: ExecutionContext) -> bool:
        """Return whether all steps take part in the next chunk."""
        return self._going(run) == len(self._rates) - 1

    def _going(self, run: ExecutionContext) -> int:
        """Count the steps that take part in the next chunk: in a part of a clip, later steps begin later."""
        if not self.staged:
            return len(self._rates) - 1
        at, links = run.done["latents"], itertools.chain(*self.stages)
        waits = (run.done[link.step.name] > frames_of(at, r) for link, r in zip(links, self._rates, strict=False))
        return next((i for i, wait in enumerate(waits) if wait), len(self._rates) - 1)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device="meta", dtype=self.dtype)


class FusedDecoder(Fused):
    """Latents to pixels: steps that see whole frames, and those after them, take the whole chunk; the rest take finer
    and finer pieces of it."""

    @property
    def latent_channels(self) -> int:
        return self.takes

    @property
    def front(self) -> int:
        """Return the number of steps that must see whole frames."""
        return len(self.stages[0])

    @property
    def features(self) -> int:
        """Return the channels of the features that the front steps make from a latent."""
        size = Size(1, 1, 1, self.takes)
        for link in self.stages[0]:
            size = size._replace(channels=link.step.channels(size.channels))
        return size.channels

    def plan(
        self, latents: int, height: int, width: int, frames: int, output: torch.dtype, device: torch.device,
        parking: Parking | None = None, clip: int = 0,
    ) -> ExecutionContext:  # fmt: skip
        """Return a dry ExecutionContext that knows its memory.

        Args:
            latents: per chunk.
            height, width: in latents.
            frames: per step at full size.
            clip: latents of the whole clip.
        """
        run = self.begin(device, parking)
        channels = self.takes
        if self.gathers:
            channels = self.features
            run.gather(clip, height, width, channels)
            run.host(self.plan_front(clip, height, width, device))
        self.chunk(run, self._empty(latents, height, width, channels), frames, output, lambda pixels: None)
        return run

    def plan_front(self, latents: int, height: int, width: int, device: torch.device) -> ExecutionContext:
        """Return a dry ExecutionContext for `front_chunk`; `latents` counts the whole clip if the network gathers."""
        run = self.begin(device, None)
        self.front_chunk(run, self._empty(latents, height, width, self.takes), lambda features: None)
        return run

    def plan_tile(self, latents: int, height: int, width: int, frames: int, device: torch.device) -> ExecutionContext:
        """Return a dry ExecutionContext for `tile_chunk`; the sizes are those of the tile."""
        run = self.begin(device, None)
        self.tile_chunk(run, self._empty(latents, height, width, self.features), frames, lambda pixels: None)
        return run

    def chunk(
        self, run: ExecutionContext, z: Tensor, frames: int, output: torch.dtype, emit: Emit, ends: bool = False,
        signed: bool = False,
    ) -> None:
        """Decode one chunk of latents.

        Args:
            z: latents [D, h, w, C] (any strides), or their `gathered` features.
            frames: most frames per step at full size (0: all of the chunk).
            output: type of the pixels, which are 0..1, or bytes 0..255.
            emit: gets pixels [m, H, W, 3], valid until it returns.
            ends: the clip ends with these latents; networks that look ahead hold frames back until they know.
            signed: the pixels are the network's own, about -1..1 and not clamped.
        """
        form = RAW if signed else BYTES if output == torch.uint8 else UNIT
        front, first, *later = self.stages
        stages, every = [(*front, *first), *later], len(self._rates) - 1
        going = self._going(run)
        if self.gathers:
            stages, going = [first, *later], going - len(front)
        self._stage(run, stages, going, z, frames, output, form, emit)
        if ends and run.after:
            self._drain(run, stages, every, Size(*z.shape), frames, output, form, emit)

    def _drain(
        self, run: ExecutionContext, stages: Sequence[tuple[Link, ...]], going: int, size: Size, frames: int,
        output: torch.dtype, form: Pixels, emit: Emit,
    ) -> None:  # fmt: skip
        """Finish the frames still in progress, stage by stage: once no more input comes, a stage sees the frames that
        follow the clip, at as many of its convolutions at once as their memory has room for. `going` counts the links
        of all stages."""
        for i, stage in enumerate(stages):
            keys = {key for link in stage for key in link.step.ahead(link.packed)}
            while keys - run.ended:
                run.drains = True
                outer = _INNER if i else frozenset()
                with run.arena.scope():
                    room = run.planned(stages[i - 1][-1].step.name, 0) if i else 0
                    nothing = run.take(room, *size[1:])[:0]
                    self._stage(run, stages[i:], going, nothing, frames, output, form, emit, outer)
                run.drains = False
            for link in stage:
                size = link.step.size(size, False)
            going -= len(stage)

    def whole_chunk(
        self, run: ExecutionContext, frames: int, output: torch.dtype, z: Tensor, signed: bool = False
    ) -> Tensor:
        """Decode, as `chunk` does, a chunk whose frames all fit one step; return the pixels, valid until the next
        call."""
        pixels: list[Tensor] = []
        self.chunk(run, z, frames, output, pixels.append, signed=signed)
        # Networks that look ahead may have no frames yet.
        return pixels[0] if pixels else torch.empty(0, 1, 1, 3, dtype=output, device=run.device)

    def front_chunk(self, run: ExecutionContext, z: Tensor, emit: Emit) -> None:
        """Execute only the part that must see the whole frame: `emit` gets features [D, h, w, C], valid until it
        returns; none while not all steps take part."""
        links = self.stages[0][: self._going(run)]
        with run.arena.scope():
            x, _ = through(run, links, Size(*z.shape), given(z))
            run.advance(*z.shape[1:3])
            run.done["latents"] += z.shape[0]
            if not run.dry:
                emit(x if len(links) == len(self.stages[0]) else x[:0])

    def gather(self, run: ExecutionContext, z: Tensor) -> None:
        """Write the features of a whole clip's latents [T, h, w, C] into `run.gathered`."""
        with self._guest(run, lambda: self.plan_front(*z.shape[:3], run.device)) as front:
            self.front_chunk(front, z, run.gathered.copy_)

    def tile_chunk(self, run: ExecutionContext, x: Tensor, frames: int, emit: Emit) -> None:
        """Decode a tile's features [D, h, w, C] (contiguous, overwritten) to float32 pixels 0..1, not clamped; else as
        `chunk`."""
        going = self._going(run) - len(self.stages[0])
        self._stage(run, self.stages[1:], going, x, frames, torch.float32, UNCLAMPED, emit)

    def _stage(
        self, run: ExecutionContext, stages: Sequence[tuple[Link, ...]], going: int, x: Tensor, frames: int,
        output: torch.dtype, form: Pixels, emit: Emit, outer: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        """Execute one stage and all later ones, which take its result in steps. `going` counts the links of these
        stages that take part; `outer` has the resolutions that enclosing stages use."""
        links, later, ends = stages[0], stages[1:], False
        while later and run.joins(len(later), sizes(run, links[:going], Size(*x.shape))[-1][0], _step(later, frames)):
            links, later, ends = links + later[0], later[1:], True
        links, more = links[:going], going - len(links)
        shapes = sizes(run, links, Size(*x.shape))
        # The result's resolution counts, too, unless only a later stage reads it.
        used = frozenset(s[1:3] for s in (shapes if more <= 0 or _reads_result(links[-1]) else shapes[:-1]))
        latents = x.shape[0]
        with run.arena.scope():
            pixels = None
            if more > 0:
                y, _ = through(run, links, Size(*x.shape), given(x), keep=True, ends=ends)
                run.drains = False
                for a, b in run.walk.spans(y.shape[0], _step(later, frames)) if y.shape[0] else ():
                    self._stage(run, later, more, y[a:b], frames, output, form, emit, outer | used)
            elif later or more < 0:
                through(run, links, Size(*x.shape), given(x), ends=ends)
            else:
                y, sums = through(run, links[:-1], Size(*x.shape), given(x), ends=ends)
                end = links[-1]
                pixels = end.step.store(end.packed, run, y, sums, output, form)
            for size in used - outer:
                run.advance(*size)
            if pixels is not None:
                run.done["frames"] += pixels.shape[0]
                if not run.dry and pixels.shape[0]:
                    emit(pixels)
        if not outer:
            run.done["latents"] += latents


class FusedEncoder(Fused):
    """Pictures to moments: the steps before the first mark take pieces of a chunk, all later ones the whole chunk."""

    def plan(
        self, latents: int, height: int, width: int, frames: int, device: torch.device, parking: Parking | None = None,
        clip: int = 0,
    ) -> ExecutionContext:  # fmt: skip
        """Return a dry ExecutionContext that knows its memory.

        Args:
            latents: per chunk.
            height, width: in pixels.
            frames: per step at full size.
            clip: latents of the whole clip.
        """
        run = self.begin(device, parking)
        made = self.chunk(run, self._empty(self.every * latents, height, width, self.takes), frames)
        if self.gathers:
            run.gather(clip, *made.shape[1:])
            run.host(self._plan_last(clip, *made.shape[1:], device=device))
        return run

    def tile_run(self, frames: int, height: int, width: int, step: int, device: torch.device) -> ExecutionContext:
        """Return a dry ExecutionContext for chunks of `frames` that are separate clips, `step` frames at full size at
        once."""
        run = self.begin(device, None)
        run.restart()
        self.chunk(run, self._empty(frames, height, width, self.takes), step)
        return run

    @property
    def every(self) -> int:
        """Return the frames per latent, except for a clip's first latent."""
        return self._rates[0]

    def chunk(self, run: ExecutionContext, video: Tensor, frames: int) -> Tensor | None:
        """Encode one chunk of frames.

        Args:
            video: [F, H, W, 3] in -1..1; F is 1 + 4n at the clip's start and 4n later.
            frames: most frames per step at full size (0: all).

        Returns:
            Moments [T, h, w, 2C] in float32, or features to be gathered, valid until the next call; None while not all
            steps take part.
        """
        (fine, rest), going, whole = self.stages[:2], self._going(run), self.whole(run)
        ahead, result = rest[: max(0, going - len(fine))], None
        shapes = sizes(run, ahead, sizes(run, fine, Size(*video.shape))[-1])

        with run.arena.scope():
            if ahead:
                out = take(run, ahead[-1].step, shapes[-1]) if whole else None
                result, _ = through(run, ahead, shapes[0], lambda: self._by_steps(run, video, frames), out)
                for size in {s[1:3] for s in shapes}:
                    run.advance(*size)
            else:
                for _ in self._steps(run, fine[:going], video, frames, None):
                    pass
            if whole and not self.gathers:
                run.inspect(result)
        run.done["frames"] += video.shape[0]
        run.done["latents"] += -(-video.shape[0] // self._rates[0])
        return result if whole else None

    def _steps(
        self, run: ExecutionContext, links: tuple[Link, ...], video: Tensor, frames: int, out: Tensor | None
    ) -> Iterator[Sums]:
        """Execute the links on `frames` frames at a time, into `out` if given; yield the sums of each piece."""
        for a, b in run.walk.spans(video.shape[0], frames):
            part = video[a:b]
            shapes = sizes(run, links, Size(*part.shape))
            with run.arena.scope():
                yield through(run, links, shapes[0], given(part), None if out is None else out[a:b])[1]
                for size in {s[1:3] for s in shapes[: -1 if out is not None else None]}:
                    run.advance(*size)

    def gather(self, run: ExecutionContext, emit: Emit) -> None:
        """Turn `run.gathered`, the features of a whole clip, into moments, overwriting it: `emit` gets [T, h, w, 2C] in
        float32, valid until it returns."""
        with self._guest(run, lambda: self._plan_last(*run.gathered.shape, device=run.device)) as last:
            self._last(last, run.gathered, emit)

    def _plan_last(self, *shape: int, device: torch.device) -> ExecutionContext:
        """Return a dry ExecutionContext for the steps that see the whole clip, for features [T, h, w, C]."""
        run = self.begin(device, None)
        self._last(run, self._empty(*shape), lambda moments: None)
        return run

    def _last(self, run: ExecutionContext, x: Tensor, emit: Emit) -> None:
        with run.arena.scope():
            moments, _ = through(run, self.stages[2], Size(*x.shape), given(x))
            run.advance(*x.shape[1:3])
            run.inspect(moments)
            if not run.dry:
                emit(moments)

    def _by_steps(self, run: ExecutionContext, video: Tensor, frames: int) -> Result:
        links = self.stages[0]
        out = take(run, links[-1].step, sizes(run, links, Size(*video.shape))[-1])
        parts = list(self._steps(run, links, video, frames, out))
        if run.walk.open:  # the same sums for every division into steps
            return out, run.walk.sums(out, links[-1].groups)
        return out, run.joined(parts, 0)


def _reads_result(link: Link) -> bool:
    """Return whether the link's own convolutions work at the size of its result, which is larger than its input."""
    return link.step.space[0] > link.step.space[1] and getattr(link.packed, "expand", None) is not None


def _step(stages: Sequence[tuple[Link, ...]], frames: int) -> int:
    """Return the frames that enter the first of these stages at once so that `frames` leave the last; 0: all."""
    return -(-frames // math.prod(link.step.time[0] for stage in stages for link in stage))


def fuse(
    half: Half, dtype: torch.dtype, options: Options = DEFAULTS, operands: Operands | None = None,
    device: torch.device | None = None,
) -> FusedDecoder | FusedEncoder:  # fmt: skip
    """Pack an encoder or decoder; the arguments are those of `Fused`."""
    made = FusedDecoder if half.program.half == "decoder" else FusedEncoder
    return made(half, dtype, options, operands, device)
