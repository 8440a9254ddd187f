"""Zero-Waste VAE Encode, and Zero-Waste Encode from Video."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain, islice

import torch
from comfy_api.latest import InputImpl
from torch import Tensor

from ..engine import InputError
from ..engine.execution.video import Lasting
from ..engine.extras.media import latent_note
from ..engine.extras.media.clips import Clip
from ..engine.extras.media.sound import read_sound
from ..engine.families import WORDS
from .conversion import engine_vae, host_encode
from .frames import CLIP_SIZE, VAE_NOTE, strange
from .host import EngineVAE, io
from .reports import Outcome
from .settings import Settings, from_widgets
from .widgets import MODELS, advanced, choice, count, report_output, schema, shared, tiling_inputs

#: Choices of ComfyUI's own VAE Encode, in its words (after 0.38) -> what it passes to a VAE.
ENCODE_AS = {"Auto": None, "Video Frames": False, "Individual Images": True}
#: The number of frames that a clip is planned for where its file does not state it.
_LONG = 1 << 12


class Encode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEEncode", "Zero-Waste VAE Encode",
            ["vae encode", "encode video", "tiled encode", "video to latent", *WORDS, "oom", "vram"], panel=True,
            description="Turns frames or pictures into a latent, in place of ComfyUI's VAE Encode. VAEs of "
            f"{MODELS} run on this pack's engine, all others by ComfyUI's own code. On the engine, what does not fill "
            "latents is padded: sides to multiples of 16 pixels (LTX: 32; Stable Video Diffusion: 8; image VAEs: 8, "
            "16 with Flux.2, Mage-Flow and Qwen-Image 2.1, 32 with HunyuanImage), clips to so many frames as whole "
            "latents have; Zero-Waste VAE Decode crops that off again.",
            inputs=[
                io.Image.Input("pixels", display_name="Images",
                               tooltip="The frames of one clip; for an image VAE pictures, each by itself."),
                # Saved workflows hold values in this order: new inputs come last.
                shared("vae"), shared("vram_gb"), *tiling_inputs(), advanced(shared("chunk")),
                shared("ram_gb", operation="encode"), shared("gpus"),
                advanced(choice("encode_as", "Encode as", list(ENCODE_AS), "Auto", "What several images are to a video "
                                "VAE. Video Frames: one clip; Individual Images: pictures, each with a latent of its "
                                "own. Auto: as the VAE's model wants it, nearly always one clip. An image VAE always "
                                "takes pictures.")),
                shared("keep_models"),
            ],
            outputs=[io.Latent.Output(display_name="Latent", tooltip="For a sampler or a decode."), report_output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, pixels: Tensor, vae: object, encode_as: str = "Auto", **given: object) -> io.NodeOutput:
        wishes, fast, notes = from_widgets(**given), engine_vae(vae), strange(pixels)
        if encode_as not in ENCODE_AS:
            raise InputError(f"encode_as={encode_as!r} is not known: use one of {', '.join(ENCODE_AS)}")
        if fast is None:
            latent, outcome = host_encode(vae, pixels, wishes, ENCODE_AS[encode_as])
            made = {"samples": latent}
        else:
            clip = fast.clip(pixels, ENCODE_AS[encode_as])
            padded, size = fast.layout.pad(clip), tuple(clip.shape[1:4])
            latent, outcome = fast.run_encode(padded, wishes.over(fast.settings))
            made = _latent(fast, latent, outcome, tuple(padded.shape[1:4]), size)
        outcome.notes += notes
        return io.NodeOutput(made, outcome.text(), ui=outcome.ui())


class EncodeFromVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEEncodeFromVideo", "Zero-Waste Encode from Video",
            ["vae encode", "encode video", "video to latent", "long video", "host memory", "stream", *WORDS, "oom"],
            panel=True,
            description="Turns a video into a latent, reading its frames as they are needed: a clip of any length "
            "takes the same host memory, where Zero-Waste VAE Encode needs all frames as images. What does not fill "
            "latents is padded as there; Zero-Waste Decode to Video and Zero-Waste VAE Decode crop that off again.",
            inputs=[
                io.Video.Input("video", display_name="Video", tooltip="From Load Video, trimmed or not."),
                shared("vae"),
                count("start", "First frame", 1 << 30, "Frames before it are left out; counted from 0."),
                count("frames", "Number of frames, 0 = all", 1 << 30,
                              "How many to encode. Where they do not fill latents, the last one is repeated."),
                shared("vram_gb"), advanced(shared("chunk")), *tiling_inputs(), shared("ram_gb", operation="encode"),
            ],
            outputs=[
                io.Latent.Output(display_name="Latent", tooltip="For a sampler or a decode."),
                io.Float.Output(display_name="fps", tooltip="Frames per second of the video."),
                report_output(),
                io.Audio.Output(display_name="Audio", tooltip="Sound of the frames encoded, if there is one."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, video: object, vae: object, start: int, frames: int, **given: object) -> io.NodeOutput:
        wishes, fast = from_widgets(**given), engine_vae(vae)
        if min(start, frames) < 0:  # of a link, which no widget bounds
            raise InputError(f"First frame {start}, number of frames {frames}: neither can be below 0")
        clip = _Frames(video, start, frames, 4 if fast is not None and fast.engine.colours[0] == 4 else 3)
        if fast is None or fast.layout.still:
            read = torch.stack([f.float() / 255 if f.dtype == torch.uint8 else f for f in clip])
            done = Encode.execute(read, vae, **given)
            return io.NodeOutput(done[0], clip.fps, done[1], clip.sound(), ui=done.ui)
        latent, outcome = _encode(fast, clip, wishes.over(fast.settings))
        return io.NodeOutput(latent, clip.fps, outcome.text(), clip.sound(), ui=outcome.ui())


def _encode(vae: EngineVAE, clip: _Frames, settings: Settings) -> tuple[dict[str, object], Outcome]:
    """Encode the frames of a clip as they are read; return a LATENT and the outcome."""
    if clip.count is None and vae.engine.can_encode and vae.engine.model.encoder.program.unstreamed:
        clip.count = sum(1 for _ in clip)  # its plan needs the count, which no file of this kind states
    given = iter(clip)
    first = next(given)
    sides = vae.layout.padded_size(1, *first.shape[:2])[1:]
    size = vae.layout.clip_size(1, clip.count or _LONG, *sides)
    with vae.running("encode", size, settings) as run:
        padded = Lasting(vae.layout.padded(chain([first], given)))
        with closing(vae.engine.encode_stream(padded, **run.options)) as latents:
            latent = vae.layout.samples(torch.cat(list(latents), 2))
    outcome = Outcome(vae.engine.last_report, run.loaded, notes=vae.notes + run.notes())
    made = _latent(vae, vae.given_back(latent), outcome, outcome.report.clip[1:], (clip.read, *first.shape[:2]))
    outcome.notes += clip.notes
    return made, outcome


def _latent(
    vae: EngineVAE, latent: Tensor, outcome: Outcome, made: tuple[int, ...], size: tuple[int, ...]
) -> dict[str, object]:
    """Return a LATENT that says what it was made from, and report the padding. made, size: frames, height and width
    with and without it."""
    outcome.report.repeated = made[0] - size[0]
    if made != size:
        outcome.notes.append(f"padded to {made[0]} frames of {made[2]}x{made[1]}")
    return {"samples": latent, CLIP_SIZE: size, VAE_NOTE: latent_note.note_of(vae.engine)}


class _Frames:
    """Frames [H, W, colours] of a VIDEO within its own limits, `count` of them from `start` on (0: all). Raises
    InputError where there are none."""

    def __init__(self, video: object, start: int, count: int, colours: int = 3) -> None:
        self._video, self._colours = video, colours
        self._file, begins, lasts = isinstance(video, InputImpl.VideoFromFile), 0.0, 0.0
        if self._file:
            begins, lasts = getattr(video, "get_active_trim_window", lambda: (0.0, 0.0))()
            self._source: Iterable[Tensor] = Clip(video.get_stream_source(), colours)
            self.fps, total = float(self._source.fps), self._source.count
        else:
            parts = video.get_components()
            self._source, self.fps, total = parts.images, float(parts.frame_rate), len(parts.images)
        # Images that are no tensor may be a reader that fills one buffer again and again.
        self._copies = not self._file and not isinstance(self._source, Tensor)
        if begins < 0:
            begins = max(0.0, (total or 0) / self.fps + begins)
        # The host takes frames that begin within the window.
        first, ends = self._from(begins), []
        ends += [self._from(begins + lasts)] if lasts else []
        ends += [first + start + count] if count else []
        self._span = first + start, min(ends, default=None)
        #: The number of frames, if it is known.
        self.count = total and max(0, min(total, self._span[1] or total) - self._span[0])
        #: The number of frames read so far, and notes on them.
        self.read = 0
        self.notes: list[str] = []

    def _from(self, second: float) -> int:
        """Return the number of the first frame that begins at this second or later; clocks of files round."""
        return max(0, math.ceil(second * self.fps - 1e-3))

    def sound(self) -> dict[str, object] | None:
        """Return the AUDIO of the frames that were read; None where there is none."""
        begins, lasts = self._span[0] / self.fps, self.read / self.fps
        if self._file:
            sound = read_sound(self._video.get_stream_source(), begins, lasts)
            return sound and {"waveform": sound[0][None], "sample_rate": sound[1]}
        audio = self._video.get_components().audio
        if not audio:
            return None
        rate = audio["sample_rate"]
        first = round(begins * rate)
        return {"waveform": audio["waveform"][..., first : first + round(lasts * rate)], "sample_rate": rate}

    def __iter__(self) -> Iterator[Tensor]:
        self.read = 0
        for frame in islice(self._source, *self._span):
            self.read += 1
            self.notes = self.notes or strange(frame)
            yield (frame.clone() if self._copies else frame)[..., : self._colours]
        if not self.read:
            raise InputError("The video has no frames there: lower the first frame")
        if self._file:  # its time stamps are read
            self.fps = float(self._source.fps)
