"""Destinations of the finished results of clips: frames of a decoder, moments of an encoder."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..network.program import Program
from ..system.memory import GIB, available_ram

#: The fewest results that a stream in blended tiles makes at once.
BLOCK = 16
#: Share of the free host memory for finished results of a stream that wait for their turn, and the bytes for them
#: where the free memory is unknown.
WAITING_SHARE, WAITING_BYTES = 0.25, 2 << 30


class Finished(NamedTuple):
    """Results [first, first + n) of a clip, in host memory."""

    clip: int
    first: int
    results: Tensor


class Results:
    """Destination of results of clips one by one, [N, H, W, C] each, in host memory.

    With tiles, weighted pieces are summed before they are clamped; uint8 then needs a float16 tensor to sum in (1/8 of
    an 8-bit step at worst). A sum is of a block of a clip's results, which is finished before the next one begins."""

    #: Results per block; 0 if the whole clip is one.
    block = 0

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, given: int, signed: bool = False) -> None:
        """Describe results of `shape` [H, W, C] and type `dtype`; those before number `given` are not wanted. signed:
        frames are in -1..1, not clamped."""
        self.shape, self.dtype, self.signed = shape, dtype, signed
        #: Results before this one cannot be made again.
        self.given = given
        self._sums: dict[tuple[int, int], Tensor] = {}

    def begin(self) -> None:
        """Discard all that was written and is not given."""
        self._sums.clear()

    @property
    def done(self) -> int:
        """Return, for one clip, the result after the last one that is finished."""
        raise NotImplementedError

    def room(self, clip: int, first: int, count: int) -> Tensor:
        """Return the memory [count, H, W, C] for results [first, first + count)."""
        raise NotImplementedError

    def spare(self, clip: int, number: int) -> bool:
        """Return whether a clip has this later result and nothing else has written it."""
        return False

    def land(self, clip: int, first: int, results: Tensor) -> None:
        """Note that results written to `room` are finished."""

    def ready(self) -> Iterator[Finished]:
        """Yield the finished results to hand on, each once."""
        return iter(())

    # -- tiles ----------------------------------------------------------------------------------------------------

    def open(self, clip: int, first: int, count: int) -> None:
        """Begin a block of tiles, or continue one that an earlier attempt has left."""
        if (clip, first) not in self._sums:
            self._sums[clip, first] = self._zeros(clip, first, count)

    def _zeros(self, clip: int, first: int, count: int) -> Tensor:
        kind = torch.float16 if self.dtype == torch.uint8 else self.dtype
        return torch.zeros(count, *self.shape, dtype=kind, device="cpu")

    def add(self, clip: int, block: int, first: int, top: int, left: int, pixels: Tensor, weight: Tensor) -> None:
        """Add a tile's pixels, weighted, to an open block.

        Args:
            clip: number of the clip.
            block: first result of the block.
            first: first frame of the pixels.
            top, left: pixel of the frame where the tile begins.
            pixels: float32 [f, h, w, 3] about 0..1, on any device; overwritten.
            weight: [h, w] on their device.
        """
        f, h, w, _ = pixels.shape
        sums = self._sums[clip, block]
        x = pixels.mul_(weight[..., None]).to(sums.dtype)
        sums[first - block : first - block + f, top : top + h, left : left + w] += x.cpu()

    def close(self, clip: int, first: int) -> None:
        """Finish a block to which all tiles have been added."""
        sums = self._sums.pop((clip, first))
        out = self.room(clip, first, len(sums))
        for frame, target in zip(sums, out, strict=True):
            frame.mul_(2.0).sub_(1.0) if self.signed else frame.clamp_(0.0, 1.0)
            target.copy_(frame.float().mul_(255.0).round_() if self.dtype == torch.uint8 else frame)
        self.land(clip, first, out)


