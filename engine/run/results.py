"""Where the finished results of clips go: frames of a decoder, moments of an encoder."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Finished(NamedTuple):
    """Results [first, first + n) of a clip, in host memory."""

    clip: int
    first: int
    results: Tensor


class Results:
    """Of clips one by one, [N, H, W, C] each, in host memory.

    With tiles, weighted pieces are summed before they are clamped; uint8 then needs a float16 tensor to sum in (1/8 of
    an 8-bit step at worst). Sums are of a block of a clip's results, which is finished before the next one begins.
    """

    #: Of a block, where the clip is not one.
    block = 0

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, given: int) -> None:
        """shape: of one result, [H, W, C]. given: results in front of this one are not asked for."""
        self.shape, self.dtype = shape, dtype
        #: What lies in front of it cannot be made again.
        self.given = given
        self._sums: dict[tuple[int, int], Tensor] = {}

    def begin(self) -> None:
        """Whatever was written and not given counts no more."""
        self._sums.clear()

    @property
    def done(self) -> int:
        """Of one clip, the result behind the last one that is finished."""
        raise NotImplementedError

    def room(self, clip: int, first: int, count: int) -> Tensor:
        """What results [first, first + count) are written to, [count, H, W, C]."""
        raise NotImplementedError

    def land(self, clip: int, first: int, results: Tensor) -> None:
        """What was written to `room` is finished."""

    def ready(self) -> Iterator[Finished]:
        """What has landed and is to be handed on; each once."""
        return iter(())

    # -- tiles ----------------------------------------------------------------------------------------------------

    def open(self, clip: int, first: int, count: int) -> None:
        """A block that tiles are added to from now on; one that an attempt before has left goes on."""
        if (clip, first) not in self._sums:
            self._sums[clip, first] = self._zeros(clip, first, count)

    def _zeros(self, clip: int, first: int, count: int) -> Tensor:
        kind = torch.float16 if self.dtype == torch.uint8 else self.dtype
        return torch.zeros(count, *self.shape, dtype=kind)

    def add(self, clip: int, block: int, first: int, top: int, left: int, pixels: Tensor, weight: Tensor) -> None:
        """A tile's float32 pixels [f, h, w, 3] about 0..1 at frame `first` of the clip and pixel (top, left), times
        `weight` [h, w] on their device; overwrites `pixels`. block: the first result of an open block."""
        f, h, w, _ = pixels.shape
        sums = self._sums[clip, block]
        x = pixels.mul_(weight[..., None]).to(sums.dtype)
        sums[first - block : first - block + f, top : top + h, left : left + w] += x.cpu()

    def close(self, clip: int, first: int) -> None:
        """All tiles of a block are added."""
        sums = self._sums.pop((clip, first))
        out = self.room(clip, first, len(sums))
        for frame, target in zip(sums, out, strict=True):
            frame.clamp_(0.0, 1.0)
            target.copy_(frame.float().mul_(255.0).round_() if self.dtype == torch.uint8 else frame)
        self.land(clip, first, out)


class Whole(Results):
    """In one tensor out [B, N, H, W, C], of which result `first` of a clip is the first."""

    def __init__(self, out: Tensor, first: int = 0) -> None:
        super().__init__(tuple(out.shape[2:]), out.dtype, first)
        self.out, self._first = out, first

    def room(self, clip: int, first: int, count: int) -> Tensor:
        return self.out[clip, first - self._first : first - self._first + count]

    def _zeros(self, clip: int, first: int, count: int) -> Tensor:
        if self.dtype == torch.uint8:
            return super()._zeros(clip, first, count)
        return self.room(clip, first, count).zero_()


class Landed(Whole):
    """A part of one clip's results, in its place among all."""

    def __init__(self, out: Tensor, first: int, part: int) -> None:
        """part: the part's first result."""
        super().__init__(out, first)
        self.given = self._done = part

    @property
    def done(self) -> int:
        return self._done

    def land(self, clip: int, first: int, results: Tensor) -> None:
        super().land(clip, first, results)
        self._done = first + len(results)


class HandedOn(Results):
    """In tensors of their own, which belong to whoever takes them. For one clip."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, first: int, block: int) -> None:
        super().__init__(shape, dtype, first)
        self.block = block
        self._ready: deque[Finished] = deque()

    @property
    def done(self) -> int:
        return self.given

    def room(self, clip: int, first: int, count: int) -> Tensor:
        return torch.empty(count, *self.shape, dtype=self.dtype)

    def land(self, clip: int, first: int, results: Tensor) -> None:
        self._ready.append(Finished(clip, first, results))
        self.given = first + len(results)

    def ready(self) -> Iterator[Finished]:
        while self._ready:
            yield self._ready.popleft()


class Target:
    """Where the results of a call go, one after the other."""

    #: Bytes of results that may wait for their turn; None: they need not.
    room: int | None = None

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, block: int = 0) -> None:
        """shape, block: as of Results."""
        self.shape, self.dtype, self.block = shape, dtype, block

    @property
    def nbytes(self) -> int:
        """Of one result."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self, first: int) -> Results:
        """For results from `first` on, of all clips."""
        return self.part(0, first)

    def part(self, clip: int, first: int) -> Results:
        """For results of a clip from `first` on."""
        return self.handed(first)

    def handed(self, first: int) -> HandedOn:
        """For a part that another process takes over."""
        return HandedOn(self.shape, self.dtype, first, self.block)


class Stream(Target):
    """Whoever takes them, as they are finished."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, block: int, room: int, beside: int = 0
    ) -> None:
        """beside: bytes of what a result is made of, where that waits with it."""
        super().__init__(shape, dtype, block)
        self.room, self._beside = room, beside

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._beside


class Kept(Target):
    """One tensor out [B, N, H, W, C], which begins with result `first` of each clip."""

    def __init__(self, out: Tensor, first: int) -> None:
        super().__init__(tuple(out.shape[2:]), out.dtype)
        self._out, self._first = out, first

    def whole(self, first: int) -> Results:
        return Whole(self._out, self._first)

    def part(self, clip: int, first: int) -> Results:
        return Landed(self._out[clip : clip + 1], self._first, first)
