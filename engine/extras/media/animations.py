"""Animated WebP and PNG files as clips: FFmpeg does not read the former, and Pillow composes the frames of both."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from statistics import median_low
from typing import BinaryIO

import numpy as np
from PIL import Image

from .pictures import Tell, check_size, converted, reading, say_depth, unlimited

#: Seconds for a frame that names none, as in browsers.
_UNSAID = Fraction(1, 10)


class Animation:
    """The frames of an animated WebP or PNG file, and their rate. varies: some last longer than others."""

    def __init__(self, path: Path, seconds: list[Fraction]) -> None:
        """seconds: of each frame, as from `animated`."""
        self._path, self.count = path, len(seconds)
        seconds = [each or _UNSAID for each in seconds]
        usual = median_low(seconds)
        # The last frame may be shown for longer, before the animation begins again.
        even = [usual <= 1.5 * each and each <= 1.5 * usual for each in seconds]
        self.fps = Fraction(sum(even), 1) / sum(each for each, is_even in zip(seconds, even, strict=True) if is_even)
        self.varies = not all(even[:-1])

    def frames(self, colours: int, tell: Tell) -> Iterator[np.ndarray]:
        """Yield pixels [H, W, colours] as `read_picture` returns them, with the same arguments. Raises InputError."""
        with reading(str(self._path)), ExitStack() as stack:
            with unlimited():
                image = stack.enter_context(Image.open(self._path))
            check_size(self._path, *image.size)
            say_depth(image, tell)
            first = int(bool(image.info.get("default_image")))  # a picture for programs that do not know animations
            for number in range(self.count):
                with reading(str(self._path), f" after {number} frames" if number else ""), unlimited():
                    image.seek(first + number)
                    pixels = converted(self._path, _opaque(image), colours, tell)
                yield pixels


def animated(path: Path) -> list[Fraction]:
    """Return the seconds of each frame of an animated WebP or PNG file, by its content; none for other files."""
    with open(path, "rb") as file:
        head = file.read(12)
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            file.seek(8)
            return list(_of_png(file))
        if head.startswith(b"RIFF") and head.endswith(b"WEBP"):
            return list(_of_webp(file))
    return []


def _of_png(file: BinaryIO) -> Iterator[Fraction]:
    control = False
    while len(head := file.read(8)) == 8:
        size, kind = struct.unpack(">I4s", head)
        if kind == b"IDAT" and not control:
            return
        control = control or kind == b"acTL"
        data = file.read(min(size, 26)) if kind == b"fcTL" else b""
        if len(data) == 26:
            count, of = struct.unpack_from(">HH", data, 20)
            yield Fraction(count, of or 100)
        file.seek(size - len(data) + 4, 1)


def _of_webp(file: BinaryIO) -> Iterator[Fraction]:
    while len(head := file.read(8)) == 8:
        kind, size = struct.unpack("<4sI", head)
        if kind in (b"VP8 ", b"VP8L"):  # one picture
            return
        data = file.read(min(size, 15)) if kind == b"ANMF" else b""
        if len(data) == 15:
            yield Fraction(int.from_bytes(data[12:15], "little"), 1000)
        file.seek(size - len(data) + size % 2, 1)


def _opaque(image: Image.Image) -> Image.Image:
    """Return the current frame, without an alpha channel in which nothing is transparent."""
    image.load()
    if image.mode == "RGBA" and image.getextrema()[3] == (255, 255):
        frame = image.convert("RGB")
        frame.format = image.format
        return frame
    return image
