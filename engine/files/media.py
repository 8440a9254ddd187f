"""Clips on disk: video through PyAV, images through Pillow.

Pixels are RGB [F, H, W, 3], float 0..1 or uint8 0..255. Writers leave nothing half-written (files.replacing).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import log
from ..errors import InputError
from .writing import FRAME_NAME, refuse_foreign_files, replacing

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
_SWS_FLAGS = 0x4 | 0x2000 | 0x4000 | 0x40000
_BT709, _UNSPECIFIED, _BT601, _LIMITED, _FULL = 1, 2, 5, 1, 2  # ffmpeg's AVColorSpace and AVColorRange values


def read_video(path: str | Path, max_frames: int | None = None) -> tuple[torch.Tensor, Fraction]:
    """Read a video file, a folder of images (natural order) or one image.

    Returns float32 frames [F, H, W, 3] in 0..1 and the frame rate (`DEFAULT_FPS` for images). `max_frames` stops early.
    Raises InputError when nothing can be read, a file is damaged or the sizes differ. The float result is the peak:
    a video waits as the integers it was decoded to, which are released while the result is filled.
    """
    path = Path(path)
    if max_frames is not None and max_frames < 1:
        raise InputError(f"max_frames is {max_frames}; it must be at least 1")
    if path.is_dir():
        return _read_images(path, _images_in(path)[:max_frames]), DEFAULT_FPS
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return _read_images(path, [path]), DEFAULT_FPS
    return _read_video_file(path, max_frames)


def iter_frames(path: str | Path) -> Iterator[torch.Tensor]:
    """The frames `read_video` would give, one at a time: float32 [H, W, 3] in 0..1. Raises InputError as it does."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES:
        pictures: Iterable[np.ndarray] = map(_read_image, _images_in(path) if path.is_dir() else [path])
    else:
        pictures = _video_frames(path)
    for pixels in pictures:
        frame = torch.empty(pixels.shape, dtype=torch.float32)
        _fill(frame, pixels)
        yield frame


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which frame2 comes before frame10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name.lower())
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts]


def _images_in(folder: Path) -> list[Path]:
    files = [f for f in folder.iterdir() if f.suffix.lower() in IMAGE_SUFFIXES and not f.name.startswith(".")]
    if not files:
        raise InputError(f"{folder}: no images in this folder (looked for {', '.join(sorted(IMAGE_SUFFIXES))})")
    return sorted(files, key=lambda f: natural_key(f.name))


def _read_images(source: Path, files: list[Path]) -> torch.Tensor:
    first = _read_image(files[0])
    frames = torch.empty((len(files), *first.shape), dtype=torch.float32)
    for index, file in enumerate(files):
        pixels = first if index == 0 else _read_image(file)
        if pixels.shape != first.shape:
            size, expected = (f"{p.shape[1]}x{p.shape[0]}" for p in (pixels, first))
            raise InputError(f"{source}: {file.name} is {size} but {files[0].name} is {expected}; make them one size")
        _fill(frames[index], pixels)
    return frames


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


def _video_frames(path: Path) -> Iterator[np.ndarray]:
    """The frames of a video file as integers, none of them kept."""
    with _opened(path) as (_, frames):
        yield from frames


@contextmanager
def _opened(path: Path) -> Iterator[tuple[VideoStream, Iterator[np.ndarray]]]:
    """A video and its frames as integers, in time. What FFmpeg refuses is an InputError."""
    import av

    reformatter = av.video.reformatter.VideoReformatter()  # one for all frames: it keeps its tables
    done = 0

    def pixels(container: InputContainer, stream: VideoStream) -> Iterator[np.ndarray]:
        nonlocal done
        for frame in _frames(container, stream):
            yield _to_rgb(frame, reformatter)
            done += 1

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise InputError(f"{path}: holds no video stream")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield stream, pixels(container, stream)
    except av.FFmpegError as error:
        where = f" after {done} frames" if done else ""
        raise InputError(f"{path}: cannot be read as a video{where} ({error.strerror})") from error


