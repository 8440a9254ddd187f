"""Steps of a network, as data: what each does to sizes, how it runs eagerly and fused, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from .state import State
from .values import CAUSAL, Result, Size, Style, Sums, Taps, Work

if TYPE_CHECKING:
    from ..options import Options
    from ..precision.forms import Operands
    from ..runtime.context import ExecutionContext


class Mark(Enum):
    """A boundary between steps. TILES: blended tiles begin (decoder) or end here (encoder); steps on the latent's side
    see whole frames. STEP: the resolution changes; on the pixels' side a chunk's frames may run a few at a time."""

    TILES = "tiles"
    STEP = "step"


TILES, STEP = Mark.TILES, Mark.STEP


class Step:
    """One kind of step. Subclasses are frozen dataclasses; `name` is that of their parameters within the component, or,
    if it begins with "/", within the file."""

    name: str
    #: Ratio (out, in) of the frame rate, and of rows and columns.
    time: tuple[int, int] = (1, 1)
    space: tuple[int, int] = (1, 1)
    #: The result takes the place of the input. Else, if `below`, its memory is allocated before the input is made, and
    #: the input is freed as soon as the result is finished.
    in_place: bool = False
    below: bool = True
    #: The result may instead take the first channels of the input's memory, where no `out` is given.
    inside: bool = False
    #: Groups of the norm that reads the input first; 0: sums of the input are not used.
    groups: int = 0
    #: The result is part of a residual stream, which the fused operators want in whole rows of memory.
    stream: ClassVar[bool] = True
    #: The step holds back more frames than its convolutions need.
    late: bool = False
    #: The step is late, but no result depends on more frames than its taps say.
    bounded: ClassVar[bool] = False
    cycle: int = 1  #: Period, in latents, of the step's treatment of a latent; 1: all are treated alike.
    #: (Frames of a clip's start, period of frames after them) by whose number it treats a frame.
    beat: tuple[int, int] = (1, 1)
    #: The step must see a whole clip at once.
    whole: bool = False
    #: The step holds back all of a clip's frames until the last one.
    waits: bool = False
    #: Eager execution launches kernels of ours.
    launches: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False  #: The fused form works in a Program whose convolutions look ahead.
    #: Its products take 8-bit operands without calibration: each row has its own scale.
    scales: ClassVar[bool] = False
    #: The result of fused execution is fp32 whatever the type of activations.
    wide: ClassVar[bool] = False
    exact_input: ClassVar[bool] = False  #: Eager execution gives fp32 to it as a first step.
    plain_only: ClassVar[str | None] = None  #: Why only eager execution runs it, whatever the Program's style.

    def modules(self, style: Style) -> dict[str, nn.Module]:
        """Return the parameters, name within the component -> module; by default those of the inner steps."""
        return {name: module for step in self.inner() for name, module in step.modules(style).items()}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        """Execute the modules eagerly on [B, C, T, H, W]; `part` finds them by name."""
        return part(self.name)(x, state)

    def each(self, part: Callable[[str], nn.Module], x: Tensor, state: State) -> Iterator[Tensor]:
        """Yield the results of `plain`, in parts where one input may bring many."""
        yield self.plain(part, x, state)

    def memory(self, latents: int, height: int, width: int, itemsize: int, passes: int = 1,
               kernels: bool = True) -> int | None:  # fmt: skip
        """Return the most bytes of eager execution, with `kernels` of its own or without; None: a dry run finds it.
        passes: as of Steps."""
        return None

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Any:
        """Return the weights as `run` reads them."""
        raise NotImplementedError

    def run(self, packed: Any, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        """Return the result of x [D, H, W, C], in `out` where that is given, and its sums for a norm of `groups`.

        `first` is the clip's frame that x begins with. A step that is not `in_place` may still overwrite x.
        """
        raise NotImplementedError

    def why_not_fused(self, style: Style) -> str | None:
        """Return the reason why fused execution cannot run it in a Program of this style, or None."""
        return None

    def ahead(self, packed: Any) -> tuple[str, ...]:
        """Return the keys of its convolutions in time, in their order, at the input's rate."""
        return ()

    def size(self, size: Size, starts: bool) -> Size:
        """Return the size of the result. starts: the input begins the clip, so its first frame stays single."""
        frames, (out, of), (big, small) = size.frames, self.time, self.space
        if out > of:
            frames = frames * out - (out - 1) * starts
        elif of > out:
            frames = (frames + (of - 1) * starts) // of
        return Size(frames, size.height * big // small, size.width * big // small, self.channels(size.channels))

    def channels(self, channels: int) -> int:
        """Return the channels of the result."""
        for step in self.inner():
            channels = step.channels(channels)
        return channels

    def taps(self, style: Style) -> Taps:
        """Return the taps of all its convolutions together."""
        return Taps()

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        """Return the work for a whole clip of that size."""
        return Work()

    def eligible(self) -> tuple[tuple[str, int], ...]:
        """Return the convolutions that may take 8-bit operands: (name within the component, least of its channels)."""
        return ()

    def inner(self) -> tuple[Step, ...]:
        """Return the steps it consists of, if any."""
        return ()


def work_of(steps: tuple[Step, ...], size: Size, style: Style) -> Work:
    """Return the work of steps one after the other; size: of the first one's input."""
    total = Work()
    for step in steps:
        total += step.work(size, style)
        size = step.size(size, True)
    return total


class Resampling(Step):
    """A step to another resolution, and if `temporal` to another frame rate by the same factor."""

    temporal: bool

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return self.space if self.temporal else (1, 1)
