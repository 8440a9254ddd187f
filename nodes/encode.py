"""Zero-Waste VAE Encode."""

from __future__ import annotations

from torch import Tensor

from ..engine import latent_note
from ..engine.archs import WORDS
from . import frames
from .conversion import CONVERTED, engine_vae, host_encode
from .host import io
from .settings import from_widgets
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
