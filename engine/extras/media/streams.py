"""Read a container's facts about its video, and its frames: the stream to read, its pace, damaged frames."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

from ...errors import InputError
from .colours import unconverted
from .ffv1 import Checksums

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

#: Bytes that identify a text, and frames whose time stamps determine a rate.
HEAD, ENOUGH = 4096, 25
#: First bytes of pictures and videos that begin with words, or consist of text.
_HEADS = (b"YUV4MPEG2", b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"P7", b"PF", b"Pf", b"PH", b"Ph", b"#?R", b"SIMPLE",
          b"/* XPM", b"#define ")  # fmt: skip
#: Formats as which FFmpeg renders texts, as films of a terminal.
_TEXTS = frozenset({"tty", "bin", "xbin", "adf", "idf"})
#: FFmpeg's flag for streams that are only a part of a picture (PyAV 14 has no name for it).
_DEPENDENT = 0x80000
#: Brands of HEIC and AVIF files that hold a picture, and an animation.
_STILLS = frozenset({"heic", "heix", "mif1", "avif"})
_ANIMATIONS = frozenset({"hevc", "hevx", "msf1", "avis"})


@contextmanager
def readable(name: object) -> Iterator[None]:
    """Turn the system's errors in the body into InputError, with the name of the file that is read."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or error})") from error


def is_text(head: bytes) -> bool:
    """Return whether a file with this beginning is a text; this includes playlists, whose addresses must not be opened
    here."""
    if not head or head.startswith(_HEADS) or any(byte < 32 and byte not in b"\t\n\f\r\x1b" for byte in head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:  # the last letter may be cut off
        return error.reason == "unexpected end of data"
    return True


def chosen(container: InputContainer, name: str) -> VideoStream:
    """Return the stream to read. Raises InputError, with the source's `name`, if none can be read."""
    if container.format.name in _TEXTS:
        raise InputError(f"{name}: cannot be read as a video or an image: it is a text")
    streams = [s for s in container.streams.video if not is_cover(s)]
    if not streams:
        raise InputError(f"{name}: holds no video stream")
    tiles = sum(bool(s.disposition.value & _DEPENDENT) for s in streams)
    if tiles:
        raise InputError(f"{name}: is a picture in {tiles} tiles, as phones write HEIC and AVIF, which are not put "
                         "together here; save it as PNG or JPEG first")  # fmt: skip
    brands = _brands(container)
    if brands & _ANIMATIONS and any(s.frames > 1 for s in streams):  # a still beside it comes first
        return max(streams, key=lambda s: s.frames)
    if brands & _STILLS:  # thumbnails may come first
        streams = [s for s in streams if s.disposition.value & 1] or streams
    return streams[0]


def _brands(container: InputContainer) -> set[str]:
    """Return the brands of a HEIC or AVIF file; none for files of other kinds."""
    major, others = (container.metadata.get(key, "") for key in ("major_brand", "compatible_brands"))
    pictures = major in _STILLS | _ANIMATIONS
    return {major, *(others[at : at + 4] for at in range(0, len(others), 4))} if pictures else set()


def is_cover(stream: VideoStream) -> bool:
    """Return whether a stream is the cover of a sound file, which is a video stream of one picture."""
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)


def announced(stream: VideoStream, fps: Fraction) -> int | None:
    """Return the number of frames that a file announces.

    A file that was trimmed without re-encoding (phones do so) holds more frames than it shows, and its duration counts
    the frames it shows.
    """
    if not stream.frames or stream.duration is None:
        return stream.frames or None
    shown = round(stream.duration * stream.time_base * fps)
    return shown if 0 < shown < stream.frames - 1 else stream.frames


