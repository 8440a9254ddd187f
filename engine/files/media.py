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
from itertools import islice, pairwise
from pathlib import Path
from statistics import median_low
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
_HDR = frozenset({16, 18})  # its AVColorTransferCharacteristic: PQ and HLG


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
            elif not self._source.is_file():  # it is opened more than once
                raise InputError(f"{source}: is a pipe or a device; write it to a file first")
            elif self._source.suffix.lower() in IMAGE_SUFFIXES:
                self._images = [self._source]
        if self._images is not None:
            self.count = len(self._images)
        else:
            with self._open() as (_, stream):
                self.fps = Fraction(stream.average_rate or stream.guessed_rate or DEFAULT_FPS)
                self.count = _announced(stream, self.fps)

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
        read, size, mirrored, pace, short = 0, None, False, _Pace(), None
        try:
            with self._open() as (container, stream):
                stream.thread_type = "AUTO"
                for frame in _frames(container, stream):
                    if not read:
                        # Once: a frame whose side data were looked at refers to itself, and waits for the collector.
                        mirrored = _mirrored(frame)
                        for line in _surprises(container, stream, frame):
                            log.once(f"{self.name}: {line}")
                    pixels = _to_rgb(frame, reformatter, mirrored)
                    size = pixels.shape if size is None else size
                    if pixels.shape != size:
                        raise InputError(f"{self.name}: the picture size changes at frame {read}; split the file there")
                    read += 1
                    if pace.breaks(frame):
                        log.warn(f"{self.name}: its frame rate varies; every frame is taken as it comes, "
                                 f"{float(self.fps):g} a second: sound may run ahead of the picture or "
                                 "behind it")  # fmt: skip
                    yield pixels
                short = pace.short_of(stream, self.fps)
        except av.FFmpegError as error:
            where = f" after {read} frames" if read else ""
            raise InputError(f"{self.name}: cannot be read as a video{where} ({error.strerror})") from error
        if not read:
            raise InputError(f"{self.name}: the video holds no frames")
        if (self.count or 0) > read:
            log.warn(f"{self.name}: announces {self.count} frames, {read} could be read")
        elif short:
            log.warn(f"{self.name}: announces {short}; it may be cut off")

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
        if frame.pts is None:
            return False
        now, before, broken = frame.pts * frame.time_base, self._last, self._broken
        self._last = now
        if before is None or broken:
            return False
        step = now - before
        self._least = step if self._least is None else min(step, self._least)
        self._most = step if self._most is None else max(step, self._most)
        self._broken = self._most > 1.5 * self._least
        return self._broken

    def short_of(self, stream: VideoStream, fps: Fraction) -> str | None:
        """What is lacking behind the last frame, in words. A Matroska file that is cut off ends like a whole one, but
        its head says how long it was."""
        said = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
        if said is None or self._last is None:
            return None
        hours, minutes, seconds = map(float, said.groups())
        end, there = 3600 * hours + 60 * minutes + seconds, float(self._last + 1 / fps)
        return f"{end:.1f} seconds, its frames end at {there:.1f}" if end > there + 1 else None


def _announced(stream: VideoStream, fps: Fraction) -> int | None:
    """How many frames a file says it has. One that was trimmed without encoding it anew (phones do so) holds more than
    it shows, and its duration is of those it shows."""
    if not stream.frames or stream.duration is None:
        return stream.frames or None
    shown = round(stream.duration * stream.time_base * fps)
    return shown if 0 < shown < stream.frames - 1 else stream.frames


def _surprises(container: InputContainer, stream: VideoStream, frame: VideoFrame) -> Iterator[str]:
    """What pixels taken as they are do not show, or show otherwise than a player."""
    streams = sum(not is_cover(s) for s in container.streams.video)
    if streams > 1:
        yield f"holds {streams} video streams; the first is read"
    # FFmpeg's own decoder of VP9 leaves alpha out; a GIF's frames always have a place for it.
    alpha = any(c.is_alpha for c in frame.format.components) and stream.codec_context.name != "gif"
    if alpha or stream.metadata.get("alpha_mode") == "1":
        yield "transparency is dropped, the colours below it are used"
    if frame.interlaced_frame:
        yield "is interlaced, and lines of two moments are taken as one frame; deinterlace it first (ffmpeg -vf bwdif)"
    if (stream.sample_aspect_ratio or 1) != 1:
        yield (f"its pixels are not square ({stream.sample_aspect_ratio}) and are taken as if they were: pictures come "
               "out narrower or wider than in a player; scale it first")  # fmt: skip
    if stream.codec_context.color_trc in _HDR:
        yield "is HDR, and its values are taken as they are: colours come out pale; tone-map it to BT.709 first"


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
    files.sort(key=lambda f: natural_key(f.name))
    _check_numbers(folder, files)
    return files


def _check_numbers(folder: Path, files: list[Path]) -> None:
    """Says where the numbers of the names do not go on as elsewhere: a frame is missing, or there twice."""
    numbers = [int((re.findall(r"[0-9]+", f.stem) or ["0"])[-1]) for f in files]
    steps = [after - before for before, after in pairwise(numbers)]
    for place, step in enumerate(steps):
        if step != median_low(steps):
            log.once(f"{folder}: {files[place].name} is followed by {files[place + 1].name}; its images are taken one "
                     "after the other, so check that none is missing or there twice")  # fmt: skip
            return


def _read_image(path: Path) -> np.ndarray:
    """One image as uint8 or uint16 [H, W, 3], turned upright as its EXIF tag says."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            if opened.format != "MPO" and getattr(opened, "n_frames", 1) > 1:  # cameras keep a preview in those
                log.once(f"{path}: holds {opened.n_frames} pictures, and only the first is read; save each as an image "
                         "of its own, in one folder")  # fmt: skip
            deep = opened.mode in ("RGB", "RGBA") and any(";16" in str(tile[3]) for tile in opened.tile)
            if deep:  # Pillow has no type for them
                log.once(f"{path}: 8 of its 16 bits per channel are read; a lossless video (FFV1) keeps them all")
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


def _to_rgb(frame: VideoFrame, reformatter: VideoReformatter, mirrored: bool) -> np.ndarray:
    """uint8 [H, W, 3], or uint16 when the source has more than 8 bits per channel, upright; `mirrored` as below."""
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
    # A phone writes upright clips as turned ones with a display matrix (degrees, counter-clockwise), selfies mirrored.
    pixels = pixels[::-1] if mirrored else pixels
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90) % 4))


def _mirrored(frame: VideoFrame) -> bool:
    """Whether it is to be turned over top to bottom, before it is rotated."""
    from av.sidedata.sidedata import Type

    matrix = frame.side_data.get(Type.DISPLAYMATRIX)
    if matrix is None:
        return False
    a, b, _, c, d = map(float, np.frombuffer(matrix, np.int32)[:5])
    return a * d < b * c
