"""Clips and latents on disk: video through PyAV, image folders through Pillow, latents through safetensors.

Pixels are [F, H, W, 3] in RGB, float 0..1 or uint8 0..255. Every writer fills a temporary target beside the final one
and renames it at the end, so a full disk or a stop leaves nothing half-written.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import log
from .errors import InputError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.reformatter import VideoReformatter

Frames = torch.Tensor | Iterable[torch.Tensor]
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
DEFAULT_FPS = Fraction(24)  # for image folders and for latents that carry no rate

# swscale: bicubic | full_chroma_int | full_chroma_inp | accurate_rnd. A photograph through RGB -> yuv420p -> RGB keeps
# 44.1 dB with these and 40.7 dB with the default. Plain numbers, because PyAV 14 has no names for the last three.
_SWS_FLAGS = 0x4 | 0x2000 | 0x4000 | 0x40000
_BT709, _UNSPECIFIED, _BT601, _LIMITED, _FULL = 1, 2, 5, 1, 2  # ffmpeg's AVColorSpace and AVColorRange values
_LEGACY_LATENT_SCALE = 1 / 0.18215  # ComfyUI's LoadLatent applies it to files without the version marker


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


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which frame2 comes before frame10."""
    parts = re.findall(r"\d+|\D+", name.lower())
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


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


def _read_video_file(path: Path, max_frames: int | None) -> tuple[torch.Tensor, Fraction]:
    import av

    reformatter = av.video.reformatter.VideoReformatter()  # one for all frames: it keeps its tables
    waiting: list[np.ndarray | None] = []
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise InputError(f"{path}: holds no video stream")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            rate = stream.average_rate or stream.guessed_rate or DEFAULT_FPS
            announced = stream.frames
            for frame in container.decode(stream):
                pixels = _to_rgb(frame, reformatter)
                if waiting and pixels.shape != waiting[0].shape:
                    raise InputError(f"{path}: the picture size changes at frame {len(waiting)}; split the file there")
                waiting.append(pixels)
                if len(waiting) == max_frames:
                    break
    except av.FFmpegError as error:
        where = f" after {len(waiting)} frames" if waiting else ""
        raise InputError(f"{path}: cannot be read as a video{where} ({error.strerror})") from error
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