def _read_video_file(path: Path, max_frames: int | None) -> tuple[torch.Tensor, Fraction]:
    waiting: list[np.ndarray | None] = []
    with _opened(path) as (stream, found):
        rate = stream.average_rate or stream.guessed_rate or DEFAULT_FPS
        announced = stream.frames
        for pixels in islice(found, max_frames):
            if waiting and pixels.shape != waiting[0].shape:
                raise InputError(f"{path}: the picture size changes at frame {len(waiting)}; split the file there")
            waiting.append(pixels)
    if not waiting:
        raise InputError(f"{path}: the video holds no frames")
    if max_frames is None and announced > len(waiting):
        log.warn(f"{path}: announces {announced} frames, {len(waiting)} could be read")
    # The pages of an empty tensor are taken as they are written, while the integer frames give theirs back.
    frames = torch.empty((len(waiting), *waiting[0].shape), dtype=torch.float32)
    for index, pixels in enumerate(waiting):
        _fill(frames[index], pixels)
        waiting[index] = pixels = None
    return frames, Fraction(rate)


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
        space = _BT709 if frame.height >= 720 else _BT601
    known = space in (1, 4, 5, 7, 9)  # the matrices PyAV can pass on; others keep swscale's own choice
    space = space if known else None
    # RGB has neither matrix nor range, but PyAV 14 sets the source's own only when the matrices are equal and the
    # ranges differ; later versions do not mind.
    opposite = _LIMITED if frame.color_range == _FULL else _FULL
    rgb = reformatter.reformat(
        frame,
        format="rgb48le" if deep else "rgb24",
        src_colorspace=space,
        dst_colorspace=space,
        src_color_range=frame.color_range,
        dst_color_range=opposite,
        interpolation=_SWS_FLAGS,
    )
    pixels = rgb.to_ndarray()
    # A phone writes upright clips as turned ones with a display matrix (degrees, counter-clockwise).
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _to_uint8(frame: torch.Tensor, index: int) -> np.ndarray:
    if frame.ndim != 3 or frame.shape[-1] not in (3, 4):
        raise InputError(f"frame {index} has shape {tuple(frame.shape)}; [height, width, 3 or 4] is needed")
    if frame.dtype == torch.uint8:
        return np.ascontiguousarray(frame.cpu().numpy())
    frame = frame.float()
    if not torch.isfinite(frame).all():
        raise InputError(f"frame {index} holds NaN or infinite values; nothing was written")
    return frame.mul(255).round_().clamp_(0, 255).to(torch.uint8).cpu().contiguous().numpy()


def write_mp4(path: str | Path, frames: Frames, fps: Fraction | float, crf: int = 12) -> None:
    """Write frames (float 0..1 or uint8; a tensor [F, H, W, 3] or an iterable of [H, W, 3]) as H.264, replacing `path`.

    yuv420p, BT.709, constant quality `crf` (0 best .. 51), one frame in flight. yuv420p needs even sizes: an odd width
    or height is padded by repeating the last column or row, and that is said once. Raises InputError, OSError.
    """
    import av

    path, rate = Path(path), Fraction(fps).limit_denominator(100_000)
    if rate <= 0:
        raise InputError(f"frame rate {fps}: must be above 0")
    if "libx264" not in av.codecs_available:
        raise InputError(f"{path}: this PyAV build has no libx264 encoder; write a PNG folder instead")
    reformatter = av.video.reformatter.VideoReformatter()
    with replacing(path) as temporary:
        container = stream = None
        try:
            for index, frame in enumerate(frames):
                pixels = _to_uint8(frame, index)[..., :3]
                height, width = pixels.shape[:2]
                if height % 2 or width % 2:
                    even = f"{width + width % 2}x{height + height % 2}"
                    log.once(f"{path}: MP4 needs even sizes, {width}x{height} is padded to {even}; PNG keeps the size")
                    pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
                if container is None:
                    container = av.open(str(temporary), "w", format="mp4", options={"movflags": "+faststart"})
                    stream = container.add_stream("libx264", rate=rate, options={"crf": str(crf), "preset": "medium"})
                    stream.height, stream.width = pixels.shape[:2]
                    stream.pix_fmt = "yuv420p"
                    context = stream.codec_context
                    context.colorspace = context.color_primaries = context.color_trc = _BT709
                    context.color_range = _LIMITED
                elif pixels.shape[:2] != (stream.height, stream.width):
                    raise InputError(f"frame {index} is {width}x{height}, the first one {stream.width}x{stream.height}")
                picture = reformatter.reformat(
                    av.VideoFrame.from_ndarray(pixels, format="rgb24"),
                    format="yuv420p",
                    src_colorspace=_BT709,
                    dst_colorspace=_BT709,
                    src_color_range=_FULL,
                    dst_color_range=_LIMITED,
                    interpolation=_SWS_FLAGS,
                )
                picture.pts = index
                container.mux(stream.encode(picture))
            if container is None:
                raise InputError(f"{path}: no frames to write")
            container.mux(stream.encode(None))
        except av.FFmpegError as error:
            if isinstance(error, OSError):
                raise
            raise InputError(f"{path}: the encoder refused the clip ({error.strerror}); write a PNG folder") from error
        finally:
            if container is not None:
                container.close()


def write_png(path: str | Path, frame: torch.Tensor) -> None:
    """Write one frame [H, W, 3] (float 0..1 or uint8) as an 8-bit PNG, replacing `path`."""
    from PIL import Image

    with replacing(Path(path)) as temporary:
        Image.fromarray(_to_uint8(frame, 0)).save(temporary, format="png")


def write_png_folder(path: str | Path, frames: Frames) -> None:
    """Write frames (as for `write_mp4`) as 8-bit frame_000000.png, ... in the folder `path`, replacing earlier ones.

    A folder that holds anything but such frames is refused with InputError, never emptied.
    """
    from PIL import Image

    path = Path(path)
    if path.is_file():
        raise InputError(f"{path}: is a file; a folder name is needed")
    if path.is_dir():
        refuse_foreign_files(path)
    with replacing(path) as temporary:
        temporary.mkdir()
        count = 0
        for count, frame in enumerate(frames, start=1):
            image = Image.fromarray(_to_uint8(frame, count - 1))
            image.save(temporary / FRAME_NAME.format(count - 1))
        if not count:
            raise InputError(f"{path}: no frames to write")
