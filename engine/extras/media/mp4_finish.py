"""Turn the part file of a finished clip into the final MP4: in one piece, with sound.

ffmpeg gets absolute paths, because it takes the part before a colon for a protocol.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ... import log
from ...errors import InputError
from .latents import check_file
from .sound import SLACK, Piece, begin, jumps, pieces
from .streams import readable

if TYPE_CHECKING:
    from av import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer, OutputContainer

#: Sound codecs that an MP4 takes over unchanged.
SOUNDS = frozenset({"aac", "ac3", "alac", "eac3", "flac", "mp3", "opus"})


def check_audio(path: str | Path) -> None:
    """Raise InputError if a file has no sound to take over."""
    import av

    check_file(Path(path))
    try:
        with av.open(os.path.abspath(path)) as container:
            if not container.streams.audio:
                raise InputError(f"{path}: holds no audio stream")
    except (av.FFmpegError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def finish_file(part: Path, target: Path, audio: str | Path | None, start: Fraction, seconds: Fraction) -> None:
    """Write everything in one piece, with times from 0 on and the index first. Raises OSError, and InputError if the
    sound cannot be read."""
    import av

    try:
        _joined(part, target, audio, start, seconds)
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        said = f"cannot be taken into an MP4 ({error.strerror})"
        raise InputError(f"{audio}: {said}; give other sound, or none" if audio else f"{part}: {said}") from error


def _joined(part: Path, target: Path, audio: str | Path | None, start: Fraction, seconds: Fraction) -> None:
    import av

    front = {"movflags": "+faststart"}
    with ExitStack() as stack:
        source = stack.enter_context(_opened(part))
        sound = None if audio is None else stack.enter_context(_opened(audio))
        out = stack.enter_context(av.open(os.path.abspath(target), "w", format="mp4", options=front))
        streams = [_video(source, out, part)]
        if sound is not None:
            streams.append(_audio(sound, out, start, seconds, str(audio)))
        silent = sound is not None
        for _, number, packet in heapq.merge(*streams, key=lambda entry: entry[:2]):
            silent = silent and number == 0
            out.mux(packet)
        if silent:
            log.warn(f"{audio}: no sound of it can be read from second {float(start):g} on; the MP4 is silent")


def _opened(path: str | Path) -> InputContainer:
    import av

    with readable(path):  # else the output would be called unwritable
        return av.open(os.path.abspath(path))


def _each(items: Iterable[T], path: str | Path) -> Iterator[T]:
    with readable(path):
        yield from items


#: Samples a second for sound whose own rate AAC does not have.
_USUAL_RATE = 48_000
#: Layout by the number of channels: a WAV need not name its layout.
_LAYOUTS = {1: "mono", 6: "5.1", 8: "7.1"}
#: (second, number of the stream, packet).
_Timed = tuple[Fraction, int, Any]
T = TypeVar("T")


def _video(source: InputContainer, out: OutputContainer, part: Path) -> Iterator[_Timed]:
    given = source.streams.video[0]
    stream = out.add_stream_from_template(given, opaque=True)

    def packets() -> Iterator[_Timed]:
        first = None
        for packet in _each(source.demux(given), part):
            if packet.pts is None:  # the end
                continue
            first = packet.pts if first is None else first
            packet.pts, packet.dts = packet.pts - first, packet.dts - first
            packet.stream = stream
            yield packet.dts * packet.time_base, 0, packet

    return packets()


def _audio(
    source: InputContainer, out: OutputContainer, start: Fraction, seconds: Fraction, name: str
) -> Iterator[_Timed]:
    """Return the stream's sound of [start, start + seconds), counted from the file's first picture; it stays unchanged
    if an MP4 can hold it. Every packet keeps its time stamp, and every frame that is encoded anew."""
    given = source.streams.audio[0]
    if given.codec_context.codec.canonical_name in SOUNDS:
        stream = out.add_stream_from_template(given, opaque=True)
        return _copied(source, given, stream, start + begin(source), seconds, name)
    import av

    rate, rates = given.codec_context.sample_rate, av.Codec("aac", "w").audio_rates
    layout = _LAYOUTS.get(given.codec_context.channels, "stereo")
    stream = out.add_stream("aac", rate=rate if rate in rates else _USUAL_RATE, layout=layout)
    first, end = round(start * given.rate), round((start + seconds) * given.rate)
    return _encoded(given, stream, _each(pieces(source, name, first, end), name))


def _copied(
    source: InputContainer, given: AudioStream, stream: AudioStream, start: Fraction, seconds: Fraction, name: str
) -> Iterator[_Timed]:
    """Yield packets as they are, from second `start` of the file's clock on; those that overlap the one before are left
    out."""
    last, ends = -1, None
    for packet in _each(source.demux(given), name):
        if not packet.size:  # the end
            continue
        base = packet.time_base
        at = ends if packet.pts is None else packet.pts * base - start
        at = Fraction(0) if at is None else at
        if jumps(float(at), None if ends is None else float(ends), name):
            start += at - (ends or 0)
            at = ends or Fraction(0)
        if at >= seconds:
            return
        if ends is not None and at < ends - SLACK:
            continue
        ends = at + (packet.duration or 0) * base
        if at >= 0:
            packet.pts = packet.dts = last = max(round(at / base), last + 1)
            packet.stream = stream
            yield packet.pts * base, 1, packet


def _encoded(given: AudioStream, stream: AudioStream, pieces: Iterable[Piece]) -> Iterator[_Timed]:
    """Yield packets of samples from the first on, with silence where there are none."""
    import av

    context = stream.codec_context
    resampler = av.AudioResampler(context.format, context.layout, context.rate)

    def frames() -> Iterator[AudioFrame | None]:
        at = 0
        for silent, samples in pieces:
            if not at and not samples.size:  # the sound begins after this part
                return
            blank = np.zeros((given.channels, given.rate), np.float32)
            blanks = [blank[:, : min(given.rate, silent - n)] for n in range(0, silent, given.rate)]
            for part in filter(np.size, (*blanks, samples)):
                frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), "fltp", given.layout.name)
                frame.sample_rate, frame.pts, frame.time_base = given.rate, at, Fraction(1, given.rate)
                at += part.shape[1]
                yield from resampler.resample(frame)
        if at:
            yield from resampler.resample(None)
        yield None

    for frame in frames():
        for packet in stream.encode(frame):
            yield packet.dts * packet.time_base, 1, packet
