"""Zero-Waste VAE Decode, and Zero-Waste Decode to Video."""

from __future__ import annotations

import math
import wave
from collections.abc import Iterator
from contextlib import ExitStack, closing
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from ..engine import InputError
from ..engine.media.mp4 import Mp4Writer
from ..engine.media.mp4_format import CODECS, NO_ALPHA, PIXELS, Format
from . import files, frames
from .conversion import CONVERTED, engine_vae, host_decode
from .encode import video_of
from .host import EngineVAE, io
from .reports import Outcome
from .settings import Settings, from_widgets
from .widgets import (
    MODELS,
    SEARCH,
    advanced,
    any_vae_input,
    chunk_input,
    gpus_input,
    output_input,
    parked_input,
    report_output,
    schema,
    tiling_inputs,
    vae_input,
    vram_input,
)


class Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEDecode",
            "Zero-Waste VAE Decode",
            SEARCH,
            panel=True,
            description="Turns latents into frames or pictures, in place of ComfyUI's VAE Decode: without tile seams, "
            "within the memory you allow, and faster where this pack's kernels run. VAEs of "
            f"{MODELS} run on this pack's engine, all others by ComfyUI's own code. What Zero-Waste VAE Encode padded "
            "is cropped off again.",
            inputs=[
                io.Latent.Input("samples", display_name="Latent", tooltip="From a sampler or an encode."),
                vae_input(),
                vram_input(),
                advanced(chunk_input()),
                *tiling_inputs(),
                output_input(),
                parked_input("decode"),
                gpus_input(),
                any_vae_input(),
            ],
            outputs=[io.Image.Output(display_name="Images", tooltip="All frames, or all pictures."), report_output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, samples: dict, vae: object, any_vae: bool = False, **widgets: object) -> io.NodeOutput:
        wishes, fast = from_widgets(**widgets), engine_vae(vae)
        if fast is None:
            images, outcome = host_decode(vae, samples["samples"], wishes)
            return io.NodeOutput(images, outcome.text(), ui=outcome.ui())
        frames.check_maker(samples, fast.engine, any_vae)
        clip, outcome = fast.run_decode(samples["samples"], wishes.over(fast.settings))
        if fast is not vae:
            outcome.notes.append(CONVERTED)
        filled = fast.engine.architecture.filled
        cropped = frames.crop_clip(clip, samples.get(frames.CLIP_SIZE), filled, fast.layout.multiple)
        if cropped.shape != clip.shape:
            _, count, height, width, _ = cropped.shape
            outcome.notes.append(f"cropped to {count} frames of {width}x{height}")
        return io.NodeOutput(cropped.flatten(0, 1), outcome.text(), ui=outcome.ui())


#: Frames of a host's own decode that go to the video encoder at once.
_PIECE = 8


class DecodeToVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEDecodeToVideo",
            "Zero-Waste Decode to Video",
            ["long video", "save video", "stream", "host memory", "ram", "mp4", *SEARCH],
            panel=True,
            description="Turns latents into a video file, frame by frame as they are made: a clip of any length takes "
            "the same host memory, where Zero-Waste VAE Decode holds all frames. The video goes to Save Video or to "
            "any node that takes one; it lies in ComfyUI's temp folder until then. The frames are those of "
            "Zero-Waste VAE Decode, in 8 or 10 bits.",
            inputs=[
                io.Latent.Input("samples", display_name="Latent", tooltip="From a sampler or an encode."),
                vae_input(),
                io.Float.Input("fps", display_name="Frames per second", default=24.0, min=0.01, max=1000.0, step=0.01,
                               tooltip="Frame rate of the video."),
                io.Combo.Input("codec", display_name="Codec", options=list(CODECS), default="h264",
                               tooltip="h264 plays everywhere; h265 and av1 make smaller files and take longer."),
                io.Int.Input("crf", display_name="Quality (CRF), 0 = best", default=12, min=0, max=63,
                             tooltip="Constant quality: the larger, the smaller the file and the less it keeps. h264 "
                             "and h265 know 0 to 51, av1 0 to 63."),
                io.Combo.Input("pixels", display_name="Pixel format", options=list(PIXELS), default="yuv420p",
                               tooltip="yuv420p plays everywhere. yuv444p keeps colours at full size, the ones with 10 "
                               "at the end 10 bits per channel. av1 knows the 420 ones only."),
                vram_input(),
                advanced(chunk_input()),
                *tiling_inputs(),
                parked_input("decode"),
                io.Audio.Input("audio", display_name="Audio", optional=True, tooltip="Sound for the video, cut to its "
                               "length."),
                gpus_input(),
                any_vae_input(),
            ],
            outputs=[io.Video.Output(display_name="Video", tooltip="The file, for Save Video."), report_output()],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, samples: dict, vae: object, fps: float, codec: str, crf: int, pixels: str, audio: dict | None = None,
        any_vae: bool = False, **widgets: object,
    ) -> io.NodeOutput:  # fmt: skip
        if not math.isfinite(fps):  # of a link, which no widget bounds
            raise InputError(f"Frames per second are {fps}: give a number above 0")
        form = Format(Fraction(fps).limit_denominator(1001), codec, crf, pixels)
        wishes, fast = from_widgets(**widgets), engine_vae(vae)
        if fast is not None:
            frames.check_maker(samples, fast.engine, any_vae)
        path, sound = files.temporary_file(".mp4"), None if audio is None else files.temporary_file(".wav")
        writer = Mp4Writer(path, form)
        try:
            if audio is not None:  # first: if it fails, no frames are lost with it
                _write_sound(audio, sound)
            with writer:
                if fast is None:
                    images, outcome = host_decode(vae, samples["samples"], wishes)
                    for piece in images.split(_PIECE):
                        writer.write(piece)
                else:
                    outcome = _decode(fast, samples, wishes.over(fast.settings), writer, form.deep)
            writer.finish(sound)
        finally:
            writer.discard()
            if sound is not None:
                sound.unlink(missing_ok=True)
        if fast is not vae and fast is not None:
            outcome.notes.append(CONVERTED)
        if writer.transparent:
            outcome.notes.append(f"{NO_ALPHA}: Zero-Waste VAE Decode with Save Image writes PNGs, which have it")
        outcome.notes.append(f"{writer.done} frames at {float(form.fps):g} per second, {codec} {pixels}: {path.name}")
        shown = {"images": [{"filename": path.name, "subfolder": "", "type": "temp"}], "animated": (True,)}
        return io.NodeOutput(video_of(str(path)), outcome.text(), ui=outcome.ui() | shown)


def _decode(vae: EngineVAE, samples: dict, settings: Settings, writer: Mp4Writer, deep: bool) -> Outcome:
    """Write a latent's frames to the writer as they are made."""
    latent, engine = vae.layout.latent(samples["samples"]), vae.engine
    if latent.shape[0] > 1 and not vae.layout.still:
        raise InputError(f"The latent holds {latent.shape[0]} clips and a video is one: give them one by one")
    size, s = vae.layout.latent_size(latent.shape), engine.spatial
    made = engine.frames(latent.shape[2]), s * latent.shape[3], s * latent.shape[4]
    was, filled = samples.get(frames.CLIP_SIZE), engine.architecture.filled
    count, height, width = frames.unpadded(made, was, filled, vae.layout.multiple)
    options = {**settings.options(), "output": "float32" if deep else "uint8"}
    with vae.running("decode", size, options, gpus=settings.gpus) as run, ExitStack() as stack:
        for piece in stack.enter_context(closing(engine.stream(latent, frames=count, any_vae=True, **run.options))):
            writer.write(piece[0, :, :height, :width])
    outcome = vae.outcome(run, size, settings)
    if (count, height, width) != made:
        outcome.notes.append(f"cropped to {count} frames of {width}x{height}")
    return outcome


def _write_sound(audio: dict, path: Path) -> None:
    """Write AUDIO to a WAV file of 16-bit samples."""
    given, rate = audio["waveform"], int(audio["sample_rate"])
    if given.ndim != 3 or min(*given.shape[:2], rate) < 1:
        raise InputError("The audio is no sound: connect [batch, channels, samples] of at least 1 sample a second, not "
                         f"{list(given.shape)} of {rate}")  # fmt: skip
    wave_form = given[0].float().clamp(-1, 1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(wave_form.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        for part in _parts(wave_form):
            file.writeframes(part.mul(32767).round_().to(torch.int16).t().contiguous().cpu().numpy().tobytes())


def _parts(wave_form: Tensor) -> Iterator[Tensor]:
    yield from wave_form.split(1 << 20, 1)
