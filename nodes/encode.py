"""Zero-Waste VAE Encode."""

from __future__ import annotations

from torch import Tensor

from . import frames
from .host import io
from .settings import from_widgets
from .widgets import CATEGORY, engine_vae, tiling_inputs, vram_input


class Encode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ZeroWasteVAEEncode",
            display_name="Zero-Waste VAE Encode",
            category=CATEGORY,
            description="Encodes the frames of one clip. Any size and length: frames are padded to multiples of 16 "
            "pixels and to 4n+1 in number; Zero-Waste VAE Decode crops that off again.",
            inputs=[io.Image.Input("pixels"), io.Vae.Input("vae"), vram_input(), *tiling_inputs()],
            outputs=[io.Latent.Output(), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, pixels: Tensor, vae: object, vram_gb: float = 0.0, **tiling: object) -> io.NodeOutput:
        vae = engine_vae(vae)
        settings = from_widgets(vram_gb=vram_gb, **tiling).over(vae.settings)
        clip = frames.as_clip(pixels)
        size = tuple(clip.shape[1:4])
        latent, report = vae.run_encode(frames.pad_clip(clip, vae.engine.temporal), settings)
        return io.NodeOutput({"samples": latent, frames.CLIP_SIZE: size}, report)
