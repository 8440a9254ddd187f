"""Turn the part file of a finished clip into the final MP4: in one piece, with sound.

ffmpeg gets absolute paths, because it takes the part before a colon for a protocol.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import log
from ..errors import InputError
from .latents import check_file
from .streams import is_cover

if TYPE_CHECKING:
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
    part, target = os.path.abspath(part), os.path.abspath(target)
    with av.open(part) as source, av.open(target, "w", format="mp4", options=front) as out:
        sound = None if audio is None else av.open(os.path.abspath(audio))
        try:
            streams = [_video(source, out)]
            if sound is not None:
                streams.append(_audio(sound, out, start, seconds))
            silent = sound is not None
            for _, number, packet in heapq.merge(*streams, key=lambda entry: entry[:2]):
                silent = silent and number == 0
                out.mux(packet)
            if silent:
                log.warn(f"{audio}: no sound of it can be read from second {float(start):g} on; the MP4 is silent")
        finally:
            if sound is not None:
                sound.close()


#: Samples a second for sound whose own rate AAC does not have.
_USUAL_RATE = 48_000
#: Layout by the number of channels: a WAV need not name its layout.
_LAYOUTS = {1: "mono", 6: "5.1", 8: "7.1"}
#: (second, number of the stream, packet).
_Timed = tuple[Fraction, int, Any]


def _video(source: InputContainer, out: OutputContainer) -> Iterator[_Timed]:
    given = source.streams.video[0]
    stream = out.add_stream_from_template(given, opaque=True)

    def packets() -> Iterator[_Timed]:
        first = None
        for packet in source.demux(given):
            if packet.pts is None:  # the end
                continue
            first = packet.pts if first is None else first
            packet.pts, packet.dts = packet.pts - first, packet.dts - first
            packet.stream = stream
            yield packet.dts * packet.time_base, 0, packet

    return packets()


def _audio(source: InputContainer, out: OutputContainer, start: Fraction, seconds: Fraction) -> Iterator[_Timed]:
    """Return the stream's sound of [start, start + seconds), counted from the file's first picture; it stays unchanged
    if an MP4 can hold it."""
    import av

    given = source.streams.audio[0]
    start += _begin(source)
    copied = given.codec_context.codec.canonical_name in SOUNDS
    if copied:
        stream = out.add_stream_from_template(given, opaque=True)
    else:
        rate, rates = given.codec_context.sample_rate, av.Codec("aac", "w").audio_rates
        layout = _LAYOUTS.get(given.codec_context.channels, "stereo")
        stream = out.add_stream("aac", rate=rate if rate in rates else _USUAL_RATE, layout=layout)

    def cut(pieces: Iterator[Any]) -> Iterator[Any]:
        for piece in pieces:
            if piece.pts is None:
                continue
            at = piece.pts * piece.time_base - start
            if at >= seconds:
                return
            if at >= 0:
                piece.pts = round(at / piece.time_base)
                yield piece

    def packets() -> Iterator[_Timed]:
        if copied:
            for packet in cut(source.demux(given)):
                packet.dts = packet.pts
                packet.stream = stream
                yield packet.pts * packet.time_base, 1, packet
            return
        context = stream.codec_context
        resampler = av.AudioResampler(context.format, context.layout, context.rate)
        for frame in [*_each(cut(source.decode(given)), resampler), None]:
            for packet in stream.encode(frame):
                yield packet.dts * packet.time_base, 1, packet

    return packets()


def _begin(source: InputContainer) -> Fraction:
    """Return the time of a file's first picture, or of its beginning if it has none: in a transport stream rarely 0."""
    for stream in source.streams.video:
        if stream.start_time is not None and not is_cover(stream):
            return stream.start_time * stream.time_base
    return Fraction(source.start_time or 0, 1_000_000)


def _each(frames: Iterator[Any], resampler: Any) -> Iterator[Any]:
    for frame in frames:
        yield from resampler.resample(frame)
    yield from resampler.resample(None)
