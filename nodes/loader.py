"""Nodes that come first in a workflow: Zero-Waste VAE Loader, VAE Optimize and Demo Clip."""

from __future__ import annotations

from ..engine import CheckpointError
from ..engine.archs import WORDS
from ..engine.loader import demo_clip_path
from ..engine.media.clips import read_video
from . import conversion
from .conversion import check_vae, with_scoped_settings
from .files import DEMO, listed, path_of, vae_files
from .host import EngineVAE, io
from .reports import counted, ui
from .settings import Settings, from_widgets
from .widgets import (
    MODELS,
    SEARCH,
    advanced,
    chunk_input,
    options_from,
    precision_input,
    ram_input,
    report_output,
    schema,
    tiling_inputs,
    toggle_inputs,
    vae_input,
    vram_input,
    without_optimisations,
)


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
        vae = conversion.from_file(path_of(vae_name), precision, norm_groups or None, settings, vae_name)
        if not optimise:
            vae = vae.with_wishes(settings, without_optimisations())
        return io.NodeOutput(vae, report := vae.describe(), ui=ui(report))


_WISHES = ("vram_gb", "ram_gb", "chunk", "tiling", "tile", "overlap")


class Optimize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        toggles, later = toggle_inputs()
        return schema(
            "ZeroWasteVAEOptimize",
            "Zero-Waste VAE Optimize",
            [*SEARCH, "optimize vae", "vae speed", "low vram vae", "fp8 vae", "blackwell", "triton", "faster decode"],
            description="Makes every node that uses this VAE run it on this pack's engine: put it after Load VAE. The "
            "VAE that goes in stays as it is; one the engine does not know is passed on, and the report says so.",
            inputs=[
                vae_input(f"From any loader. VAEs of {MODELS} are given to the engine."),
                precision_input(),
                vram_input(),
                advanced(chunk_input()),
                *(advanced(widget) for widget in tiling_inputs()),
                *toggles,
                ram_input("Host memory a decode may take for what it parks there, in GB (2^30 bytes). 0: half of what "
                          "is free."),
                *later,
            ],
            outputs=[io.Vae.Output(display_name="VAE", tooltip="For any node that takes a VAE."), report_output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, vae: object, precision: str = "auto", min_db: float = 0.0, **widgets: object) -> io.NodeOutput:
        check_vae(vae)
        wishes = from_widgets(**{name: widgets.pop(name) for name in _WISHES if name in widgets})
        options = options_from(min_db, **widgets)
        convert = conversion.with_precision if isinstance(vae, EngineVAE) else conversion.from_host_vae
        fast = convert(vae, precision)
        if fast is None:
            vae, report = _scoped(vae, options)
        else:
            vae = fast.with_wishes(wishes.over(fast.settings), options)
            report = vae.describe()
        return io.NodeOutput(vae, report, ui=ui(report))


def _scoped(vae: object, options: object) -> tuple[object, str]:
    network = type(vae.first_stage_model).__name__
    scoped, names = with_scoped_settings(vae, options)
    report = f"{network}: not a VAE the engine knows, or changed by another node; "
    if names:
        return scoped, f"{report}its own network runs, with {' and '.join(names)} switched on during its calls only"
    return vae, f"{report}the VAE is passed on unchanged"


class DemoClip(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEDemoClip",
            "Zero-Waste Demo Clip",
            ["demo video", "sample clip", "test video", "example frames"],
            description="Frames of the short clip that comes with this pack, for trying things out on a fresh host.",
            inputs=[
                io.Int.Input(
                    "frames",
                    display_name="Frames",
                    default=9,
                    min=1,
                    max=1024,
                    tooltip="How many from its start; 4n+1 fill latents of most video VAEs.",
                )
            ],
            outputs=[
                io.Image.Output(display_name="Images", tooltip="The frames."),
                io.Float.Output(display_name="fps", tooltip="Frames per second."),
                report_output(),
            ],
        )

    @classmethod
    def execute(cls, frames: int) -> io.NodeOutput:
        path = demo_clip_path()
        if not path.is_file():
            raise CheckpointError(f"{path}: the demo clip is missing; install the pack again")
        images, fps = read_video(path, frames)
        count, height, width, _ = images.shape
        report = counted(f"{count} frames of {width}x{height} at {float(fps):g} frames per second, from {path.name}")
        return io.NodeOutput(images, float(fps), report, ui=ui(report))
