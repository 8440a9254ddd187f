"""Read the sound of video files through PyAV, and write WAV files."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import log
from ...errors import InputError
from ..output.writing import naming
from .streams import is_cover

if TYPE_CHECKING:
    from av import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

#: Seconds by which a time stamp may differ from the end of the frame before it: clocks of milliseconds round, and less
#: than this is not heard as sound that is early or late. A lost packet of most codecs takes 20 ms or more.
SLACK = 0.015
#: Seconds by which time stamps may go back (an overlap, which is cut) or ahead (a hole, which is silent). Beyond them
#: another clock begins, as in recordings that were joined byte by byte.
BACK, AHEAD = 1.0, 3600.0
#: FFmpeg's flag for formats whose clock begins anywhere (PyAV has no name for it).
_ANY_CLOCK = 0x200


class Piece(NamedTuple):
    """Samples [channels, n] in -1..1, floats, and the number of silent ones before them."""

    silent: int
    samples: np.ndarray


def begin(source: InputContainer) -> Fraction:
    """Return the second, by a file's clock, at which its first picture begins. Where there is none it is the file's
    beginning: 0, or in formats such as transport streams, whose clock begins anywhere, that of the first packet."""
    for stream in source.streams.video:
        if stream.start_time is not None and not is_cover(stream):
            return stream.start_time * stream.time_base
    return Fraction(source.start_time or 0, 1_000_000) if source.format.flags & _ANY_CLOCK else Fraction(0)


def jumps(at: float, expected: float | None, name: str) -> bool:
    """Return whether sound stamped `at` follows another clock than that at whose end it is `expected` (None: it is the
    first), which is said with the source's name. Seconds."""
    there = at <= AHEAD if expected is None else -BACK <= at - expected <= AHEAD
    if not there:
        log.once(f"{name}: the time stamps of its sound jump; what follows is taken as it comes")
    return not there


def pieces(source: InputContainer, name: str, first: int, end: int | None) -> Iterator[Piece]:
    """Yield samples [first, end) of a file's first sound, counted from its first picture (end None: all that follow).

    Every frame lies where its time stamp says: holes and a late beginning are silent, and of what overlaps the first
    stays. A frame without a stamp follows the one before it. Frames that cannot be decoded are holes.

    Args:
        name: of the source, for messages.

    Raises:
        av.FFmpegError: the file cannot be read.
    """
    import av

    stream = source.streams.audio[0]
    rate, start, clock = stream.rate, begin(source), Fraction(0)
    at, done, lost = None, first, 0
    resampler = kind = None
    for frame in _decoded(source, stream):
        if frame is None:
            lost += 1
            continue
        if frame.pts is not None:
            stamped = round((frame.pts * frame.time_base - start + clock) * rate)
            if jumps(stamped / rate, None if at is None else at / rate, name):
                at = at or 0
                clock += Fraction(at - stamped, rate)
            elif at is None or abs(stamped - at) > SLACK * rate:
                at = stamped
        at = at or 0
        if end is not None and at >= end:
            break
        if kind != (now := (frame.format.name, frame.layout.name, frame.sample_rate)):
            kind, resampler = now, av.AudioResampler("fltp", stream.layout, rate)
        for part in resampler.resample(frame):
            samples = part.to_ndarray()
            own = samples[:, max(0, done - at) : None if end is None else max(0, end - at)]
            begins, at = max(at, done), at + samples.shape[1]
            if own.shape[1]:
                yield Piece(begins - done, own)
                done = begins + own.shape[1]
    if lost:
        log.warn(f"{name}: {lost} pieces of its sound cannot be decoded and are silent")
    if at is not None and end is not None and at >= end > done:  # the next sound begins after this part
        yield Piece(end - done, np.empty((stream.channels, 0), np.float32))


def _decoded(source: InputContainer, stream: AudioStream) -> Iterator[AudioFrame | None]:
    """Yield a stream's frames, and None for a packet that cannot be decoded."""
    import av

    for packet in source.demux(stream):
        try:
            yield from packet.decode()
        except av.error.InvalidDataError:
            yield None


def read_sound(source: str | Path | BinaryIO, begins: float = 0.0, lasts: float = 0.0) -> tuple[Tensor, int] | None:
    """Return the first sound of a file (or of an open one), by its time stamps (`pieces`): samples [channels, n] in
    -1..1 and their rate per second.

    Args:
        begins, lasts: seconds of the wanted part, counted from the first picture; lasts 0: to the end.

    Returns:
        None if the file has no sound, or none in that part or after it.

    Raises:
        av.FFmpegError: the file is no media file.
    """
    import av

    opened, name = source, "the video"
    if isinstance(source, (str, Path)):
        opened = name = str(source)
    else:
        source.seek(0)
    with av.open(opened) as file:
        if not file.streams.audio:
            return None
        stream = file.streams.audio[0]
        rate = stream.rate
        end = round((begins + lasts) * rate) if lasts else None
        nothing, parts = torch.zeros(1, 1, dtype=torch.float32, device="cpu"), list[Tensor]()
        for silent, samples in pieces(file, name, round(begins * rate), end):
            parts += [nothing.expand(stream.channels, silent), torch.from_numpy(samples)]
    return (torch.cat(parts, 1), rate) if parts else None


def write_sound(path: Path, sound: Tensor, rate: int) -> None:
    """Write the first sound of a batch [batch, channels, samples] in -1..1 to a WAV file of 16-bit samples, `rate` of
    them a second. Raises InputError on other shapes."""
    if sound.ndim != 3 or min(*sound.shape[:2], rate) < 1:
        raise InputError("The audio is no sound: connect [batch, channels, samples] of at least 1 sample a second, not "
                         f"{list(sound.shape)} of {rate}")  # fmt: skip
    waves = sound[0].float().clamp(-1, 1)
    with naming(path), wave.open(str(path), "wb") as file:
        file.setnchannels(waves.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        for part in waves.split(1 << 20, 1):
            file.writeframes(part.mul(32767).round_().to(torch.int16).t().contiguous().cpu().numpy().tobytes())
