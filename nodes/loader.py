"""Zero-Waste VAE Loader."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..engine import demo_vae_path, log, read_checkpoint
from ..engine.archs import detect
from ..engine.loader import NAMES, stored_groups
from . import folders, host
from .host import io
from .planning import KNOWN
from .reports import ui
from .settings import Settings
from .toggles import without_optimisations
from .widgets import advanced, precision_input, report_output, schema, vram_input

DEMO = "demo (small)"


# Headers are read apart from the list that is asked for: a folder of many large files must not hold up the server.
_reader = ThreadPoolExecutor(1, "zerowaste-headers")
_read: set[tuple[str, int, int]] = set()


def listed() -> list[str]:
    """Files the loader offers; the planner gets to know the VAEs among them from their headers."""
    names = [*folders.vae_files(), DEMO]
    _reader.submit(_learn, names)
    return names


def _learn(names: list[str]) -> None:
    for name in names:
        try:
            path = _path(name)
            stamp = (name, path.stat().st_mtime_ns, path.stat().st_size)
            if stamp in _read:
                continue
            _read.add(stamp)
            header = read_checkpoint(path, shapes_only=True)
            architecture = detect(header.tensors)
            if architecture is not None:
                shapes = {key: tuple(t.shape) for key, t in header.tensors.items()}
                KNOWN.learn(name, architecture, architecture.configure(shapes, stored_groups(header)))
        except Exception as error:  # one strange file must not keep the others from being read
            log.debug(f"{name}: no plans before it is loaded ({error})")


def _path(name: str) -> Path:
    return demo_vae_path() if name == DEMO else folders.vae_file(name)


class Loader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAELoader",
            "Zero-Waste VAE Loader",
            ["load vae", "gguf vae", "video vae", "seedvr2", "wan", "vae loader", "checkpoint"],
            description="Loads a video VAE from a .safetensors or .gguf file of models/vae. Every node that takes a "
            "VAE works with it.",
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=listed(),
                    tooltip=f"A file of models/vae, or '{DEMO}': a reduced VAE that comes with this pack, for trying "
                    "things out.",
                ),
                precision_input(list(NAMES)),
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
                io.Boolean.Input(
                    "optimise",
                    default=True,
                    optional=True,
                    tooltip="The exact fast path: the fused kernels and what else costs no quality, for .gguf and "
                    ".safetensors alike. Never 8 bit by itself. Off: plain torch operators.",
                ),
            ],
            outputs=[io.Vae.Output(), report_output()],
        )

    @classmethod
    def fingerprint_inputs(cls, vae_name: str, **_: object) -> tuple[str, int, int]:
        """A file that was replaced is loaded anew."""
        path = _path(vae_name)
        stat = path.stat()
        return str(path), stat.st_mtime_ns, stat.st_size

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
        vae = host.from_file(_path(vae_name), precision, norm_groups or None, settings, vae_name)
        if not optimise:
            vae = vae.with_wishes(settings, without_optimisations())
        return io.NodeOutput(vae, report := vae.describe(), ui=ui(report))
