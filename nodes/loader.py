"""Zero-Waste VAE Loader."""

from __future__ import annotations

from pathlib import Path

from ..engine import demo_vae_path
from ..engine.loader import PRECISIONS
from . import host
from .host import io
from .settings import Settings
from .widgets import CATEGORY, advanced, precision_input, vram_input

DEMO = "demo (small)"


def _path(name: str) -> Path:
    return demo_vae_path() if name == DEMO else host.vae_file(name)


class Loader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ZeroWasteVAELoader",
            display_name="Zero-Waste VAE Loader",
            category=CATEGORY,
            description="Loads a video VAE from a .safetensors or .gguf file of models/vae. Every node that takes a "
            "VAE works with it.",
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=[*host.vae_files(), DEMO],
                    tooltip=f"A file of models/vae, or '{DEMO}': a reduced VAE that comes with this pack, for trying "
                    "things out.",
                ),
                precision_input(["auto", *PRECISIONS]),
                advanced(vram_input()),
                advanced(
                    io.Int.Input(
                        "norm_groups",
                        default=0,
                        min=0,
                        max=512,
                        optional=True,
                        tooltip="Groups per normalisation, for files of unusual widths that do not name it. "
                        "0: from the file, else 32.",
                    )
                ),
            ],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def fingerprint_inputs(cls, vae_name: str, **_: object) -> tuple[str, int, int]:
        """A file that was replaced is loaded anew."""
        path = _path(vae_name)
        stat = path.stat()
        return str(path), stat.st_mtime_ns, stat.st_size

    @classmethod
    def execute(
        cls, vae_name: str, precision: str = "auto", vram_gb: float = 0.0, norm_groups: int = 0
    ) -> io.NodeOutput:
        return io.NodeOutput(host.from_file(_path(vae_name), precision, norm_groups or None, Settings(vram_gb=vram_gb)))
