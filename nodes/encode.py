"""Zero-Waste VAE Encode, and Zero-Waste Encode from Video."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from comfy_api.latest import InputImpl
from torch import Tensor

from ..engine import InputError
from ..engine.archs import WORDS
from ..engine.media import latent_note
from ..engine.media.clips import Clip
from ..engine.media.sound import read_sound
from . import frames
from .conversion import CONVERTED, engine_vae, host_encode
from .host import EngineVAE, io
from .reports import Outcome
from .settings import Settings, from_widgets
from .widgets import (
    MODELS,
    advanced,
    chunk_input,
    gpus_input,
    parked_input,
    report_output,
    schema,
    tiling_inputs,
    vae_input,
    vram_input,
)


class Encode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEEncode",
            "Zero-Waste VAE Encode",
            ["vae encode", "encode video", "tiled encode", "video to latent", *WORDS, "oom", "vram"],
            panel=True,
            description=f"Turns frames or pictures into a latent, in place of ComfyUI's VAE Encode. VAEs of {MODELS} "
            "run on this pack's engine, all others by ComfyUI's own code. On the engine, what does not fill latents is "
            "padded: sides to multiples of 16 pixels (LTX: 32; image VAEs: 8, Flux.2 16), clips to so many frames as "
            "whole latents have; Zero-Waste VAE Decode crops that off again.",
            inputs=[
                io.Image.Input(
                    "pixels",
                    display_name="Images",
                    tooltip="The frames of one clip; for an image VAE pictures, each by itself.",
                ),
                vae_input(),
                vram_input(),
                *tiling_inputs(),
                # Saved workflows hold values in this order: new inputs come last.
                advanced(chunk_input()),
                parked_input("encode"),
                gpus_input(),
            ],
            outputs=[io.Latent.Output(display_name="Latent", tooltip="For a sampler or a decode."), report_output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, pixels: Tensor, vae: object, **widgets: object) -> io.NodeOutput:
        wishes, fast = from_widgets(**widgets), engine_vae(vae)
        notes = frames.strange(pixels)
        if fast is None:
            latent, outcome = host_encode(vae, pixels, wishes)
            outcome.notes += notes
            return io.NodeOutput({"samples": latent}, outcome.text(), ui=outcome.ui())
        clip = fast.layout.clip(pixels)
        size = tuple(clip.shape[1:4])
        padded = frames.pad_clip(clip, fast.engine.architecture.filled, fast.layout.multiple)
        latent, outcome = fast.run_encode(padded, wishes.over(fast.settings))
        outcome.report.repeated = padded.shape[1] - clip.shape[1]
        outcome.notes += notes
        if fast is not vae:
            outcome.notes.append(CONVERTED)
        if padded.shape != clip.shape:
            _, count, height, width, _ = padded.shape
            outcome.notes.append(f"padded to {count} frames of {width}x{height}")
        made = {"samples": latent, frames.CLIP_SIZE: size, frames.VAE_NOTE: latent_note.note_of(fast.engine)}
        return io.NodeOutput(made, outcome.text(), ui=outcome.ui())


#: The number of frames that a clip is planned for where its file does not state it.
_LONG = 1 << 12


class EncodeFromVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEEncodeFromVideo",
            "Zero-Waste Encode from Video",
            ["vae encode", "encode video", "video to latent", "long video", "host memory", "stream", *WORDS, "oom"],
            panel=True,
            description="Turns a video into a latent, reading its frames as they are needed: a clip of any length "
            "takes the same host memory, where Zero-Waste VAE Encode needs all frames as images. What does not fill "
            "latents is padded as there; Zero-Waste Decode to Video and Zero-Waste VAE Decode crop that off again.",
            inputs=[
                io.Video.Input("video", display_name="Video", tooltip="From Load Video, trimmed or not."),
                vae_input(),
                io.Int.Input("start", display_name="First frame", default=0, min=0, max=1 << 30,
                             tooltip="Frames in front of it are left out; counted from 0."),
                io.Int.Input("frames", display_name="Number of frames, 0 = all", default=0, min=0, max=1 << 30,
                             tooltip="How many to encode. Where they do not fill latents, the last one is repeated."),
                vram_input(),
                advanced(chunk_input()),
                *tiling_inputs(),
                parked_input("encode"),
            ],
            outputs=[
                io.Latent.Output(display_name="Latent", tooltip="For a sampler or a decode."),
                io.Float.Output(display_name="fps", tooltip="Frames per second of the video."),
                report_output(),
                io.Audio.Output(display_name="Audio", tooltip="Sound of the frames encoded, if there is one."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, video: object, vae: object, start: int, frames: int, **widgets: object) -> io.NodeOutput:
        wishes, fast = from_widgets(**widgets), engine_vae(vae)
        if min(start, frames) < 0:  # of a link, which no widget bounds
            raise InputError(f"First frame {start}, number of frames {frames}: neither can be below 0")
        clip = _Frames(video, start, frames, 4 if fast is not None and fast.engine.colours[0] == 4 else 3)
        if fast is None or fast.layout.still:
            read = [f.float() / 255 if f.dtype == torch.uint8 else f for f in clip]
            if not read:
                raise _nothing()
            given = Encode.execute(torch.stack(read), vae, **widgets)
            return io.NodeOutput(given[0], clip.fps, given[1], clip.sound(), ui=given.ui)
        latent, outcome = _encode(fast, clip, wishes.over(fast.settings))
        if fast is not vae:
            outcome.notes.append(CONVERTED)
        return io.NodeOutput(latent, clip.fps, outcome.text(), clip.sound(), ui=outcome.ui())


def _encode(vae: EngineVAE, clip: _Frames, settings: Settings) -> tuple[dict[str, object], Outcome]:
    filled, multiple = vae.engine.architecture.filled, vae.layout.multiple
    if clip.count is None and vae.engine.can_encode and vae.engine.model.encoder.program.unstreamed:
        clip.count = sum(1 for _ in clip)  # its plan needs the count, which no file of this kind states
    given = iter(clip)
    first = next(given, None)
    if first is None:
        raise _nothing()
    height, width = first.shape[:2]
    sides = (n + -n % multiple for n in (height, width))
    size = vae.layout.clip_size(1, clip.count or _LONG, *sides)
    with vae.running("encode", size, settings.options()) as run:
        padded = frames.padded(_again(first, given), filled, multiple)
        with closing(vae.engine.encode_stream(padded, **run.options)) as latents:
            latent = torch.cat(list(latents), 2)
    outcome = Outcome(vae.engine.last_report, run.loaded)
    made = outcome.report.clip
    if made[1:] != (clip.read, height, width):
        outcome.notes.append(f"padded to {made[1]} frames of {made[3]}x{made[2]}")
    outcome.report.repeated = made[1] - clip.read
    outcome.notes += clip.notes
    kept = {frames.CLIP_SIZE: (clip.read, height, width), frames.VAE_NOTE: latent_note.note_of(vae.engine)}
    return {"samples": vae.given_back(latent)} | kept, outcome


def _again(first: Tensor, rest: Iterator[Tensor]) -> Iterator[Tensor]:
    yield first
    yield from rest


def _nothing() -> InputError:
    return InputError("The video has no frames there: lower the first frame")


def _from(second: float, fps: float) -> int:
    """Return the number of the first frame that begins at this second or later; clocks of files round."""
    return max(0, math.ceil(second * fps - 1e-3))


class _Frames:
    """Frames [H, W, colours] of a VIDEO within its own limits, `count` of them from `start` on (0: all)."""

    def __init__(self, video: object, start: int, count: int, colours: int = 3) -> None:
        self._video = video
        source, rate, begins, lasts = frames_of(video)
        self._source: Iterable[Tensor] = source if rate is not None else Clip(source, colours)
        self._colours = colours
        self.fps = float(self._source.fps if rate is None else rate)
        total = len(source) if rate is not None else self._source.count
        if begins < 0:
            begins = max(0.0, (total or 0) / self.fps + begins)
        # The host takes frames that begin within the window.
        first = _from(begins, self.fps)
        last = _from(begins + lasts, self.fps) if lasts else None
        end = None if not count else first + start + count
        self._span = first + start, min((n for n in (last, end) if n is not None), default=None)
        #: The number of frames, if it is known.
        self.count = total and max(0, min(total, self._span[1] or total) - self._span[0])
        #: The number of frames read so far, and notes on them.
        self.read = 0
        self.notes: list[str] = []

    def sound(self) -> dict[str, object] | None:
        """Return the AUDIO of the frames that were read."""
        return sound_of(self._video, self._span[0] / self.fps, self.read / self.fps)

    def __iter__(self) -> Iterator[Tensor]:
        self.read = 0
        for frame in islice(self._source, *self._span):
            self.read += 1
            self.notes = self.notes or frames.strange(frame)
            yield frame[..., : self._colours]
        if isinstance(self._source, Clip):  # its time stamps are read
            self.fps = float(self._source.fps)


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
