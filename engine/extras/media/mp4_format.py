"""Encoders and pixel formats of an MP4, and their checks before the first frame."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from ...errors import InputError


@dataclass(frozen=True)
class Codec:
    """An encoder by its name in ffmpeg; crf: its default constant quality (0 best, `worst`); threads: most frames that
    it encodes at once (0: no limit)."""

    encoder: str
    crf: int
    worst: int
    options: dict[str, str] = field(default_factory=dict)
    tag: str | None = None
    threads: int = 0


CODECS = {
    # By default, PyAV makes its threads share each frame: 54 ms a frame of 1280x720 on 16 processors.
    "h264": Codec("libx264", 12, 51, {"preset": "medium"}, threads=16),
    # Closed groups of pictures, so that a resumed run can append one. The tag is the one that Apple reads.
    "h265": Codec("libx265", 14, 51, {"preset": "medium", "x265-params": "open-gop=0:log-level=error"}, "hvc1"),
    "av1": Codec("libsvtav1", 18, 63, {"preset": "8"}),
}
#: Warning for frames with a fourth channel.
NO_ALPHA = "an MP4 holds no transparency, and alpha is dropped"
#: Name -> (ffmpeg's name, it has 10 bits, its chroma has half the size).
PIXELS = {
    "yuv420p": ("yuv420p", False, True),
    "yuv444p": ("yuv444p", False, False),
    "yuv420p10": ("yuv420p10le", True, True),
    "yuv444p10": ("yuv444p10le", True, False),
}
#: Most frames a second; an MP4's clock cannot count many more.
FASTEST = 10_000


@dataclass(frozen=True)
class Format:
    """Parameters of frames in an MP4. Raises InputError for those that no encoder here supports."""

    fps: Fraction
    codec: str = "h264"
    crf: int | None = None
    pixels: str = "yuv420p"

    def __post_init__(self) -> None:
        import av

        object.__setattr__(self, "fps", Fraction(self.fps).limit_denominator(100_000))
        if not 0 < self.fps <= FASTEST:
            given = float(min(self.fps, 10 * FASTEST))
            raise InputError(f"frame rate {given:g}: must be above 0, and at most {FASTEST}")
        for name, value, known in (("codec", self.codec, CODECS), ("pixels", self.pixels, PIXELS)):
            if value not in known:
                raise InputError(f"{name}={value!r} is not one of {', '.join(known)}")
        codec = CODECS[self.codec]
        if codec.encoder not in av.codecs_available:
            there = [name for name, c in CODECS.items() if c.encoder in av.codecs_available]
            others = f"use codec {' or '.join(there)}" if there else "write a PNG folder"
            raise InputError(f"this PyAV build has no {codec.encoder} encoder: {others}")
        makes = {f.name for f in av.Codec(codec.encoder, "w").video_formats or ()}
        if makes and PIXELS[self.pixels][0] not in makes:
            fit = ", ".join(name for name, (own, *_) in PIXELS.items() if own in makes)
            raise InputError(f"{codec.encoder} does not make {self.pixels}: use {fit}")
        if self.crf is not None and not 0 <= self.crf <= codec.worst:
            raise InputError(f"crf={self.crf}: {self.codec} takes 0 (best) to {codec.worst}")

    @property
    def deep(self) -> bool:
        """Return whether it has 10 bits per channel, for which frames are best given as floats."""
        return PIXELS[self.pixels][1]