class Whole(Results):
    """Results in one tensor out [B, N, H, W, C], which begins with result `first` of each clip."""

    def __init__(self, out: Tensor, first: int = 0, signed: bool = False) -> None:
        super().__init__(tuple(out.shape[2:]), out.dtype, first, signed)
        self.out, self._first = out, first

    def room(self, clip: int, first: int, count: int) -> Tensor:
        return self.out[clip, first - self._first : first - self._first + count]

    def spare(self, clip: int, number: int) -> bool:
        return number - self._first < self.out.shape[1]

    def _zeros(self, clip: int, first: int, count: int) -> Tensor:
        if self.dtype == torch.uint8:
            return super()._zeros(clip, first, count)
        return self.room(clip, first, count).zero_()


class Landed(Whole):
    """A part of one clip's results, in its place among all."""

    def __init__(self, out: Tensor, first: int, part: int, signed: bool = False) -> None:
        """Describe a part that begins with result `part`."""
        super().__init__(out, first, signed)
        self.given = self._done = part

    @property
    def done(self) -> int:
        return self._done

    def spare(self, clip: int, number: int) -> bool:
        return False  # behind its own are those of other parts

    def land(self, clip: int, first: int, results: Tensor) -> None:
        super().land(clip, first, results)
        self._done = first + len(results)


class HandedOn(Results):
    """Results of one clip in tensors of their own, which belong to the code that takes them."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, first: int, block: int, signed: bool = False
    ) -> None:
        super().__init__(shape, dtype, first, signed)
        self.block = block
        self._ready: deque[Finished] = deque()

    @property
    def done(self) -> int:
        return self.given

    def room(self, clip: int, first: int, count: int) -> Tensor:
        return torch.empty(count, *self.shape, dtype=self.dtype, device="cpu")

    def land(self, clip: int, first: int, results: Tensor) -> None:
        self._ready.append(Finished(clip, first, results))
        self.given = first + len(results)

    def ready(self) -> Iterator[Finished]:
        while self._ready:
            yield self._ready.popleft()


class Target:
    """Destination of all results of a call, one after the other."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, block: int = 0, room: int | None = None, beside: int = 0,
        signed: bool = False,
    ) -> None:  # fmt: skip
        """Describe results that are handed on to the caller as they are finished.

        Args:
            shape, dtype, block, signed: as in `Results`.
            room: bytes of results that may wait for their turn; None if none has to wait.
            beside: bytes of a result's input, if that waits with it.
        """
        self.shape, self.dtype, self.block, self.room, self.signed = shape, dtype, block, room, signed
        #: Bytes of one result that waits.
        self.nbytes = math.prod(shape) * dtype.itemsize + beside

    def whole(self, first: int) -> Results:
        """Return the Results from `first` on, of all clips."""
        return self.part(0, first)

    def part(self, clip: int, first: int) -> Results:
        """Return the Results of a clip from `first` on."""
        return self.handed(first)

    def handed(self, first: int) -> HandedOn:
        """Return the Results of a part that another process takes over."""
        return HandedOn(self.shape, self.dtype, first, self.block, self.signed)


class Kept(Target):
    """One tensor out [B, N, H, W, C], which begins with result `first` of each clip."""

    def __init__(self, out: Tensor, first: int, signed: bool = False) -> None:
        super().__init__(tuple(out.shape[2:]), out.dtype, signed=signed)
        self._out, self._first = out, first

    def whole(self, first: int) -> Results:
        return Whole(self._out, self._first, self.signed)

    def part(self, clip: int, first: int) -> Results:
        return Landed(self._out[clip : clip + 1], self._first, first, self.signed)


def waiting_room(ram_gb: float) -> int:
    """Return the bytes for finished results of a stream that wait for their turn; at most `ram_gb`, unless that is
    0."""
    free = available_ram()
    room = WAITING_BYTES if free is None else int(WAITING_SHARE * free)
    return min(room, int(ram_gb * GIB)) if ram_gb else room


def block_of(program: Program) -> int:
    """Return how many results a stream in blended tiles makes at once; 0: all, where each result depends on all.

    A block has no fewer results than each of them depends on, so that computing those dependencies alone does not take
    longer than the results."""
    reach = sum(program.reach)
    return 0 if math.isinf(reach) else max(math.ceil(reach * program.rate), BLOCK)