def _to_rgb(frame: VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
    """uint8 [H, W, 3], or uint16 when the source has more than 8 bits per channel, upright."""
    deep = any(component.bits > 8 for component in frame.format.components)
    space = frame.colorspace
    if space == _UNSPECIFIED:  # as players do: HD is BT.709, smaller pictures are BT.601
        space = _BT709 if frame.height >= 720 else _BT601
    known = space in (1, 4, 5, 7, 9)  # the matrices PyAV can pass on; others keep swscale's own choice
    space = space if known else None
    rgb = reformatter.reformat(
        frame,
        format="rgb48le" if deep else "rgb24",
        src_colorspace=space,
        dst_colorspace=space,  # RGB has none, but PyAV 14 mixes up the source's matrix when the two differ
        src_color_range=frame.color_range,
        dst_color_range=_FULL,
        interpolation=_SWS_FLAGS,
    )
    pixels = rgb.to_ndarray()
    # A phone writes upright clips as turned ones with a display matrix (degrees, counter-clockwise).
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target`, which takes the target's place on success and is removed on any failure."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield temporary
        if target.is_dir() and temporary.is_dir():  # a folder cannot be replaced in one step
            retired = target.with_name(f".{target.name}.{os.getpid()}.old")
            os.replace(target, retired)
            os.replace(temporary, target)
            shutil.rmtree(retired)
        else:
            os.replace(temporary, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot be written ({reason})", str(target)) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def check_target(path: str | Path, force: bool = False, folder: bool = False) -> Path:
    """Refuse, before any work is done, an output that exists (unless `force`) or cannot be made. Raises InputError."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{path}: its folder does not exist; create {path.parent} first")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; choose another name or give --force to replace it")
    if path.exists() and path.is_dir() != folder:
        kinds = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise InputError(f"{path}: is a {kinds[0]} and is not replaced by a {kinds[1]}; choose another name")
    if folder and path.exists():
        _refuse_foreign_files(path)
    return path


def _refuse_foreign_files(folder: Path) -> None:
    foreign = [f.name for f in folder.iterdir() if not re.fullmatch(r"frame_\d+\.png", f.name)]
    if foreign:
        raise InputError(f"{folder}: holds other files ({foreign[0]}, ...), so it is not replaced; choose a new folder")


def _to_uint8(frame: torch.Tensor, index: int) -> np.ndarray:
    if frame.ndim != 3 or frame.shape[-1] != 3:
        raise InputError(f"frame {index} has shape {tuple(frame.shape)}; [height, width, 3] is needed")
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
                pixels = _to_uint8(frame, index)
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


def write_png_folder(path: str | Path, frames: Frames) -> None:
    """Write frames (as for `write_mp4`) as 8-bit frame_000000.png, ... in the folder `path`, replacing earlier ones.

    A folder that holds anything but such frames is refused with InputError, never emptied.
    """
    from PIL import Image

    path = Path(path)
    if path.is_file():
        raise InputError(f"{path}: is a file; a folder name is needed")
    if path.is_dir():
        _refuse_foreign_files(path)
    with replacing(path) as temporary:
        temporary.mkdir()
        count = 0
        for count, frame in enumerate(frames, start=1):
            image = Image.fromarray(_to_uint8(frame, count - 1))
            image.save(temporary / f"frame_{count - 1:06d}.png")
        if not count:
            raise InputError(f"{path}: no frames to write")


def write_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, replacing `path`. Raises OSError when the disk is full or the place not writable."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(Path(path)) as temporary:
        try:
            save_file(plain, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:  # the library reports the system's errors under its own name
            code = re.search(r"os error (\d+)", str(error))
            number = int(code[1]) if code else errno.EIO
            raise OSError(number, os.strerror(number) if code else str(error)) from error


def write_latent(path: str | Path, latent: torch.Tensor, metadata: Mapping[str, str] | None = None) -> None:
    """Write a host-scaled latent [B, C, T, h, w] under the key `latent`, with optional text metadata (`fps`, ...)."""
    if latent.ndim != 5:
        raise InputError(f"{path}: latent shape {list(latent.shape)} is not [batch, channels, time, height, width]")
    write_tensors(path, {"latent": latent}, metadata)


def read_latent(path: str | Path, channels: int = 16) -> torch.Tensor:
    """Read a latent file as float32 [B, C, T, h, w], host-scaled.

    Reads our own key `latent` and ComfyUI's `latent_tensor` (as in ComfyUI, a file without the marker
    `latent_format_version_0` is multiplied by 1/0.18215). SeedVR2's collapsed form [B, C*T, h, w] is unfolded,
    [C, T, h, w] gets a batch axis; a shape that could be both is refused. Raises InputError for anything else, and for
    NaN or infinite values.
    """
    tensors, _ = _load_latent_file(Path(path), with_tensors=True)
    comfy = "latent" not in tensors
    latent = tensors["latent_tensor" if comfy else "latent"]
    if not latent.is_floating_point():
        raise InputError(f"{path}: the latent is {str(latent.dtype).removeprefix('torch.')}; a float type is needed")
    latent = latent.float()
    if comfy and "latent_format_version_0" not in tensors:
        log.once(f"{path}: no latent_format_version_0 marker, so it is multiplied by 1/0.18215 as ComfyUI does")
        latent = latent * _LEGACY_LATENT_SCALE
    latent = _five_axes(path, latent, channels, batched=comfy)
    if latent.shape[1] != channels:
        raise InputError(f"{path}: has {latent.shape[1]} channels, not {channels} (shape {list(latent.shape)})")
    if not latent.numel():
        raise InputError(f"{path}: the latent is empty (shape {list(latent.shape)})")
    if not torch.isfinite(latent).all():
        raise InputError(f"{path}: the latent holds NaN or infinite values; it was broken before it was saved")
    return latent


def latent_metadata(path: str | Path) -> dict[str, str]:
    """The text metadata of a latent file (header only), empty for most files made elsewhere."""
    return _load_latent_file(Path(path), with_tensors=False)[1]


def _load_latent_file(path: Path, with_tensors: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"{path}: no such file" if not path.exists() else f"{path}: is a folder, not a latent file")
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if not names & {"latent", "latent_tensor"}:
                found = ", ".join(sorted(names)[:3]) or "nothing"
                raise InputError(f"{path}: not a latent file, it has no tensor latent or latent_tensor (found {found})")
            wanted = names & {"latent", "latent_tensor", "latent_format_version_0"} if with_tensors else set()
            return {name: file.get_tensor(name) for name in wanted}, dict(file.metadata() or {})
    except SafetensorError as error:
        raise InputError(f"{path}: not a readable safetensors latent file ({error})") from error


def _five_axes(path: str | Path, latent: torch.Tensor, channels: int, batched: bool) -> torch.Tensor:
    shape = list(latent.shape)
    if latent.ndim == 5:
        return latent
    if latent.ndim == 4:
        collapsed = shape[1] > 0 and shape[1] % channels == 0
        unbatched = shape[0] == channels and not batched
        if collapsed and unbatched:
            raise InputError(
                f"{path}: shape {shape} may mean [channels, time, height, width] or"
                f" [batch, {channels} x time, height, width]; save it with five axes"
            )
        if collapsed:
            return latent.unflatten(1, (channels, -1))
        if unbatched:
            return latent.unsqueeze(0)
    raise InputError(f"{path}: shape {shape} is not [batch, {channels}, time, height, width]")
