"""Zero-Waste VAE Decode."""

from __future__ import annotations

from . import frames
from .host import io
from .settings import from_widgets
from .widgets import CATEGORY, chunk_input, engine_vae, tiling_inputs, vram_input


class Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ZeroWasteVAEDecode",
            display_name="Zero-Waste VAE Decode",
            category=CATEGORY,
            description="Decodes video latents within a VRAM target. What Zero-Waste VAE Encode padded is cropped "
            "off again.",
            inputs=[io.Latent.Input("samples"), io.Vae.Input("vae"), vram_input(), chunk_input(), *tiling_inputs()],
            outputs=[io.Image.Output(), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls, samples: dict, vae: object, vram_gb: float = 0.0, chunk: int = 0, **tiling: object
    ) -> io.NodeOutput:
        vae = engine_vae(vae)
        settings = from_widgets(chunk=chunk, vram_gb=vram_gb, **tiling).over(vae.settings)
        clip, report = vae.run_decode(samples["samples"], settings)
        cropped = frames.crop_clip(clip, samples.get(frames.CLIP_SIZE), vae.engine.temporal)
        if cropped.shape != clip.shape:
            _, count, height, width, _ = cropped.shape
            clip, report = cropped, f"{report}; cropped to {count} frames of {width}x{height}"
        return io.NodeOutput(clip.flatten(0, 1), report)
