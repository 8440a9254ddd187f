"""A network described as data: steps in their order, and where finer steps in time and tiles begin."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from .state import State

if TYPE_CHECKING:
    from ..kernels.conv3d import Partials
    from ..operands.forms import Operands
    from ..options import Options
    from ..run.run import Run

Head = Literal["replicate", "zero"]
Border = Literal["zero", "replicate", "reflect"]


class Mark(Enum):
    """Between steps. TILES: blended tiles begin here (decoder) or end here (encoder); what lies on the latent's side
    sees whole frames. STEP: from here on (decoder) or up to here (encoder) fewer frames than a chunk's go through at
    once; it lies where the resolution changes."""

    TILES = "tiles"
    STEP = "step"


TILES, STEP = Mark.TILES, Mark.STEP


class Size(NamedTuple):
    """Frames, rows, columns and channels of what goes into a step or comes out of it."""

    frames: int
    height: int
    width: int
    channels: int


class Work(NamedTuple):
    """Of a step: FLOP as it is written, FLOP in its composed form, values that its convolutions then read and write."""

    flop: float = 0.0
    composed_flop: float = 0.0
    values: float = 0.0

    def __add__(self, other: tuple) -> Work:  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class Taps(NamedTuple):
    """Frames besides its own that a step reads, at its input's rate; infinite: all there are."""

    before: float = 0
    after: int = 0


@dataclass(frozen=True)
class Style:
    """What all convolutions of a Program do. head: what lies before a clip, its first frame or zeros. border: what lies
    around a frame. after: frames that a 3-tap convolution looks ahead; copies of its last one follow the clip, or zeros
    where they lie before it. taps: in time, of 3x3 convolutions; 1: a frame knows nothing of others, and any number of
    pictures make a clip. single: the plain walk takes one frame after the other, so that not even the last bit depends
    on how many come at once."""

    head: Head = "replicate"
    border: Border = "zero"
    after: int = 0
    taps: Literal[1, 3] = 3
    single: bool = False

    @property
    def still(self) -> bool:
        """Whether every frame is a picture of its own."""
        return self.taps == 1

    @property
    def least(self) -> int:
        """Rows, and columns, of the smallest frame: a border that reflects shows what lies behind the edge."""
        return 2 if self.border == "reflect" else 1


CAUSAL = Style()


