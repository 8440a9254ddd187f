"""Zero-Waste VAE Decode."""

from __future__ import annotations

from ..engine.archs import WORDS
from . import frames
from .conversion import CONVERTED, engine_vae, host_decode
from .host import io
from .settings import from_widgets
from .widgets import (
    MODELS,
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

#: Words that users search for when a decode is slow or does not fit.
SEARCH = [
    "vae decode", "decode video", "tiled decode", "latent to video", "long video", *WORDS,
    "oom", "out of memory", "vram", "memory", "tiled", "slow", "fast", "slow vae", "vae oom", "vae out of memory",
    *(f"{word} vae" for word in WORDS),
]  # fmt: skip


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
