"""Zero-Waste VAE Loader."""

from __future__ import annotations

from ..engine.archs import WORDS
from . import making
from .folders import vae_files
from .headers import DEMO, listed, path_of
from .host import io
from .reports import ui
from .settings import Settings
from .toggles import without_optimisations
from .widgets import MODELS, advanced, precision_input, report_output, schema, vram_input


class Loader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAELoader",
            "Zero-Waste VAE Loader",
            ["load vae", "gguf vae", "video vae", *WORDS, "vae loader", "checkpoint"],
            description=f"Loads VAEs of {MODELS}: .safetensors or .gguf files of models/vae. Every node that takes a "
            "VAE works with them. For others use Load VAE, then Zero-Waste VAE Decode.",
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    display_name="VAE file",
                    options=listed(),
                    tooltip=f"A file of models/vae, or '{DEMO}': a reduced VAE that comes with this pack, for trying "
                    "things out.",
                ),
                precision_input(),
                advanced(vram_input()),
                advanced(
                    io.Int.Input(
                        "norm_groups",
                        display_name="Normalisation groups, 0 = auto",
                        default=0,
                        min=0,
                        max=512,
                        optional=True,
                        tooltip="Groups per normalisation, for files of unusual widths that do not name it. "
                        "0: from the file, else 32.",
                    )
                ),
                io.Boolean.Input(
                    "optimise",
                    display_name="Fast exact path",
                    default=True,
                    optional=True,
                    tooltip="The exact fast path: the fused kernels and what else costs no quality, for .gguf and "
                    ".safetensors alike. Never 8 bit by itself. Off: plain torch operators.",
                ),
            ],
            outputs=[io.Vae.Output(display_name="VAE", tooltip="For any node that takes a VAE."), report_output()],
        )

    @classmethod
    def fingerprint_inputs(cls, vae_name: str = "", **_: object) -> list[tuple[str, int, int]]:
        """Return the state of the file, so that a replaced file is loaded anew. A name that comes over a link is not
        known here: any file counts."""
        stats = [(path, path.stat()) for path in map(path_of, [vae_name] if vae_name else vae_files())]
        return [(str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats]

    @classmethod
    def execute(
        cls,
        vae_name: str,
        precision: str = "auto",
        vram_gb: float = 0.0,
        norm_groups: int = 0,
        optimise: bool = True,
    ) -> io.NodeOutput:
        settings = Settings(vram_gb=vram_gb)
        vae = making.from_file(path_of(vae_name), precision, norm_groups or None, settings, vae_name)
        if not optimise:
            vae = vae.with_wishes(settings, without_optimisations())
        return io.NodeOutput(vae, report := vae.describe(), ui=ui(report))
