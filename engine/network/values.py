"""Values that describe steps: the size of data, work, frames that are read, and the style of convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.conv3d import Partials

Head = Literal["replicate", "zero"]
Border = Literal["zero", "replicate", "reflect"]
#: Sums of a tensor for the norm that reads it, where there is such a norm; result of a step in fused execution.
Sums: TypeAlias = "Partials | None"
Result: TypeAlias = "tuple[Tensor, Sums]"


class Size(NamedTuple):
    """Frames, rows, columns and channels of a step's input or output."""

    frames: int
    height: int
    width: int
    channels: int


class Work(NamedTuple):
    """Work of a step: FLOP as written, FLOP in composed form, and the values its convolutions then read and write."""

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
    """Properties of all convolutions of a Program. head: the frames before a clip, its first frame or zeros. border:
    the padding around a frame. after: frames that a convolution with kernel_t = 3 looks ahead; the clip is followed by
    copies of its last frame, or zeros if `head` is zero. taps: kernel_t of 3x3 convolutions; 1: frames are independent,
    and any number of pictures make a clip. single: eager execution takes one frame at a time, so that no bit depends on
    their number. forgets: a convolution whose first call of a clip has a single frame keeps no history of it; the next
    call begins anew. direct: why convolutions have no Winograd form, whatever the card ("": they may have it)."""

    head: Head = "replicate"
    border: Border = "zero"
    after: int = 0
    taps: Literal[1, 3] = 3
    single: bool = False
    forgets: bool = False
    direct: str = ""

    @property
    def still(self) -> bool:
        """Return whether every frame is a separate picture."""
        return self.taps == 1

    @property
    def least(self) -> int:
        """Return the least rows, and columns, of a frame: a reflecting border repeats the pixel next to the edge."""
        return 2 if self.border == "reflect" else 1


CAUSAL = Style()
