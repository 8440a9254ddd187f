"""Clips on disk as frames: video through PyAV, images through Pillow.

Pixels are RGB [F, H, W, 3], float 0..1 or uint8 0..255.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from ... import log
from ...errors import InputError
from .animations import Animation, animated
from .pictures import SUFFIXES, is_picture, read_picture
from .streams import ENOUGH, HEAD, Decoded, Pace, announced, chosen, is_text, readable, surprises, usual
from .to_rgb import ToRgb, UnreadColours

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

Frames = torch.Tensor | Iterable[torch.Tensor]
DEFAULT_FPS = Fraction(24)  # for image folders and for latents that carry no rate


class Clip:
    """A video file (or an open one), a folder of images in natural order, or one image: frames in RGB, upright, one
    after the other; none are kept.

    fps: `DEFAULT_FPS` for images. For a video whose time stamps contradict the file's rate, the rate of the time
    stamps, once they are read. count: frames that the file announces; None: unknown.
    """

    def __init__(self, source: str | Path | BinaryIO, colours: int = 3) -> None:
        """Open the source.

        Args:
            source: its path, or an open file.
            colours: channels of a pixel: 3, or 4 for RGB and alpha, which is opaque if the source has none.

        Raises:
            InputError: there is nothing to read; later, while frames are read: a file is cut off or images differ in
                size.
        """
        self._source = Path(source) if isinstance(source, (str, Path)) else source
        self.name = str(source) if isinstance(source, (str, Path)) else "the video"
        self.fps, self.count, self.colours = DEFAULT_FPS, None, colours
        self._images: list[Path] | None = None
        self._animation: Animation | None = None
        if isinstance(self._source, Path):
            if self._source.is_dir():
                self._images = _images_in(self._source)
            elif not self._source.exists():
                raise InputError(f"{source}: no such file or folder")
            elif not self._source.is_file():  # a source is opened more than once
                raise InputError(f"{source}: is a pipe or a device; write it to a file first")
            else:
                with readable(self.name):
                    seconds = animated(self._source)
                if seconds:
                    self._animation = Animation(self._source, seconds)
                elif is_picture(self._source):
                    self._images = [self._source]
        if self._images is not None:
            self.count = len(self._images)
        elif self._animation is not None:
            self.count, self.fps = self._animation.count, usual(self._animation.fps)
        else:
            with self._open() as (_, stream):
                self.fps = Fraction(stream.average_rate or stream.guessed_rate or DEFAULT_FPS)
                self.count = announced(stream, self.fps)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield frames [H, W, colours]: uint8, or float32 in 0..1 if the source has more than 8 bits per channel."""
        for pixels in self.integers():
            own = pixels.dtype == np.uint8
            yield torch.from_numpy(np.require(pixels, requirements="W")) if own else _floats(pixels)

    def integers(self) -> Iterator[np.ndarray]:
        """Yield frames [H, W, colours], uint8 or uint16."""
        if self._animation is not None:
            return self._from_animation(self._animation)
        return self._from_video() if self._images is None else self._from_images(self._images)

    def _from_animation(self, animation: Animation) -> Iterator[np.ndarray]:
        if animation.varies:
            log.once(f"{self.name}: {self._varies()}")
        tell = Kinds()
        yield from animation.frames(self.colours, lambda line: tell(line, f"{self.name}: "))

    def _varies(self) -> str:
        return (f"its frame rate varies; every frame is taken as it comes, {float(self.fps):g} a second: sound may run "
                "ahead of the picture or behind it")  # fmt: skip

    def _from_images(self, files: list[Path]) -> Iterator[np.ndarray]:
        first, tell = None, Kinds()
        for file in files:
            pixels = read_picture(file, self.colours, lambda line, file=file: tell(line, f"{file}: "))
            first = (pixels.shape, pixels.itemsize) if first is None else first
            if pixels.shape != first[0]:
                size, expected = (f"{p[1]}x{p[0]}" for p in (pixels.shape, first[0]))
                raise InputError(
                    f"{self.name}: {file.name} is {size} but {files[0].name} is {expected}; make them one size"
                )
            if pixels.itemsize != first[1]:
                bits, expected = (8 * size for size in (pixels.itemsize, first[1]))
                raise InputError(f"{self.name}: {file.name} has {bits} bits per channel but {files[0].name} has "
                                 f"{expected}; convert them to one depth")  # fmt: skip
            yield pixels

    def _from_video(self) -> Iterator[np.ndarray]:
        import av

        read, pace, short, tell = 0, Pace(), None, Kinds()
        try:
            with self._open() as (container, stream):
                stream.thread_type = "AUTO"
                decoded, to_rgb = Decoded(container, stream), None
                for frame in decoded:
                    if to_rgb is None:
                        to_rgb = ToRgb(frame, stream, self.colours)
                        for line in surprises(container, stream, frame, self.colours):
                            log.once(f"{self.name}: {line}")
                    pixels = to_rgb(frame)
                    read += 1
                    for line in (decoded.trouble, to_rgb.trouble):
                        if line:
                            tell(line, f"{self.name}: frame {read - 1} ")
                    # An AVI has one rate and stores frames in decoding order, which is not the order of display.
                    if container.format.name != "avi" and pace.breaks(frame):
                        log.warn(f"{self.name}: {self._varies()}")
                    if read == ENOUGH:
                        self._believe(pace)
                    yield pixels
                short = pace.short_of(stream, self.fps)
        except av.FFmpegError as error:
            where = f" after {read} frames" if read else ""
            raise InputError(f"{self.name}: cannot be read as a video{where} ({error.strerror})") from error
        except UnreadColours as error:
            raise InputError(f"{self.name}: {error}") from None
        if not read and decoded.lost:
            raise InputError(f"{self.name}: cannot be read as a video (none of its {decoded.lost} pieces can be "
                             "decoded)")  # fmt: skip
        if not read:
            raise InputError(f"{self.name}: the video holds no frames")
        if read < ENOUGH:
            self._believe(pace)
        if decoded.lost:
            log.warn(f"{self.name}: {decoded.lost} of its pieces cannot be decoded; their frames are missing")
        if (self.count or 0) > read:
            log.warn(f"{self.name}: announces {self.count} frames, {read} could be read")
        elif short:
            log.warn(f"{self.name}: announces {short}; it may be cut off")

    def _believe(self, pace: Pace) -> None:
        """Use the rate of the time stamps if it differs from the file's own."""
        found = pace.other_than(self.fps)
        if found is not None:
            log.once(f"{self.name}: says that it has {float(self.fps):g} frames a second, its time stamps that it has "
                     f"{float(found):g}; the time stamps are believed, as players do")  # fmt: skip
            self.fps = found

    @contextmanager
    def _open(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        import av

        if isinstance(self._source, Path):
            with readable(self.name), open(self._source, "rb") as file:
                head = file.read(HEAD)
        else:
            self._source.seek(0)
            head = self._source.read(HEAD)
            self._source.seek(0)
        if is_text(head):
            raise InputError(f"{self.name}: cannot be read as a video or an image: it is a text")
        try:
            # An absolute path: ffmpeg takes the part before a colon for a protocol.
            source = os.path.abspath(self._source) if isinstance(self._source, Path) else self._source
            with av.open(source) as container:
                yield container, chosen(container, self.name)
        except av.FFmpegError as error:
            raise InputError(f"{self.name}: cannot be read as a video ({error.strerror})") from error


class Kinds:
    """Logs a line for each kind of event in a clip: the first of those that differ in numbers alone, whatever the
    number of frames."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, line: str, before: str = "") -> None:
        """before: the beginning of the line, which names the file or the frame."""
        kind = re.sub(r"\d+", "", line)
        if kind not in self._said:
            self._said.add(kind)
            log.once(before + line)


def read_video(path: str | Path, max_frames: int | None = None) -> tuple[torch.Tensor, Fraction]:
    """Return the frames of a video, a folder of images or one image, and the frame rate.

    The result is the peak of memory: the clip waits as the integers that it was decoded to, which are freed while the
    result is filled.

    Args:
        path: of the file or folder.
        max_frames: read no more than the first so many frames.

    Returns:
        float32 [F, H, W, 3] in 0..1, and frames per second (24 for images).

    Raises:
        InputError: nothing can be read there, or max_frames is below 1.
    """
    if max_frames is not None and max_frames < 1:
        raise InputError(f"max_frames is {max_frames}; it must be at least 1")
    clip = Clip(path)
    waiting: list[np.ndarray | None] = list(islice(clip.integers(), max_frames))
    # The pages of an empty tensor are allocated as they are written, while the integer frames free theirs.
    frames = torch.empty((len(waiting), *waiting[0].shape), dtype=torch.float32, device="cpu")
    for index, pixels in enumerate(waiting):
        _fill(frames[index], pixels)
        waiting[index] = pixels = None
    return frames, clip.fps


def iter_frames(path: str | Path) -> Iterator[torch.Tensor]:
    """Yield the frames of a Clip, one at a time: float32 [H, W, 3] in 0..1."""
    return map(_floats, Clip(path).integers())


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which frame2 comes before frame10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name.lower())
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts]


def _images_in(folder: Path) -> list[Path]:
    files = [f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")]
    if not files:
        raise InputError(f"{folder}: no images in this folder (looked for {', '.join(sorted(SUFFIXES))})")
    files.sort(key=lambda f: natural_key(f.name))
    _check_numbers(folder, files)
    return files


def _check_numbers(folder: Path, files: list[Path]) -> None:
    """Log a line if the numbers in the names do not continue as elsewhere: a frame is missing, or there twice."""
    numbers = [int((re.findall(r"[0-9]+", f.stem) or ["0"])[-1]) for f in files]
    steps = [after - before for before, after in pairwise(numbers)]
    for place, step in enumerate(steps):
        if step != median_low(steps):
            log.once(f"{folder}: {files[place].name} is followed by {files[place + 1].name}; its images are taken one "
                     "after the other, so check that none is missing or there twice")  # fmt: skip
            return


def _fill(target: torch.Tensor, pixels: np.ndarray) -> None:
    """Write integer pixels into a float view as 0..1."""
    np.divide(pixels, np.float32(np.iinfo(pixels.dtype).max), out=target.numpy(), casting="unsafe")


def _floats(pixels: np.ndarray) -> torch.Tensor:
    frame = torch.empty(pixels.shape, dtype=torch.float32, device="cpu")
    _fill(frame, pixels)
    return frame
