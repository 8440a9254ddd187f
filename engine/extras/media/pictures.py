"""Read pictures from disk through Pillow: upright, in sRGB, with a log line for all that is lost."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps

from ... import log
from ...errors import InputError
from .colours import LINEAR, srgb_table, transform, unconverted

#: Takes a sentence on what of a picture is lost.
Tell = Callable[[str], None]
#: Suffixes of pictures, in folders too.
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff"})
#: Formats recognised by content, whatever the name. Sequences of JPEGs (.mjpeg) begin like one JPEG.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "ICO", "CUR", "ICNS", "JPEG2000")
_ROWS = frozenset({".mjpeg", ".mjpg", ".mjpe"})
#: Most pixels of a picture: each takes three to four bytes when read, and twelve or more as floats.
LARGEST = 1 << 30
#: Pillow's own limit is global to the process.
_LIMIT = threading.Lock()
#: sRGB's primaries as a PNG gives them: white, red, green, blue.
_SRGB = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)


def is_picture(path: Path) -> bool:
    """Return whether `read_picture` reads a file, by its name or its content."""
    if path.suffix.lower() in SUFFIXES:
        return True
    if path.suffix.lower() in _ROWS:
        return False
    with suppress(Exception), unlimited(), Image.open(path, formats=_FORMATS) as image:
        return image.format in ("ICO", "ICNS", "MPO", "TIFF") or getattr(image, "n_frames", 1) == 1
    return False


def read_picture(path: Path, colours: int = 3, tell: Tell | None = None) -> np.ndarray:
    """Return one picture as uint8 or uint16 [H, W, colours], rotated upright by its EXIF tag, in sRGB.

    Args:
        colours: 3, or 4 for RGB with alpha, which is opaque if the file has none.
        tell: called with what is lost, in words; None: it is logged with the path.

    Raises:
        InputError: the file cannot be read as a picture.
    """
    tell = tell or (lambda line: log.once(f"{path}: {line}"))
    with reading(str(path)), unlimited(), Image.open(path) as opened:
        check_size(path, *opened.size)
        _say_more(opened, tell)
        return converted(path, opened, colours, tell)


def converted(path: Path, opened: Image.Image, colours: int, tell: Tell) -> np.ndarray:
    """Return the pixels of an opened picture, or of its current frame, as `read_picture` does."""
    opened.load()
    image = ImageOps.exif_transpose(opened)
    # Taken from the opened file: rotating or loading loses some of these facts.
    facts = {**opened.info, **image.info, "cicp": _cicp(path) if opened.format == "PNG" else None}
    return _pixels(path, image, facts, colours, tell)


@contextmanager
def reading(name: str, where: str = "") -> Iterator[None]:
    """Turn Pillow's errors in the body into InputError. where: " after N frames" of an animation."""
    try:
        yield
    except (OSError, EOFError, SyntaxError, ValueError, MemoryError, struct.error,
            Image.DecompressionBombError) as error:  # fmt: skip
        if isinstance(error, InputError):
            raise
        reason = "not enough memory" if isinstance(error, MemoryError) else str(error)
        reason = " ".join(reason.replace(name, "").split()).strip(" '\"")
        raise InputError(f"{name}: cannot be read as an image{where} ({reason})") from error


@contextmanager
def unlimited() -> Iterator[None]:
    """Lift Pillow's limit, which upscalers exceed and whose message names no cure; `check_size` applies our own."""
    with _LIMIT:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def check_size(path: Path, width: int, height: int) -> None:
    if width * height > LARGEST:
        raise InputError(f"{path}: {width}x{height} is more than {LARGEST / 1e6:.0f} million pixels; scale it down or "
                         "cut it into parts")  # fmt: skip


def _say_more(image: Image.Image, tell: Tell) -> None:
    """Log the contents of the file besides the picture that is read."""
    sizes = image.info.get("sizes", ())
    if len(sizes) > 1:
        tell(f"holds {len(sizes)} sizes of a picture; the largest is read ({image.width}x{image.height})")
    elif image.format != "MPO" and getattr(image, "n_frames", 1) > 1:  # cameras keep a preview in MPO files
        tell(f"holds {image.n_frames} pictures, and only the first is read; save each as an image of its own, in one "
             "folder")  # fmt: skip
    say_depth(image, tell)


def say_depth(image: Image.Image, tell: Tell) -> None:
    """Tell if 16 bits are read as 8: Pillow has no type for 16-bit RGB."""
    if image.mode in ("RGB", "RGBA") and any(";16" in str(tile[3]) for tile in image.tile or ()):
        tell("8 of its 16 bits per channel are read; a lossless video (FFV1) keeps them all")


