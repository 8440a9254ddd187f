"""A network described as data: steps in their order, and where finer steps in time and tiles begin."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor

from ..runtime.pixels import to_unit
from .step import STEP, TILES, Mark, Resampling, Step, work_of
from .steps import Steps, frame_at, frames_of, latent_of
from .values import CAUSAL, Size, Style, Taps, Work

__all__ = ["STEP", "TILES", "Mark", "Program", "Resampling", "Step"]


@dataclass(frozen=True)
class Program:
    """An encoder or decoder. `half` is its name in the file, a prefix to the names of its steps. Properties in time are
    cached, because every call asks for them several times a chunk."""

    half: Literal["encoder", "decoder"]
    items: tuple[Step | Mark, ...]
    #: Channels of the input: of a latent, or of a picture.
    takes: int
    style: Style = CAUSAL
    #: Results that the norms take together, if that is part of the model: frames of a decoder, counted from the clip's
    #: start, after steps up to the last change of the frame rate that see the whole clip; latents of an encoder,
    #: counted from the clip's end, so that its first piece may be shorter. 0: any number.
    piece: int = 0
    #: The package of `engine/families` that plans and runs it in a way of its own (`registry.own`); "": the core does.
    component: str = ""

    @classmethod
    def of(
        cls, half: Literal["encoder", "decoder"], takes: int, *items: Step | Mark, piece: int = 0, component: str = "",
        **style: Any,
    ) -> Program:  # fmt: skip
        """Return a Program; `style` has the fields of Style that differ from the default."""
        return cls(half, items, takes, Style(**style), piece, component)

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(i for i in self.items if isinstance(i, Step))

    def every(self) -> Iterator[Step]:
        """Yield all steps, each followed by its inner steps."""
        waiting = list(self.steps)
        while waiting:
            step = waiting.pop(0)
            yield step
            waiting[:0] = step.inner()

    def parts(self) -> tuple[tuple[Step, ...], ...]:
        """Return (steps that see whole frames, that change the frame rate, that take single frames), in their order."""
        steps, tiles = self.steps, self.before(TILES)
        if self.half == "decoder":
            last = max((i for i, s in enumerate(steps, 1) if s.time != (1, 1)), default=tiles)
            return steps[:tiles], steps[tiles : max(last, tiles)], steps[max(last, tiles) :]
        first = self.before(STEP)
        return steps[:first], steps[first:tiles], steps[tiles:]

    def stages(self) -> list[tuple[Step, ...]]:
        """Return the steps between marks. A decoder's first stage lies before TILES; if an encoder gathers, its last
        lies after."""
        out: list[list[Step]] = [[]]
        for item in self.items:
            if isinstance(item, Step):
                out[-1].append(item)
            elif item is STEP or self.half == "decoder" or self.gathers:
                out.append([])
        return [tuple(s) for s in out]

    def before(self, mark: Mark) -> int:
        """Count the steps before the first such mark."""
        return sum(isinstance(i, Step) for i in self.items[: self.items.index(mark)])

    def frames(self, count: int) -> int:
        """Return the frames or latents that a whole clip of `count` becomes."""
        size = Size(count, 1 << 16, 1 << 16, self.takes)
        for step in self.steps:
            size = step.size(size, True)
        return size.frames

    @property
    def scales(self) -> bool:
        """Return whether a step has products that scale 8-bit operands at run time."""
        return any(s.scales for s in self.every())

    @functools.cached_property
    def late(self) -> bool:
        """Return whether frames come out after later ones have gone in, and the last ones when the clip ends."""
        return bool(self.style.after) or any(s.late for s in self.every())

    @functools.cached_property
    def chunk(self) -> tuple[int, int] | None:
        """Return the latents that norms take together, in a clip's first chunk and in each later one; None: any number.
        A network that waits for a clip's end takes all of them."""
        if self.waits:
            return sys.maxsize, sys.maxsize
        for step, rate in zip(self.steps, self.rates, strict=False):
            together = getattr(getattr(step, "norm", None), "chunk", None)
            if isinstance(together, tuple):
                return (together[0] - 1) // rate + 1, together[1] // rate
        return None

    @functools.cached_property
    def gathers(self) -> bool:
        """Return whether the steps that see whole frames also see the whole clip at once."""
        return any(s.whole for s in self.steps)

    @functools.cached_property
    def waits(self) -> bool:
        """Return whether no result comes out before the clip ends."""
        return any(s.waits for s in self.every())

    @property
    def unstreamed(self) -> bool:
        """Return whether results need the whole clip, so that memory depends on its length."""
        return self.gathers or self.waits or self.piece > 0

    def fixed(self, latents: int) -> Steps | None:
        """Return the steps that a clip of so many latents must take; None: any. Only `piece` binds eager execution."""
        if self.piece and self.half == "decoder":
            return Steps(latents, self.piece, pieces=True)
        chunk = (latents % self.piece, self.piece) if self.piece else self.chunk
        if chunk is None:
            return None
        together = min(chunk[1], latents)
        return Steps(together, max(self.rates[0], self.rates[-1]) * together, chunk[0] if chunk[0] < together else 0)

    def spans(self, count: int) -> list[tuple[int, int]]:
        """Return (first, end) of the frames of an encoder's pieces, which together are all `count` frames."""
        latents = -(-count // self.rates[0])
        return [(frame_at(a, latents, count, self.rates[0]), frame_at(b, latents, count, self.rates[0]))
                for a, b in self.fixed(latents).spans(latents)]  # fmt: skip

    def encoded(self, frames: int) -> int:
        """Return the latents that an encoder makes of a clip's frames; trailing ones that fill none are not read."""
        return (frames - 1) // self.rates[0] + 1

    def cut(self, read: Callable[[int, int], Tensor], first: int, end: int, origin: int, count: int | None) -> Tensor:
        """Return the frames that an encoder makes latents [first, end) of.

        Args:
            read: read(a, b) returns frames [a, b) of the clip, up to its end.
            origin: the latent that stands for one frame.
            count: frames of the clip; None: not known yet.
        """
        if self.piece:
            return read(*(frame_at(n, self.encoded(count), count, self.rates[0]) for n in (first, end)))
        rate = self.rates[0]
        return read(rate * first if first == origin else frames_of(first, rate), frames_of(end, rate))

    def warm_up(self, result: int, first: int) -> int:
        """Return the latents that a decoder sees from `first` on before that of a result."""
        return latent_of(result, self.rates[-1]) - first

    def in_units(self, frames: Tensor, signed: bool = False) -> Tensor:
        """Return frames in 0..1, or bytes (signed: in -1..1), as float32 in an encoder's units."""
        return frames if signed else to_unit(frames)

    def alone(self, latents: int) -> tuple[int, int] | None:
        """Return (results of each, number) of the sections that a clip of so many latents is made in, each by itself
        and of one cost; None: it is not made in such."""
        return None

    def whole(self, x: Tensor) -> Tensor:
        """Return the frames of a clip [B, C, T, H, W] that fill whole latents: trailing ones are not read."""
        return x[:, :, : (x.shape[2] - 1) // self.rates[0] * self.rates[0] + 1]

    @functools.cached_property
    def rates(self) -> tuple[int, ...]:
        """Return the frames per latent that enter each step, and at the end those that come out."""
        first = math.prod(s.time[1] for s in self.steps)
        return tuple(accumulate(self.steps, lambda rate, s: rate * s.time[0] // s.time[1], initial=first))

    @property
    def scale(self) -> int:
        """Return the rows that enter the first step for each row of the latent."""
        return math.prod(s.space[1] for s in self.steps)

    @functools.cached_property
    def rate(self) -> Fraction:
        """Return the ratio of results to inputs in time."""
        return math.prod((Fraction(*s.time) for s in self.steps), start=Fraction(1))

    @functools.cached_property
    def reach(self) -> tuple[Fraction | float, Fraction | float]:
        """Return how many frames before and after its own a result may depend on, at the input's rate; inf: all."""
        # Most late steps count their groups of frames from the clip's start.
        if self.piece or any(s.late and not s.bounded for s in self.every()):
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
        """Return whether each chunk's results come out with it, so that steps may begin at different latents."""
        return not (self.late or self.waits or self.gathers or self.style.single or self.piece)

    def begins(self, first: int) -> tuple[int, ...]:
        """Return for each step the first latent that it must see, so that results from `first` on have the bits of the
        whole clip. The numbers never fall, and are multiples of `cycle`.

        If not `staged`, all steps begin with the same latent. It then counts as a clip's first one, which stands for
        one frame: the last of its own.
        """
        every = self.cycle
        if not self.staged:
            before, _ = self.reach
            at = (first - 1) / self.rate + 1 - before if self.rate >= 1 else first - 1 + (1 - before) * self.rate
            one = 0 if math.inf == before or self.waits else max(0, math.floor(at)) // every * every
            return (one,) * len(self.steps)
        need, out = first, []
        for (made, of), before, rate in self._needs:
            own = -(-need // made) * of - (of - 1)  # the first frame that the needed one reads
            need = max(0, own - before)
            out.append(-(-need // rate) // every * every)
        return tuple(reversed(out))

    @functools.cached_property
    def cycle(self) -> int:
        """Return the number of latents at whose multiples steps may begin."""
        return math.lcm(*(s.cycle for s in self.every()))

    @functools.cached_property
    def _needs(self) -> tuple[tuple[tuple[int, int], int, int], ...]:
        """Return for each step, from last to first: `time`, the earlier frames that it reads, frames per latent."""
        both = zip(self.steps, self.rates, strict=False)
        return tuple((step.time, step.taps(self.style).before, rate) for step, rate in both)[::-1]

    def window(self, first: int, end: int, latents: int) -> tuple[int, int]:
        """Return the latents [a, b) of a clip of `latents` that are enough for its results [first, end)."""
        _, after = self.reach
        if after == math.inf:
            return 0, latents
        last = (end - 1) / self.rate + after if self.rate >= 1 else end - 1 + after * self.rate
        return min(self.begins(first)[0], latents - 1), min(math.ceil(last) + 1, latents)

    def widths(self) -> set[int]:
        """Return the channels of every residual stream."""
        size, found = Size(1, 1 << 16, 1 << 16, self.takes), set()
        for step in self.every():
            if step.inner():
                continue
            size = size._replace(channels=step.channels(size.channels))
            if step.stream:
                found.add(size.channels)
        return found

    def work(self, frames: int, height: int, width: int) -> Work:
        """Return the work of a whole clip."""
        return work_of(self.steps, Size(frames, height, width, self.takes), self.style)

    def eligible(self, least: int) -> list[str]:
        """Return the keys of the convolutions that may take 8-bit operands, with at least `least` channels."""
        return [f"{self.half}.{name}" for step in self.every() for name, size in step.eligible() if size >= least]

    @functools.cached_property
    def launches(self) -> bool:
        """Return True if eager execution launches kernels of ours."""
        return any(step.launches for step in self.steps)

    def why_not_fused(self) -> str | None:
        """Return the reason why fused execution cannot run it, or None."""
        reasons = (s.plain_only or s.why_not_fused(self.style) for s in self.every())
        if self.style.after and any(s.taps(self.style) != Taps() and not s.looks_ahead for s in self.every()):
            return "its convolutions look at later frames, which only plain torch does"
        return next((r for r in reasons if r), None)
