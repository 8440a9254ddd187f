"""Input frames of an encode: those of a tensor, or of a stream as it comes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..errors import InputError
from ..request import FramesLike, as_frames, check_video, iter_frames


def unsigned(frames: Tensor, signed: bool) -> Tensor:
    """Return frames in 0..1; signed: they are in -1..1."""
    return frames.float().mul(0.5).add_(0.5) if signed else frames


class TensorVideo:
    """Frames of a checked tensor [B, F, H, W, 3]."""

    def __init__(self, video: Tensor, still: bool = False, signed: bool = False) -> None:
        """still: pictures, which are frames of one clip. signed: values are in -1..1."""
        #: Clips, frames, height and width, as they were given.
        self.size = tuple(video.shape[:4])
        self._still, self._signed = still, signed
        self._video = video.flatten(0, 1)[None] if still else video
        self.batch, self.count, self.height, self.width, _ = self._video.shape

    @property
    def all(self) -> Tensor:
        """Return the frames of every clip."""
        return self._video

    def of(self, clips: slice) -> TensorVideo:
        """Return some of the clips."""
        if self._still:  # pictures are frames of one clip
            return self
        return TensorVideo(self._video[clips], signed=self._signed)

    def frames(self, clip: int, first: int, end: int) -> Tensor:
        """Return frames [first, end) of a clip, [n, H, W, C] in 0..1."""
        return unsigned(self._video[clip, first:end], self._signed)

    def sample(self) -> Tensor:
        """Return the frames that calibration takes samples from, [F, H, W, 3] in 0..1."""
        return unsigned(self._video[0], self._signed)

    def fill(self, end: int) -> None:
        """Do nothing: all frames are there."""

    def drop(self, first: int) -> None:
        """Do nothing: no frame is released."""


class Lasting:
    """Frames whose maker never writes to them again, so that a stream need not copy them."""

    def __init__(self, frames: Iterable[Tensor]) -> None:
        self._frames = frames

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._frames)


class StreamVideo:
    """One clip's frames as an iterator gives them: [H, W, C] or [f, H, W, C] each, all of one size and type, in any
    form that `request.as_frames` takes.

    They are copied when they are taken, unless they are Lasting: many readers fill one buffer again and again. `fill`
    takes frames from the iterator, `drop` releases them; `frames` may be called by any thread.
    """

    batch = 1

    def __init__(
        self, frames: Iterable[FramesLike], spatial: int, count: int | None = None, colours: int = 3,
        any_range: bool = False, signed: bool = False,
    ) -> None:  # fmt: skip
        """count: of all frames, where it is known. colours: C. signed: values are in -1..1 and beyond. Raises
        InputError as `check_video` does, now or when later frames come."""
        self._coming: Iterator[FramesLike] | None = iter_frames(frames)
        self._copies = not isinstance(frames, Lasting)
        self._spatial, self._colours, self._any_range = spatial, colours, any_range
        self._signed = signed
        self._pieces: deque[Tensor] = deque()
        self._changing = threading.Lock()
        #: The number of the first piece's first frame, and the number after the last piece's last frame.
        self._first = self._end = 0
        self.count = count
        self.fill(1)
        if not self._end:
            raise InputError("the stream of frames is empty")
        self.height, self.width = self._pieces[0].shape[1:3]

    @property
    def size(self) -> tuple[int, int, int, int]:
        return 1, self.count or 0, self.height, self.width

    def of(self, clips: slice) -> StreamVideo | SharedVideo:
        """Return the stream for one device alone, or for one of several."""
        return self if clips == slice(None) else SharedVideo(self)

    def has(self, end: int) -> bool:
        """Return True if the frames before number `end`, or all there are, have been taken."""
        return self._end >= end or self._coming is None or self._end == self.count

    def fill(self, end: int) -> None:
        """Take the frames before number `end`, or all there are, from the iterator."""
        while self._end < end and self._coming is not None:
            piece = next(self._coming, None)
            if piece is None:
                self._finish()
                return
            piece = self._checked(piece)
            piece = piece.clone() if self._copies else piece
            with self._changing:
                self._pieces.append(piece)
                self._end += len(piece)

    def end(self) -> None:
        """Check, after the last result, that no more frames come than were announced; raises InputError otherwise."""
        if self.count is not None:
            self.fill(self.count + 1)
            if self._end > self.count:
                raise InputError(f"the stream of frames goes on behind the {self.count} that were announced")

    def _finish(self) -> None:
        self._coming = None
        if self.count is not None and self._end < self.count:
            raise InputError(f"the stream of frames ends after {self._end}, and {self.count} were announced")
        self.count = self._end

    def _checked(self, given: FramesLike) -> Tensor:
        try:
            given = as_frames(given, self._colours, "what it gives")
            piece = check_video(given, self._spatial, False, self._colours, self._any_range, self._signed)
            if piece.shape[0] != 1:
                raise InputError(f"a stream is of one clip, and this is of {piece.shape[0]}")
        except InputError as error:
            raise InputError(f"frame {self._end} of the stream: {error}") from None
        piece = unsigned(piece[0], self._signed)
        if self._pieces and (piece.shape[1:], piece.dtype) != (self._pieces[0].shape[1:], self._pieces[0].dtype):
            now, before = (f"{p.shape[2]}x{p.shape[1]} in {p.dtype}" for p in (piece, self._pieces[0]))
            raise InputError(f"frame {self._end} of the stream is {now}, those before are {before}: give one kind")
        return piece

    def drop(self, first: int) -> None:
        """Release the frames before number `first`."""
        with self._changing:
            while len(self._pieces) > 1 and self._first + len(self._pieces[0]) <= first:
                self._first += len(self._pieces.popleft())

    def frames(self, clip: int, first: int, end: int) -> Tensor:
        """Return frames [first, end) that have been taken and not released, [n, H, W, C]."""
        with self._changing:
            parts, at, pieces = [], self._first, list(self._pieces)
        for piece in pieces:
            part = piece[max(first - at, 0) : max(end - at, 0)]
            if len(part):
                parts.append(part)
            at += len(piece)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def sample(self) -> Tensor:
        """Return the frames that calibration takes samples from: those taken so far and not released."""
        return torch.cat(list(self._pieces))


class SharedVideo:
    """Frames of a stream that several devices read; its owner takes and releases them."""

    batch = 1

    def __init__(self, video: StreamVideo) -> None:
        self.size, self.count, self.height, self.width = video.size, video.count, video.height, video.width
        self.frames, self.sample = video.frames, video.sample

    def fill(self, end: int) -> None:
        """Do nothing: the frames are there."""

    def drop(self, first: int) -> None:
        """Do nothing: no frame is released."""


#: Frames of clips of one size.
Video = TensorVideo | StreamVideo | SharedVideo
