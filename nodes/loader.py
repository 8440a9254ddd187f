"""Zero-Waste VAE Loader."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ..engine import demo_vae_path, log, read_checkpoint
from ..engine.archs import WORDS, by_file, detect
from ..engine.loader import NAMES, stored_groups
from . import folders, making
from .host import io
from .planning import KNOWN
from .reports import ui
from .settings import Settings
from .toggles import without_optimisations
from .widgets import MODELS, advanced, precision_input, report_output, schema, vram_input

DEMO = "demo (small)"
#: Longest the list of files waits for the headers of new ones.
HEADERS_SECONDS = 0.5


# Headers are read apart from the list that is asked for: a folder of many large files must not hold up the server.
_reader = ThreadPoolExecutor(1, "zerowaste-headers")
_read: set[tuple[str, int, int]] = set()
#: File -> whether it holds a VAE of the engine's; of files that were not read yet, nothing.
_kinds: dict[str, bool] = {}


def listed() -> list[str]:
    """Files the loader offers, those first that it can run; the planner gets to know them from their headers.

    The demo VAE stands before files that cannot run: the first entry is what a new node starts with.
    """
    files = folders.vae_files()
    read = _reader.submit(_learn, [*files, DEMO])
    # Headers are read within milliseconds; a slow disk's come with the next list.
    wait([read], HEADERS_SECONDS)
    runs = [name for name in files if _runs(name)]
    return [*runs, DEMO, *(name for name in files if name not in runs)]


def _runs(name: str) -> bool:
    return _kinds[name] if name in _kinds else by_file(name) is not None


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
            _kinds[name] = architecture is not None
            if architecture is None:
                KNOWN.learn(name, None, None)
            else:
                shapes = {key: tuple(t.shape) for key, t in header.tensors.items()}
                config = architecture.config_of(shapes, header.metadata, stored_groups(header))
                KNOWN.learn(name, architecture.of(config), config)
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
                precision_input(list(NAMES)),
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
        vae = making.from_file(_path(vae_name), precision, norm_groups or None, settings, vae_name)
        if not optimise:
            vae = vae.with_wishes(settings, without_optimisations())
        return io.NodeOutput(vae, report := vae.describe(), ui=ui(report))
