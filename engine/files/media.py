"""Clips on disk as frames: video through PyAV, images through Pillow.

Pixels are RGB [F, H, W, 3], float 0..1 or uint8 0..255.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from .. import log
from ..errors import InputError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.reformatter import VideoReformatter
    from av.video.stream import VideoStream

Frames = torch.Tensor | Iterable[torch.Tensor]
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
DEFAULT_FPS = Fraction(24)  # for image folders and for latents that carry no rate

# swscale: bicubic | full_chroma_int | full_chroma_inp | accurate_rnd. A photograph through RGB -> yuv420p -> RGB keeps
# 44.1 dB with these and 40.7 dB with the default. Plain numbers, because PyAV 14 has no names for the last three.
SWS_FLAGS = 0x4 | 0x2000 | 0x4000 | 0x40000
BT709, _UNSPECIFIED, _BT601, LIMITED, FULL = 1, 2, 5, 1, 2  # ffmpeg's AVColorSpace and AVColorRange values


class Clip:
    """A video file (or an open one), a folder of images in natural order, or one image: frames in RGB, upright, one
    after the other and none of them kept.

    fps: `DEFAULT_FPS` for images. count: of the frames, as the file announces it; None: it does not. Raises InputError
    when there is nothing to be read; while frames are read, when a file is damaged or the sizes differ.
    """

    def __init__(self, source: str | Path | BinaryIO) -> None:
        self._source = Path(source) if isinstance(source, (str, Path)) else source
        self.name = str(source) if isinstance(source, (str, Path)) else "the video"
        self.fps, self.count = DEFAULT_FPS, None
        self._images: list[Path] | None = None
        if isinstance(self._source, Path):
            if self._source.is_dir():
                self._images = _images_in(self._source)
            elif not self._source.exists():
                raise InputError(f"{source}: no such file or folder")
            elif self._source.suffix.lower() in IMAGE_SUFFIXES:
                self._images = [self._source]
        if self._images is not None:
            self.count = len(self._images)
        else:
            with self._open() as (_, stream):
                self.fps = Fraction(stream.average_rate or stream.guessed_rate or DEFAULT_FPS)
                self.count = stream.frames or None

    def __iter__(self) -> Iterator[torch.Tensor]:
        """[H, W, 3] each: uint8, or float32 in 0..1 where the source has more than 8 bits per channel."""
        for pixels in self.integers():
            own = pixels.dtype == np.uint8
            yield torch.from_numpy(np.require(pixels, requirements="W")) if own else _floats(pixels)

    def integers(self) -> Iterator[np.ndarray]:
        """[H, W, 3] each, uint8 or uint16."""
        return self._from_video() if self._images is None else self._from_images(self._images)

    def _from_images(self, files: list[Path]) -> Iterator[np.ndarray]:
        first = None
        for file in files:
            pixels = _read_image(file)
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

        reformatter = av.video.reformatter.VideoReformatter()  # one for all frames: it keeps its tables
        read, size, pace = 0, None, _Pace()
        try:
            with self._open() as (container, stream):
                stream.thread_type = "AUTO"
                for frame in _frames(container, stream):
                    pixels = _to_rgb(frame, reformatter)
                    size = pixels.shape if size is None else size
                    if pixels.shape != size:
                        raise InputError(f"{self.name}: the picture size changes at frame {read}; split the file there")
                    read += 1
                    if pace.breaks(frame):
                        log.warn(f"{self.name}: its frame rate varies; every frame is taken as it comes, "
                                 f"{float(self.fps):g} a second on average: sound may run ahead of the picture or "
                                 "behind it")  # fmt: skip
                    yield pixels
        except av.FFmpegError as error:
            where = f" after {read} frames" if read else ""
            raise InputError(f"{self.name}: cannot be read as a video{where} ({error.strerror})") from error
        if not read:
            raise InputError(f"{self.name}: the video holds no frames")
        if (self.count or 0) > read:
            log.warn(f"{self.name}: announces {self.count} frames, {read} could be read")

    @contextmanager
    def _open(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        import av

        if not isinstance(self._source, Path):
            self._source.seek(0)
        try:
            # Absolute: ffmpeg takes what is before a colon for a protocol.
            source = os.path.abspath(self._source) if isinstance(self._source, Path) else self._source
            with av.open(source) as container:
                pictures = [s for s in container.streams.video if not is_cover(s)]
                if not pictures:
                    raise InputError(f"{self.name}: holds no video stream")
                yield container, pictures[0]
        except av.FFmpegError as error:
            raise InputError(f"{self.name}: cannot be read as a video ({error.strerror})") from error


class _Pace:
    """Whether frames follow each other at one rate; clocks of milliseconds round."""

    def __init__(self) -> None:
        self._last: Fraction | None = None
        self._least = self._most = None
        self._broken = False

    def breaks(self, frame: VideoFrame) -> bool:
        """Whether it does not come when the ones before made expect it; true for one frame of a clip at most."""
        if frame.pts is None or self._broken:
            return False
        now = frame.pts * frame.time_base
        if self._last is not None:
            step = now - self._last
            self._least = step if self._least is None else min(step, self._least)
            self._most = step if self._most is None else max(step, self._most)
            self._broken = self._most > 1.5 * self._least
        self._last = now
        return self._broken


def is_cover(stream: VideoStream) -> bool:
    """A sound file's cover is a video stream of one picture."""
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)


