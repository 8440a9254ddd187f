"""Zero-Waste VAE Optimize."""

from __future__ import annotations

from ..engine.loader import PRECISIONS
from . import host
from .host import EngineVAE, io
from .settings import from_widgets
from .widgets import CATEGORY, chunk_input, precision_input, tiling_inputs, vram_input


class Optimize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ZeroWasteVAEOptimize",
            display_name="Zero-Waste VAE Optimize",
            category=CATEGORY,
            description="Gives a VAE to the engine, with the precision, VRAM target and tiling it is to run with. "
            "The VAE that goes in stays as it is; one whose network the engine does not know comes out unchanged, and "
            "the report says so.",
            inputs=[
                io.Vae.Input("vae"),
                precision_input(["auto", *PRECISIONS]),
                vram_input(),
                chunk_input(),
                *tiling_inputs(),
            ],
            outputs=[io.Vae.Output(), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls, vae: object, precision: str = "auto", vram_gb: float = 0.0, chunk: int = 0, **tiling: object
    ) -> io.NodeOutput:
        wishes = from_widgets(chunk=chunk, vram_gb=vram_gb, **tiling)
        convert = host.with_precision if isinstance(vae, EngineVAE) else host.from_host_vae
        fast = convert(vae, precision)
        if fast is None:
            network = type(vae.first_stage_model).__name__
            return io.NodeOutput(vae, f"{network}: not a video VAE the engine knows; the VAE is passed on unchanged")
        fast = fast.with_settings(wishes.over(fast.settings))
        engine = fast.engine
        report = f"{engine.arch} in {engine.precision} on {fast.device}; {fast.settings.describe()}"
        return io.NodeOutput(fast, report)
