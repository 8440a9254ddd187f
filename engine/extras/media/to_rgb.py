"""Convert decoded frames to RGB: upright, of one size and depth, by the matrix and the transfer that they declare."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from PIL import ImageCms

from .colours import LINEAR, MATRICES, UNSPECIFIED, matrix_of, srgb_table, transform

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.stream import VideoStream

# swscale: bicubic | full_chroma_int | full_chroma_inp | accurate_rnd. A photograph through RGB -> yuv420p -> RGB keeps
# 44.1 dB with these and 40.7 dB with the default. Plain numbers, because PyAV 14 has no names for the last three.
SWS_FLAGS = 0x4 | 0x2000 | 0x4000 | 0x40000
BT709, BT601, LIMITED, FULL = 1, 5, 1, 2  # ffmpeg's AVColorSpace and AVColorRange values
#: Pixel format by (more than 8 bits, channels).
_FORMATS = {(False, 3): "rgb24", (True, 3): "rgb48le", (False, 4): "rgba", (True, 4): "rgba64le"}


class UnreadColours(Exception):
    """A frame's colours are stored in a way that nothing here converts."""


class ToRgb:
    """Converts frames of one stream to RGB [H, W, colours]: uint8, or uint16 if the first frame has more than 8 bits
    per channel.

    trouble: a remark on the latest frame, in words.
    """

    def __init__(self, first: VideoFrame, stream: VideoStream, colours: int) -> None:
        """Take size, depth, orientation and linear light from the first frame of a stream."""
        from av.video.reformatter import VideoReformatter

        self._reformatter = VideoReformatter()  # one for all frames: it keeps its tables
        self._size = first.width, first.height
        self._colours = colours
        self._deep = any(component.bits > 8 for component in first.format.components)
        # Read only once: a frame whose side data were read refers to itself, and waits for the garbage collector.
        side = _side_data(first)
        self._mirrored = _mirrored(side)
        self._profiled = not _is_srgb(side)
        transfer = stream.codec_context.color_trc
        floats = "f32" in first.format.name or "f16" in first.format.name
        # Files of floats that declare no transfer (.hdr, .pfm) hold linear light.
        self._linear = transfer == LINEAR or (floats and transfer == UNSPECIFIED)
        self._floats, self._mistagged = floats, False
        # A GIF's frames always have an alpha channel, whether or not it is used.
        self._clear = stream.codec_context.name == "gif" and colours == 3
        self.trouble: str | None = None

    def __call__(self, frame: VideoFrame) -> np.ndarray:
        """Return one frame's pixels. Raises UnreadColours."""
        self.trouble = None
        width, height = self._size
        if (frame.width, frame.height) != self._size:
            self.trouble = (f"and later ones are {frame.width}x{frame.height}; they are scaled to the first one's "
                            f"{width}x{height}")  # fmt: skip
        elif self._profiled:
            self.trouble = "has a colour profile, which is not applied to videos: convert it to sRGB first"
            self._profiled = False
        elif self._floats and _bright(frame):
            self.trouble = "has light beyond white, which is cut off there; expose or tone-map it first"
            self._floats = False
        elif self._clear and frame.to_ndarray(format="rgba")[..., 3].min() < 255:
            self.trouble = "has transparency, which is dropped: such places come out white"
            self._clear = False
        space = self._matrix(frame)
        # RGB has neither matrix nor range, but PyAV 14 sets the source's own only when the matrices are equal and the
        # ranges differ; later versions do not mind.
        opposite = LIMITED if frame.color_range == FULL else FULL
        rgb = self._reformatter.reformat(
            frame,
            width=width,
            height=height,
            format=_FORMATS[self._deep, self._colours],
            src_colorspace=space,
            dst_colorspace=space,
            src_color_range=frame.color_range,
            dst_color_range=opposite,
            interpolation=SWS_FLAGS,
        )
        pixels = rgb.to_ndarray()
        if self._linear:
            pixels[..., :3] = srgb_table(65536 if self._deep else 256)[pixels[..., :3]]
        # A phone writes upright clips as turned ones with a display matrix (degrees, counter-clockwise) and mirrors
        # selfies.
        pixels = pixels[::-1] if self._mirrored else pixels
        return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90) % 4))

    def _matrix(self, frame: VideoFrame) -> int | None:
        """Return the matrix of a frame's YUV; players guess it by the size if none is declared."""
        space, components = frame.colorspace, frame.format.components
        guess = BT709 if frame.height >= 720 else BT601
        if frame.format.is_rgb or len(components) < 3:
            return guess if space == UNSPECIFIED else MATRICES.get(space)
        halved = any(c.is_chroma and c.width < frame.width for c in components)
        if space == 0 and halved and not self._mistagged:
            self._mistagged = True
            self.trouble = self.trouble or "says that it is RGB, which it is not; its colours are taken as YUV's"
        if space in (UNSPECIFIED, 3) or (space == 0 and halved):
            return guess
        if space not in MATRICES:
            raise UnreadColours(f"its colours are stored as {matrix_of(space)}, which cannot be read here; convert it "
                                "first (ffmpeg -vf zscale=matrix=709)")  # fmt: skip
        return MATRICES[space]


def _side_data(frame: VideoFrame) -> dict[str, bytes]:
    """Return a frame's data besides pixels, by PyAV's names. PyAV has no names for the data of newer FFmpegs."""
    from av.sidedata.sidedata import Type

    if "_missing_" not in vars(Type):

        def unnamed(cls: type, value: object) -> object:
            """Return a nameless member: PyAV looks up a member for each entry, and would raise ValueError here."""
            member = object.__new__(cls)
            member._name_, member._value_ = f"UNNAMED_{value}", value
            return member

        Type._missing_ = classmethod(unnamed)
    data = frame.side_data
    wanted = {name: getattr(Type, name, None) for name in ("DISPLAYMATRIX", "ICC_PROFILE")}
    found = {name: data.get(kind) for name, kind in wanted.items() if kind is not None}
    return {name: bytes(value) for name, value in found.items() if value is not None}


def _mirrored(side: dict[str, bytes]) -> bool:
    """Return whether the frame must be flipped top to bottom before it is rotated."""
    if "DISPLAYMATRIX" not in side:
        return False
    a, b, _, c, d = map(float, np.frombuffer(side["DISPLAYMATRIX"], np.int32)[:5])
    return a * d < b * c


def _is_srgb(side: dict[str, bytes]) -> bool:
    """Return whether there is no profile or sRGB's."""
    if "ICC_PROFILE" not in side:
        return True
    with suppress(ImageCms.PyCMSError, ImportError, OSError, ValueError, TypeError):
        return transform(side["ICC_PROFILE"], "RGB") is None
    return False


def _bright(frame: VideoFrame) -> bool:
    """Return whether a frame of floats has values above 1."""
    if "f32" not in frame.format.name:
        return False
    order = ">" if frame.format.name.endswith("be") else "<"
    rows = (np.frombuffer(p, f"{order}f4").reshape(p.height, -1)[:, : p.width] for p in frame.planes)
    return any(bool((row > 1).any()) for row in rows)
