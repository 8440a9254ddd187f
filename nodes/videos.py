"""Conversion from and to the host's VIDEO type."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import InputImpl

from ..engine.files.sound import read_sound


def video_of(path: str) -> object:
    """Return the host's VIDEO of a file."""
    return InputImpl.VideoFromFile(path)


def frames_of(video: object) -> tuple[object, Any, float, float]:
    """Return a VIDEO as (a path or an open file, None) or (images [F, H, W, C], their rate), with the start of its
    window in seconds and the window's length (0: all)."""
    if not isinstance(video, InputImpl.VideoFromFile):
        parts = video.get_components()
        return parts.images, parts.frame_rate, 0.0, 0.0
    window = getattr(video, "get_active_trim_window", lambda: (0.0, 0.0))
    return video.get_stream_source(), None, *window()


def sound_of(video: object, begins: float, lasts: float) -> dict[str, object] | None:
    """Return the AUDIO of a VIDEO from second `begins` of its file on, for `lasts` seconds; None where there is
    none."""
    if isinstance(video, InputImpl.VideoFromFile):
        sound = read_sound(video.get_stream_source(), begins, lasts)
        return sound and {"waveform": sound[0][None], "sample_rate": sound[1]}
    audio = video.get_components().audio
    if not audio:
        return None
    rate = audio["sample_rate"]
    first = round(begins * rate)
    return {"waveform": audio["waveform"][..., first : first + round(lasts * rate)], "sample_rate": rate}