def read_video(path: str | Path, max_frames: int | None = None) -> tuple[torch.Tensor, Fraction]:
    """All frames of a Clip, or the first `max_frames`: float32 [F, H, W, 3] in 0..1, and the frame rate.

    The float result is the peak: the clip waits as the integers it was decoded to, which are released while the result
    is filled.
    """
    if max_frames is not None and max_frames < 1:
        raise InputError(f"max_frames is {max_frames}; it must be at least 1")
    clip = Clip(path)
    waiting: list[np.ndarray | None] = list(islice(clip.integers(), max_frames))
    # The pages of an empty tensor are taken as they are written, while the integer frames give theirs back.
    frames = torch.empty((len(waiting), *waiting[0].shape), dtype=torch.float32)
    for index, pixels in enumerate(waiting):
        _fill(frames[index], pixels)
        waiting[index] = pixels = None
    return frames, clip.fps


def iter_frames(path: str | Path) -> Iterator[torch.Tensor]:
    """The frames of a Clip, one at a time: float32 [H, W, 3] in 0..1."""
    return map(_floats, Clip(path).integers())


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which frame2 comes before frame10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name.lower())
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts]


def _images_in(folder: Path) -> list[Path]:
    files = [f for f in folder.iterdir() if f.suffix.lower() in IMAGE_SUFFIXES and not f.name.startswith(".")]
    if not files:
        raise InputError(f"{folder}: no images in this folder (looked for {', '.join(sorted(IMAGE_SUFFIXES))})")
    return sorted(files, key=lambda f: natural_key(f.name))


def _read_image(path: Path) -> np.ndarray:
    """One image as uint8 or uint16 [H, W, 3], turned upright as its EXIF tag says."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode == "F":
                raise InputError(f"{path}: float image; its range is unknown, convert it to 8 or 16 bit first")
            if image.mode.startswith("I"):  # 16-bit gray; Pillow's own conversion to RGB would clip it at 255
                gray = np.asarray(image).clip(0, 65535).astype(np.uint16)
                return np.repeat(gray[..., None], 3, axis=2)
            if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
                log.once(f"{path}: transparency is dropped, the colours below it are used")
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).replace(str(path), "").strip(" '\"")
        raise InputError(f"{path}: cannot be read as an image ({reason})") from error


def _fill(target: torch.Tensor, pixels: np.ndarray) -> None:
    """Write integer pixels into a float view as 0..1."""
    np.divide(pixels, np.float32(np.iinfo(pixels.dtype).max), out=target.numpy(), casting="unsafe")


def _floats(pixels: np.ndarray) -> torch.Tensor:
    frame = torch.empty(pixels.shape, dtype=torch.float32)
    _fill(frame, pixels)
    return frame


def _frames(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Decoded frames; a packet cut short (a truncated file) is an error and not a frame with a gray half."""
    import av

    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise av.error.InvalidDataError(errno.EIO, "the file is cut off or damaged")
        yield from packet.decode()


def _to_rgb(frame: VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
    """uint8 [H, W, 3], or uint16 when the source has more than 8 bits per channel, upright."""
    deep = any(component.bits > 8 for component in frame.format.components)
    space = frame.colorspace
    if space == _UNSPECIFIED:  # as players do: HD is BT.709, smaller pictures are BT.601
        space = BT709 if frame.height >= 720 else _BT601
    known = space in (1, 4, 5, 7, 9)  # the matrices PyAV can pass on; others keep swscale's own choice
    space = space if known else None
    # RGB has neither matrix nor range, but PyAV 14 sets the source's own only when the matrices are equal and the
    # ranges differ; later versions do not mind.
    opposite = LIMITED if frame.color_range == FULL else FULL
    rgb = reformatter.reformat(
        frame,
        format="rgb48le" if deep else "rgb24",
        src_colorspace=space,
        dst_colorspace=space,
        src_color_range=frame.color_range,
        dst_color_range=opposite,
        interpolation=SWS_FLAGS,
    )
    pixels = rgb.to_ndarray()
    # A phone writes upright clips as turned ones with a display matrix (degrees, counter-clockwise).
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels
