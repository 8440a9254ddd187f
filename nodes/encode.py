"""Zero-Waste VAE Encode."""

from __future__ import annotations

from torch import Tensor

from . import frames
from .host import io
from .settings import from_widgets
from .widgets import engine_vae, report_output, schema, tiling_inputs, vram_input


class Encode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEEncode",
            "Zero-Waste VAE Encode",
            ["vae encode", "encode video", "tiled encode", "video to latent", "seedvr2", "wan"],
            description="Encodes the frames of one clip. Any size and length: frames are padded to multiples of 16 "
            "pixels and to 4n+1 in number; Zero-Waste VAE Decode crops that off again.",
            inputs=[io.Image.Input("pixels"), io.Vae.Input("vae"), vram_input(), *tiling_inputs()],
            outputs=[io.Latent.Output(), report_output()],
        )

    @classmethod
    def execute(cls, pixels: Tensor, vae: object, **widgets: object) -> io.NodeOutput:
        vae = engine_vae(vae)
        clip = frames.as_clip(pixels)
        size = tuple(clip.shape[1:4])
        padded = frames.pad_clip(clip, vae.engine.temporal)
        latent, outcome = vae.run_encode(padded, from_widgets(**widgets).over(vae.settings))
        if padded.shape != clip.shape:
            _, count, height, width, _ = padded.shape
            outcome.notes.append(f"padded to {count} frames of {width}x{height}")
        return io.NodeOutput({"samples": latent, frames.CLIP_SIZE: size}, outcome.text(), ui=outcome.ui())