def _pixels(path: Path, image: Image.Image, facts: dict, colours: int, tell: Tell) -> np.ndarray:
    if image.mode == "F":
        raise InputError(f"{path}: float image; its range is unknown, convert it to 8 or 16 bit first")
    if image.mode.startswith("I"):  # 16-bit gray; Pillow's own conversion to RGB would clip it at 255
        gray = np.asarray(image)
        if gray.min() < 0 or gray.max() > 65535:
            raise InputError(f"{path}: image of 32-bit whole numbers; its range is unknown, convert it to 8 or 16 bit "
                             "first")  # fmt: skip
        gray = gray.astype(np.uint16)
        if facts.get("icc_profile") or "gamma" in facts:
            _convert(Image.fromarray((gray >> 8).astype(np.uint8)), facts, tell, said_only=True)
        pixels = np.repeat(gray[..., None], colours, axis=2)
        if colours == 4:
            pixels[..., 3] = 65535
        return pixels
    alpha = None
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        if colours == 4:
            alpha = image.convert("RGBA").getchannel("A")
        else:
            tell("transparency is dropped, the colours below it are used")
    if image.mode in ("1", "LA", "La") and "transparency" not in image.info:
        image = image.convert("LA").getchannel("L") if image.mode != "1" else image.convert("L")
    elif image.mode not in ("L", "CMYK", "LAB"):
        image = image.convert("RGBA").convert("RGB") if image.mode in ("RGBa", "PA") else image.convert("RGB")
    rgb = _convert(image, facts, tell)
    if colours == 3:
        return np.asarray(rgb)
    rgb.putalpha(255 if alpha is None else alpha)
    return np.asarray(rgb)


def _convert(image: Image.Image, facts: dict, tell: Tell, said_only: bool = False) -> Image.Image:
    """Return a picture of mode L, RGB, CMYK or LAB as RGB in sRGB; said_only: only log the conversion it would need."""
    told = facts["cicp"]
    if told is not None:  # it takes precedence over a PNG's other colour data
        for line in unconverted(told[1], told[0]):
            tell(line)
        return _by_table(image, srgb_table(256), tell, said_only) if told[1] == LINEAR else image.convert("RGB")
    profile = facts.get("icc_profile")
    if profile or image.mode == "LAB":
        try:
            made = transform(profile, image.mode)
        except (ImageCms.PyCMSError, ImportError, OSError, ValueError, TypeError):
            tell("its colour profile cannot be used, and its colours are taken as sRGB's")
            made = None
        if made is not None and said_only:
            tell("its colour profile is not applied to 16 bits a channel; convert it to sRGB first")
        elif made is not None:
            return ImageCms.applyTransform(image, made)
        return image.convert("RGB")
    if image.mode == "CMYK":
        tell("its printing colours (CMYK) have no profile and are converted by a rule of thumb; convert it to sRGB "
             "first")  # fmt: skip
    gamma, named = facts.get("gamma"), "srgb" in facts
    primaries = facts.get("chromaticity")
    if primaries and not named and max(abs(a - b) for a, b in zip(primaries, _SRGB, strict=True)) > 0.01:
        tell("its primaries are not sRGB's and are taken as those: convert it to sRGB first")
    if gamma and not named and abs(gamma * 2.2 - 1) > 0.05:
        return _by_table(image, srgb_table(256, 1 / gamma), tell, said_only)
    if _says_adobe(image):
        tell("its EXIF names AdobeRGB, but no profile is in it, and its colours are taken as sRGB's; convert it to "
             "sRGB first")  # fmt: skip
    return image.convert("RGB")


def _by_table(image: Image.Image, table: np.ndarray, tell: Tell, said_only: bool) -> Image.Image:
    image = image.convert("RGB")
    if said_only:
        tell("its gamma is not applied to 16 bits a channel; convert it to sRGB first")
        return image
    return image.point(table.tolist() * 3)


def _cicp(path: Path) -> tuple[int, int] | None:
    """Return the primaries and the transfer that a PNG names by number (Pillow does not read them)."""
    with open(path, "rb") as file:
        head = file.read(4096)
    place = head.find(b"\x00\x00\x00\x04cICP")
    found = head.startswith(b"\x89PNG") and 0 < place < len(head) - 12
    return (head[place + 8], head[place + 9]) if found else None


def _says_adobe(image: Image.Image) -> bool:
    with suppress(Exception):  # unreadable EXIF counts as none
        exif = image.getexif()
        return exif.get_ifd(0x8769).get(0xA001) == 2 or str(exif.get_ifd(0xA005).get(1, "")).startswith("R03")
    return False