class Step:
    """One kind of step; subclasses are frozen dataclasses with a `name`, that of their parameters within the half. One
    that begins with "/" is from the file's root."""

    name: str
    #: Of the frame rate and of rows and columns: (out, in).
    time: tuple[int, int] = (1, 1)
    space: tuple[int, int] = (1, 1)
    #: The result takes the place of the input. Else, if `below`, its memory is taken before the input is made, which is
    #: given back as soon as the result is there.
    in_place: bool = False
    below: bool = True
    #: It may instead take the first channels of the input's memory, where no `out` is given.
    inside: bool = False
    #: Groups of the norm that looks at the input first; 0: sums of the input are of no use.
    groups: int = 0
    #: The result is part of a residual stream, which the fused operators want in whole rows of memory.
    stream: ClassVar[bool] = True
    #: Frames wait in it besides those that convolutions look at.
    late: bool = False
    #: Latents after which what it does with one comes again; 1: it treats all alike.
    cycle: int = 1
    #: It must see a whole clip at once.
    whole: bool = False
    #: All of a clip's frames wait in it for the last one.
    waits: bool = False
    #: Its fused form follows a Program whose convolutions look ahead.
    looks_ahead: ClassVar[bool] = False
    #: Its products take 8-bit operands without being measured before: each row has a scale of its own.
    scales: ClassVar[bool] = False
    #: The fused walk's result is fp32 whatever the activations are.
    wide: ClassVar[bool] = False
    exact_input: ClassVar[bool] = False  #: The plain walk gives it fp32, as the first step of a Program.
    #: Why only the plain walk runs it, whatever the Program's style.
    plain_only: ClassVar[str | None] = None

    def modules(self, style: Style) -> dict[str, nn.Module]:
        """Parameters: name within the half -> module. Without any of its own, those of the steps it is made of."""
        return {name: module for step in self.inner() for name, module in step.modules(style).items()}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        """[B, C, T, H, W] through the modules; `part` finds them by name."""
        return part(self.name)(x, state)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Any:
        """The weights as `run` reads them."""
        raise NotImplementedError

    def run(self, packed: Any, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        """x [D, H, W, C] -> the result, in `out` where that is given, and its sums for a norm of `groups`.

        first: frame of its clip that x begins with. What is not `in_place` may overwrite x all the same.
        """
        raise NotImplementedError

    def why_not_fused(self, style: Style) -> str | None:
        """The reason the fused walk cannot run it in a Program of this style, or None."""
        return None

    def ahead(self, packed: Any) -> tuple[str, ...]:
        """Keys of its convolutions in time, one after the other, at the input's rate."""
        return ()

    def size(self, size: Size, starts: bool) -> Size:
        """Of the result. starts: the clip begins with the input, whose first frame is not doubled or paired."""
        frames, (out, of), (big, small) = size.frames, self.time, self.space
        if out > of:
            frames = frames * out - (out - 1) * starts
        elif of > out:
            frames = (frames + (of - 1) * starts) // of
        return Size(frames, size.height * big // small, size.width * big // small, self.channels(size.channels))

    def channels(self, channels: int) -> int:
        """Of the result."""
        for step in self.inner():
            channels = step.channels(channels)
        return channels

    def taps(self, style: Style) -> Taps:
        """Of all its convolutions together."""
        return Taps()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        """For a whole clip of that size."""
        return Work()

    def eligible(self) -> tuple[tuple[str, int], ...]:
        """Convolutions that may take 8-bit operands: (name within the half, least of its channels)."""
        return ()

    def inner(self) -> tuple[Step, ...]:
        """Steps it is made of, if it is."""
        return ()


class Resampling(Step):
    """A step to another resolution, and where `temporal` to another frame rate by the same factor."""

    temporal: bool

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return self.space if self.temporal else (1, 1)


@dataclass(frozen=True)
class Program:
    """An encoder or decoder. `half` is its name in the file, before those of its steps. What follows from these in time
    is kept: every call asks for it, several times a chunk."""

    half: Literal["encoder", "decoder"]
    items: tuple[Step | Mark, ...]
    #: Channels of a latent, or of a picture.
    takes: int
    style: Style = CAUSAL

    @classmethod
    def of(cls, half: Literal["encoder", "decoder"], takes: int, *items: Step | Mark, **style: Any) -> Program:
        """style: fields of Style that differ from the default."""
        return cls(half, items, takes, Style(**style))

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(i for i in self.items if isinstance(i, Step))

    def every(self) -> Iterator[Step]:
        """All steps and those they are made of."""
        waiting = list(self.steps)
        while waiting:
            step = waiting.pop(0)
            yield step
            waiting[:0] = step.inner()

    def parts(self) -> tuple[tuple[Step, ...], ...]:
        """(what sees whole frames, what changes the frame rate, what takes single frames), in the order of the walk."""
        steps, tiles = self.steps, self.before(TILES)
        if self.half == "decoder":
            last = max((i for i, s in enumerate(steps, 1) if s.time != (1, 1)), default=tiles)
            return steps[:tiles], steps[tiles : max(last, tiles)], steps[max(last, tiles) :]
        first = self.before(STEP)
        return steps[:first], steps[first:tiles], steps[tiles:]

    def stages(self) -> list[tuple[Step, ...]]:
        """Steps between marks. A decoder's first stage is in front of TILES, an encoder's last one behind it where it
        gathers."""
        out: list[list[Step]] = [[]]
        for item in self.items:
            if isinstance(item, Step):
                out[-1].append(item)
            elif item is STEP or self.half == "decoder" or self.gathers:
                out.append([])
        return [tuple(s) for s in out]

    def before(self, mark: Mark) -> int:
        """Steps in front of the first such mark."""
        return sum(isinstance(i, Step) for i in self.items[: self.items.index(mark)])

    def frames(self, count: int) -> int:
        """Frames or latents that a whole clip of `count` becomes."""
        size = Size(count, 1 << 16, 1 << 16, self.takes)
        for step in self.steps:
            size = step.size(size, True)
        return size.frames

    @property
    def scales(self) -> bool:
        """Of its steps one has products that scale 8-bit operands as they come."""
        return any(s.scales for s in self.every())

    @functools.cached_property
    def late(self) -> bool:
        """Frames come out after others have gone in, the last ones when the clip ends."""
        return bool(self.style.after) or any(s.late for s in self.every())

    @functools.cached_property
    def chunk(self) -> tuple[int, int] | None:
        """Latents of a clip's first chunk and of all later ones that its norms take together; None: any will do."""
        for step, rate in zip(self.steps, self.rates, strict=False):
            together = getattr(getattr(step, "norm", None), "chunk", None)
            if isinstance(together, tuple):
                return (together[0] - 1) // rate + 1, together[1] // rate
        return None

    @functools.cached_property
    def gathers(self) -> bool:
        """What sees whole frames sees whole clips, too: their latents, or what becomes of them, are there at once."""
        return any(s.whole for s in self.steps)

    @functools.cached_property
    def waits(self) -> bool:
        """Nothing comes out before a clip ends, however it is cut."""
        return any(s.waits for s in self.every())

    @property
    def unstreamed(self) -> bool:
        """All of a clip has to be there before any of its results is, and what it takes depends on how long it is."""
        return self.gathers or self.waits

    def whole_frames(self, count: int) -> int:
        """Of `count` frames those that fill whole latents: trailing ones are not read."""
        return (count - 1) // self.rates[0] * self.rates[0] + 1

    @functools.cached_property
    def rates(self) -> tuple[int, ...]:
        """Frames for each latent that go into every step, and at the end those that come out."""
        first = math.prod(s.time[1] for s in self.steps)
        return tuple(accumulate(self.steps, lambda rate, s: rate * s.time[0] // s.time[1], initial=first))

    @functools.cached_property
    def rate(self) -> Fraction:
        """Of results to what goes in, in time."""
        return math.prod((Fraction(*s.time) for s in self.steps), start=Fraction(1))

    @functools.cached_property
    def reach(self) -> tuple[Fraction | float, Fraction | float]:
        """Receptive field in time: frames before and after its own that a result may depend on, at the input's rate.
        Infinite where it may depend on all of them."""
        if any(s.late for s in self.every()):  # chunks of frames are counted from the clip's start
            return math.inf, math.inf
        before, after, rate = Fraction(0), Fraction(0), Fraction(1)
        for step in self.steps:
            if step.time != (1, 1) and not before:
                before += step.time[1] / rate  # the first frame there is resampled as a clip's first one
            taps = step.taps(self.style)
            before, after = before + taps.before / rate, after + taps.after / rate
            rate *= Fraction(*step.time)
        return before, after

    @functools.cached_property
    def staged(self) -> bool:
        """Each chunk's results come out with it, at every step: so steps may begin one after the other."""
        return not (self.late or self.waits or self.gathers or self.style.single)

    def begins(self, first: int) -> tuple[int, ...]:
        """For each step the latent from which on it has to see a clip so that its results from `first` on are those of
        the whole clip, bit by bit; not falling, and a multiple of the steps' cycles.

        Where they are not `staged`, all begin with one latent, as with a clip of their own: its first latent stands for
        the one last frame of it.
        """
        every = self.cycle
        if not self.staged:
            before, _ = self.reach
            at = (first - 1) / self.rate + 1 - before if self.rate >= 1 else first - 1 + (1 - before) * self.rate
            one = 0 if math.inf == before or self.waits else max(0, math.floor(at)) // every * every
            return (one,) * len(self.steps)
        need, out = first, []
        for (made, of), before, rate in self._needs:
            own = -(-need // made) * of - (of - 1)  # the first frame that the needed one is made of
            need = max(0, own - before)
            out.append(-(-need // rate) // every * every)
        return tuple(reversed(out))

    @functools.cached_property
    def cycle(self) -> int:
        """Latents with whose multiples all steps begin."""
        return math.lcm(*(s.cycle for s in self.every()))

    @functools.cached_property
    def _needs(self) -> tuple[tuple[tuple[int, int], int, int], ...]:
        """Of each step, the last one first: its `time`, frames before its own that it reads, and its rate."""
        both = zip(self.steps, self.rates, strict=False)
        return tuple((step.time, step.taps(self.style).before, rate) for step, rate in both)[::-1]

    def window(self, first: int, end: int, latents: int) -> tuple[int, int]:
        """The latents [a, b) of a clip of `latents` that are enough for its results [first, end)."""
        _, after = self.reach
        if after == math.inf:
            return 0, latents
        last = (end - 1) / self.rate + after if self.rate >= 1 else end - 1 + after * self.rate
        return min(self.begins(first)[0], latents - 1), min(math.ceil(last) + 1, latents)

    def widths(self) -> set[int]:
        """Channels of every residual stream."""
        size, found = Size(1, 1 << 16, 1 << 16, self.takes), set()
        for step in self.every():
            if step.inner():
                continue
            size = size._replace(channels=step.channels(size.channels))
            if step.stream:
                found.add(size.channels)
        return found

    def work(self, frames: int, height: int, width: int) -> Work:
        """Of a whole clip."""
        size, total = Size(frames, height, width, self.takes), Work()
        for step in self.steps:
            total += step.work(size, self.style)
            size = step.size(size, True)
        return total

    def eligible(self, least: int) -> list[str]:
        """Keys of the convolutions that may take 8-bit operands, with at least so many channels."""
        pairs = (pair for step in self.every() for pair in step.eligible())
        return [f"{self.half}.{name}" for name, channels in pairs if channels >= least]

    def why_not_fused(self) -> str | None:
        """The reason the fused walk cannot run it, or None."""
        reasons = (s.plain_only or s.why_not_fused(self.style) for s in self.every())
        if self.style.after and any(s.taps(self.style) != Taps() and not s.looks_ahead for s in self.every()):
            return f"its convolutions look {self.style.after} frame(s) ahead, which only the plain walk does"
        return next((r for r in reasons if r), None)
