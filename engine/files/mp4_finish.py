"""From the part file of a finished clip to the MP4 that people get: in one piece, with sound."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from av.container import InputContainer, OutputContainer

#: Of sound those that an MP4 takes over as they are.
SOUNDS = frozenset({"aac", "ac3", "alac", "eac3", "flac", "mp3", "opus"})


def check_audio(path: str | Path) -> None:
    """Raises InputError where a file has no sound to take over."""
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.audio:
                raise InputError(f"{path}: holds no audio stream")
    except (av.FFmpegError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def finish_file(part: Path, target: Path, audio: str | Path | None, start: Fraction, seconds: Fraction) -> None:
    """Everything in one piece, from 0 on, the index in front."""
    import av

    front = {"movflags": "+faststart"}
    with av.open(str(part)) as source, av.open(str(target), "w", format="mp4", options=front) as out:
        sound = None if audio is None else av.open(str(audio))
        try:
            streams = [_video(source, out)]
            if sound is not None:
                streams.append(_audio(sound, out, start, seconds))
            for _, _, packet in heapq.merge(*streams, key=lambda entry: entry[:2]):
                out.mux(packet)
        finally:
            if sound is not None:
                sound.close()


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
    """The sound of [start, start + seconds), as it is where an MP4 takes that."""
    import av

    given = source.streams.audio[0]
    copied = given.codec_context.name in SOUNDS
    rate = given.codec_context.sample_rate
    stream = out.add_stream_from_template(given, opaque=True) if copied else out.add_stream("aac", rate=rate)

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


def _each(frames: Iterator[Any], resampler: Any) -> Iterator[Any]:
    for frame in frames:
        yield from resampler.resample(frame)
    yield from resampler.resample(None)
