"""Read the sound of video files through PyAV, and write WAV files."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import InputError


def read_sound(source: str | Path | BinaryIO, begins: float = 0.0, lasts: float = 0.0) -> tuple[Tensor, int] | None:
    """Return the first sound of a file (or of an open one): samples [channels, n] in -1..1 and their rate per second.

    Args:
        begins, lasts: seconds of the wanted part; lasts 0: to the end.

    Returns:
        None if the file has no sound, or none in that part.

    Raises:
        av.FFmpegError: the file is no media file.
    """
    import av

    if not isinstance(source, (str, Path)):
        source.seek(0)
    parts: list[Tensor] = []
    with av.open(str(source) if isinstance(source, Path) else source) as file:
        if not file.streams.audio:
            return None
        stream = file.streams.audio[0]
        rate, resampler = stream.rate, av.AudioResampler(format="fltp")
        first, end = round(begins * rate), round((begins + lasts) * rate) if lasts else None
        at = None
        for frame in file.decode(stream):
            if at is None:  # in the file's clock; sound may begin later than the pictures
                at = round(float(frame.time or 0.0) * rate)
                if at > first:
                    missing = min(at, at if end is None else end) - first
                    parts.append(torch.zeros(stream.channels, missing, dtype=torch.float32, device="cpu"))
            for piece in resampler.resample(frame):
                samples = torch.from_numpy(piece.to_ndarray())
                parts.append(samples[:, max(0, first - at) : None if end is None else max(0, end - at)].clone())
                at += samples.shape[1]
            if end is not None and at >= end:
                break
    sound = torch.cat(parts, 1) if parts else torch.empty(0, 0, dtype=torch.float32, device="cpu")
    return (sound, rate) if sound.numel() else None


def write_sound(path: Path, sound: Tensor, rate: int) -> None:
    """Write the first sound of a batch [batch, channels, samples] in -1..1 to a WAV file of 16-bit samples, `rate` of
    them a second. Raises InputError on other shapes."""
    if sound.ndim != 3 or min(*sound.shape[:2], rate) < 1:
        raise InputError("The audio is no sound: connect [batch, channels, samples] of at least 1 sample a second, not "
                         f"{list(sound.shape)} of {rate}")  # fmt: skip
    waves = sound[0].float().clamp(-1, 1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(waves.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        for part in waves.split(1 << 20, 1):
            file.writeframes(part.mul(32767).round_().to(torch.int16).t().contiguous().cpu().numpy().tobytes())
