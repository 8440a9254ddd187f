"""Zero-Waste VAE Decode, and Zero-Waste Decode to Video."""

from __future__ import annotations

import math
from contextlib import closing
from fractions import Fraction

from comfy_api.latest import InputImpl

from ..engine import InputError, log
from ..engine.extras.media.mp4 import Mp4Writer
from ..engine.extras.media.mp4_format import CODECS, NO_ALPHA, PIXELS, Format
from ..engine.extras.media.sound import write_sound
from ..engine.extras.output.patience import clear
from . import drafts, files
from .conversion import engine_vae, host_decode
from .frames import check_maker
from .host import EngineVAE, io
from .reports import Outcome
from .settings import Settings, from_widgets
from .widgets import MODELS, SEARCH, advanced, choice, count, report_output, schema, shared, switch, tiling_inputs

#: Frames of a host's own decode that go to the video encoder at once.
_PIECE = 8


class Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEDecode", "Zero-Waste VAE Decode", SEARCH, panel=True,
            description="Turns latents into frames or pictures, in place of ComfyUI's VAE Decode: without tile seams, "
            "within the memory you allow, and faster where this pack's kernels run. VAEs of "
            f"{MODELS} run on this pack's engine, all others by ComfyUI's own code. What Zero-Waste VAE Encode "
            "padded is cropped off again.",
            inputs=[
                shared("samples"), shared("vae"), shared("vram_gb"), advanced(shared("chunk")), *tiling_inputs(),
                shared("output"), shared("ram_gb", operation="decode"), shared("gpus"), shared("any_vae"),
                shared("keep_models"),
                switch("draft", "Draft", False, "Decodes by the tiny decoder of these latents (TAEHV, TAESD and their "
                       "like), in a fraction of the time, coarser. Its file lies in models/vae_approx; where none "
                       "fits, the run stops and names it. Off: the VAE itself."),
            ],
            outputs=[io.Image.Output(display_name="Images", tooltip="All frames, or all pictures."), report_output()],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, samples: dict, vae: object, any_vae: bool = False, draft: bool = False, **given: object
    ) -> io.NodeOutput:
        wishes, fast = from_widgets(**given), engine_vae(vae)
        if fast is None:
            if draft:
                drafts.check(drafts.HOST)
            images, outcome = host_decode(vae, samples["samples"], wishes)
            return io.NodeOutput(images, outcome.text(), ui=outcome.ui())
        check_maker(samples, fast.engine, any_vae)
        wishes = wishes.over(fast.settings)
        if draft:
            clip, outcome = drafts.draft(fast, samples["samples"], wishes)
        else:
            with drafts.film(fast, samples["samples"], wishes) as film:
                clip, outcome = fast.run_decode(samples["samples"], wishes, pictures=not film.plays)
            outcome.notes += film.notes
        cropped = fast.layout.crop(clip, samples)
        _note_crop(outcome, clip.shape[1:4], cropped.shape[1:4])
        return io.NodeOutput(cropped.flatten(0, 1), outcome.text(), ui=outcome.ui())


class DecodeToVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEDecodeToVideo", "Zero-Waste Decode to Video",
            ["long video", "save video", "stream", "host memory", "ram", "mp4", *SEARCH], panel=True,
            description="Turns latents into a video file, frame by frame as they are made: a clip of any length takes "
            "the same host memory, where Zero-Waste VAE Decode holds all frames. The video goes to Save Video or to "
            "any node that takes one; it lies in ComfyUI's temp folder until then. The frames are those of "
            "Zero-Waste VAE Decode, in 8 or 10 bits.",
            inputs=[
                shared("samples"), shared("vae"),
                io.Float.Input("fps", display_name="Frames per second", default=24.0, min=0.01, max=1000.0, step=0.01,
                               tooltip="Frame rate of the video."),
                choice("codec", "Codec", list(CODECS), "h264",
                               "h264 plays everywhere; h265 and av1 make smaller files and take longer.", False),
                count("crf", "Quality (CRF), 0 = best", 63, "Constant quality: the larger, the smaller the "
                              "file and the less it keeps. h264 and h265 take 0 to 51, av1 0 to 63.", default=12),
                choice("pixels", "Pixel format", list(PIXELS), "yuv420p", "yuv420p plays everywhere; yuv444p keeps "
                       "colours at full size, and av1 has the 420 formats only. Those that end with 10 have 10 bits "
                       "per channel.", False),
                shared("vram_gb"), advanced(shared("chunk")), *tiling_inputs(),
                shared("ram_gb", operation="decode"),
                io.Audio.Input("audio", display_name="Audio", optional=True,
                               tooltip="Sound for the video, cut to its length."),
                shared("gpus"), shared("any_vae"),
            ],
            outputs=[io.Video.Output(display_name="Video", tooltip="The file, for Save Video."), report_output()],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, samples: dict, vae: object, fps: float, codec: str, crf: int, pixels: str, audio: dict | None = None,
        any_vae: bool = False, **given: object,
    ) -> io.NodeOutput:  # fmt: skip
        if not math.isfinite(fps):  # of a link, which no widget bounds
            raise InputError(f"Frames per second are {fps}: give a number above 0")
        form = Format(Fraction(fps).limit_denominator(1001), codec, crf, pixels)
        wishes, fast = from_widgets(**given), engine_vae(vae)
        if fast is not None:
            check_maker(samples, fast.engine, any_vae)
        path, sound = files.temporary_file(".mp4"), None if audio is None else files.temporary_file(".wav")
        writer, whole = Mp4Writer(path, form), False
        try:
            if audio is not None:  # first: if it fails, no frames are lost with it
                write_sound(sound, audio["waveform"], int(audio["sample_rate"]))
            with writer:
                if fast is None:
                    images, outcome = host_decode(vae, samples["samples"], wishes)
                    for piece in images.split(_PIECE):
                        writer.write(piece)
                else:
                    outcome = _stream(fast, samples, wishes.over(fast.settings), writer, form.deep)
            whole = True
            writer.finish(sound)
        except BaseException:
            if whole:
                log.warn(f"{writer.part}: has all frames of this decode, until ComfyUI starts again")
            else:
                writer.discard()
            raise
        finally:
            if sound is not None:
                clear(sound)
        if writer.transparent:
            outcome.notes.append(f"{NO_ALPHA}: Zero-Waste VAE Decode with Save Image writes PNGs, which have it")
        outcome.notes.append(f"{writer.done} frames at {float(form.fps):g} per second, {codec} {pixels}: {path.name}")
        shown = {"images": [{"filename": path.name, "subfolder": "", "type": "temp"}], "animated": (True,)}
        return io.NodeOutput(InputImpl.VideoFromFile(str(path)), outcome.text(), ui=outcome.ui() | shown)


def _stream(vae: EngineVAE, samples: dict, settings: Settings, writer: Mp4Writer, deep: bool) -> Outcome:
    """Write a latent's frames to the writer as they are made."""
    latent, engine = vae.layout.latent(samples["samples"]), vae.engine
    if latent.shape[0] > 1 and not vae.layout.still:
        raise InputError(f"The latent holds {latent.shape[0]} clips and a video is one: give them one by one")
    size, s = vae.layout.latent_size(latent.shape), engine.spatial
    made = engine.frames(latent.shape[2]), s * latent.shape[3], s * latent.shape[4]
    count, height, width = shown = vae.layout.unpadded(made, samples)
    with (
        drafts.film(vae, samples["samples"], settings) as film,
        vae.running("decode", size, settings, {"output": "float32" if deep else "uint8"}) as run,
        closing(engine.stream(latent, frames=count, any_vae=True, **run.options)) as pieces,
    ):
        for piece in pieces:
            writer.write(piece[0, :, :height, :width])
    outcome = vae.outcome(run, size, settings)
    outcome.notes += film.notes
    _note_crop(outcome, made, shown)
    return outcome


def _note_crop(outcome: Outcome, made: tuple[int, ...], shown: tuple[int, ...]) -> None:
    if made != shown:
        outcome.notes.append(f"cropped to {shown[0]} frames of {shown[2]}x{shown[1]}")