class Decoded:
    """The frames of a stream. Pieces that cannot be decoded are left out, as in players.

    trouble: the problem of the latest frame, in words. lost: pieces of the file that gave an error. Raises
    av.error.InvalidDataError if the last piece is cut short: that frame would be half gray.
    """

    def __init__(self, container: InputContainer, stream: VideoStream) -> None:
        self._container, self._stream = container, stream
        self.trouble: str | None = None
        self.lost = 0

    def __iter__(self) -> Iterator[VideoFrame]:
        import av

        sums, damaged = Checksums() if self._stream.codec_context.name == "ffv1" else None, set()
        for packet, last in self._packets():
            # Inside a file this is a seam of joined recordings, and the decoded frames show whether they are complete.
            if packet.is_corrupt and last:
                raise av.error.InvalidDataError(errno.EIO, "the file is cut off or damaged")
            if sums is not None and sums.differ(packet):
                damaged.add(packet.pts)  # its frame comes later: threads decode several
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                self.lost += 1
                continue
            for frame in frames:
                self.trouble = None
                if frame.is_corrupt or frame.pts in damaged:
                    self.trouble = ("is damaged, and what lacks is made up by the decoder; those that follow, up to "
                                    "the next whole picture, may be wrong too (later ones are not "
                                    "listed)")  # fmt: skip
                yield frame

    def _packets(self) -> Iterator[tuple[Packet, bool]]:
        """Yield each packet, with whether it is the last one with data."""
        before = None
        for packet in self._container.demux(self._stream):
            if before is not None:
                yield before, packet.size == 0
            before = packet
        if before is not None:
            yield before, before.size > 0


class Pace:
    """Measures the rate at which frames follow each other, and whether it is constant; clocks of milliseconds round."""

    def __init__(self) -> None:
        self._first: Fraction | None = None
        self._last: Fraction | None = None
        self._least = self._most = None
        self._broken = False
        self._steps = 0

    def breaks(self, frame: VideoFrame) -> bool:
        """Return whether a frame comes at an unexpected time; true for at most one frame of a clip."""
        if frame.pts is None:
            return False
        now, before, broken = frame.pts * frame.time_base, self._last, self._broken
        self._last = now
        if before is None or broken:
            self._first = now if before is None else self._first
            return False
        step = now - before
        self._steps += 1
        self._least = step if self._least is None else min(step, self._least)
        self._most = step if self._most is None else max(step, self._most)
        self._broken = self._most > 1.5 * self._least
        return self._broken

    def other_than(self, fps: Fraction) -> Fraction | None:
        """Return the frames a second by the time stamps, if they are even and contradict `fps` by more than 2 %."""
        if self._broken or self._steps < 4 or self._last <= self._first:
            return None
        found = self._steps / (self._last - self._first)
        return None if abs(found / fps - 1) <= 0.02 else usual(found)

    def short_of(self, stream: VideoStream, fps: Fraction) -> str | None:
        """Return the gap after the last frame, in words, or None.

        A Matroska file that is cut off ends like a complete one, but its header says how long it was.
        """
        said = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
        if said is None or self._last is None:
            return None
        hours, minutes, seconds = map(float, said.groups())
        end, there = 3600 * hours + 60 * minutes + seconds, float(self._last + 1 / fps)
        return f"{end:.1f} seconds, its frames end at {there:.1f}" if end > there + 1 else None


def usual(rate: Fraction) -> Fraction:
    """Return the whole rate, or the television one, within 0.3 % of a measured rate; else the measured one."""
    whole = Fraction(round(rate))
    near = [r for r in (whole, whole * 1000 / 1001) if r and abs(rate / r - 1) < 0.003]
    return min(near, key=lambda r: abs(rate - r), default=rate.limit_denominator(1000))


def surprises(container: InputContainer, stream: VideoStream, frame: VideoFrame, colours: int = 3) -> Iterator[str]:
    """Yield the differences between these pixels and the picture in a player."""
    streams = [s for s in container.streams.video if not is_cover(s)]
    # In HEIC and AVIF files a gray stream beside the picture is its alpha channel, and an animation has a still.
    beside = [s for s in streams if s is not stream and s.frames == stream.frames] if _brands(container) else []
    apart = any((s.pix_fmt or "").startswith("gray") for s in beside)
    if len(streams) > 1 and not (apart or (stream.frames > 1 and _brands(container))):
        yield f"holds {len(streams)} video streams; the first is read"
    # FFmpeg's own decoder of VP9 leaves alpha out; a GIF's frames always have an alpha channel.
    alpha = any(c.is_alpha for c in frame.format.components) and stream.codec_context.name != "gif"
    if (alpha and colours < 4) or apart or stream.metadata.get("alpha_mode") == "1":
        yield "transparency is dropped, the colours below it are used"
    if frame.interlaced_frame:
        yield "is interlaced, and lines of two moments are taken as one frame; deinterlace it first (ffmpeg -vf bwdif)"
    if (stream.sample_aspect_ratio or 1) != 1:
        yield (f"its pixels are not square ({stream.sample_aspect_ratio}) and are taken as if they were: pictures come "
               "out narrower or wider than in a player; scale it first")  # fmt: skip
    context = stream.codec_context
    yield from unconverted(context.color_trc, context.color_primaries)
