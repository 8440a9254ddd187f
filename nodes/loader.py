"""Nodes that come first in a workflow: Zero-Waste VAE Loader, VAE Optimize and Demo Clip."""

from __future__ import annotations

from ..engine import CheckpointError
from ..engine.extras.media.clips import read_video
from ..engine.families import WORDS
from ..engine.loader import demo_clip_path
from ..engine.options import TOGGLES, Options
from . import conversion, files, widgets
from .fit import Unfit, unfit
from .host import EngineVAE, io
from .reports import counted, ui
from .settings import Settings, from_widgets
from .widgets import MODELS, advanced, count, report_output, schema, shared, switch, tiling_inputs


class Loader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAELoader", "Zero-Waste VAE Loader",
            ["load vae", "gguf vae", "video vae", *WORDS, "vae loader", "checkpoint"],
            description=f"Loads VAEs of {MODELS}: .safetensors or .gguf files of models/vae. Every node that "
            "takes a VAE works with them. For others use Load VAE, then Zero-Waste VAE Decode.",
            inputs=[
                io.Combo.Input("vae_name", display_name="VAE file", options=files.listed(), tooltip="A file of "
                               f"models/vae, or '{files.DEMO}': a reduced VAE that comes with this pack, for trying "
                               "things out."),
                shared("precision"), advanced(shared("vram_gb")),
                advanced(count(
                    "norm_groups", "Normalisation groups, 0 = auto", 512, "Groups per normalisation, for files of "
                    "unusual widths that do not name it. 0: from the file, else 32.", optional=True)),
                switch("optimise", "Fast exact path", True, "The fused kernels and all else that costs no "
                       "quality, for .gguf and .safetensors alike; never 8 bit by itself. Off: plain torch operators."),
            ],
            outputs=[io.Vae.Output(display_name="VAE", tooltip="For any node that takes a VAE."), report_output()],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, vae_name: str = "", **_: object) -> list[tuple[str, int, int]]:
        """Return the state of the file, which is loaded anew if replaced; of all files if a link gives the name."""
        stats = [(path, path.stat()) for path in map(files.path_of, [vae_name] if vae_name else files.vae_files())]
        return [(str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats]

    @classmethod
    def execute(
        cls, vae_name: str, precision: str = "auto", vram_gb: float = 0.0, norm_groups: int = 0, optimise: bool = True
    ) -> io.NodeOutput:
        settings, path = Settings(vram_gb=vram_gb), files.path_of(vae_name)
        try:
            vae = conversion.from_file(path, precision, norm_groups or None, settings, vae_name)
        except Unfit as error:
            return io.NodeOutput(conversion.host_file(path, vae_name), report := f"{vae_name}: {error}", ui=ui(report))
        if not optimise:
            vae = vae.with_wishes(settings, Options().switched(off=TOGGLES))
        return io.NodeOutput(vae, report := vae.describe(), ui=ui(report))


class Optimize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        toggles, later = widgets.toggle_inputs()
        words = ["optimize vae", "vae speed", "low vram vae", "fp8 vae", "blackwell", "triton", "faster decode"]
        return schema(
            "ZeroWasteVAEOptimize", "Zero-Waste VAE Optimize", [*widgets.SEARCH, *words],
            description="Makes every node that uses this VAE run it on this pack's engine: put it after Load VAE. The "
            "VAE at the input stays as it is; one the engine does not know is passed on, and the report says so.",
            inputs=[
                shared("vae", f"From any loader. VAEs of {MODELS} are given to the engine."),
                shared("precision"), shared("vram_gb"), advanced(shared("chunk")),
                *map(advanced, tiling_inputs()),
                *toggles,
                shared("ram_gb", "Host memory a decode may take for what it parks there, in GB (2^30 bytes). 0: half "
                       "of what is free."),
                *later,
            ],
            outputs=[io.Vae.Output(display_name="VAE", tooltip="For any node that takes a VAE."), report_output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, vae: object, precision: str = "auto", min_db: float = 0.0, **given: object) -> io.NodeOutput:
        conversion.check_vae(vae)
        names = given.keys() & {"vram_gb", "ram_gb", "chunk", "tiling", "tile", "overlap", "keep_models"}
        wishes = from_widgets(**{name: given.pop(name) for name in names})
        options = widgets.options_from(min_db, **given)
        convert = conversion.with_precision if isinstance(vae, EngineVAE) else conversion.from_host_vae
        fast = convert(vae, precision)
        if fast is not None:
            vae = fast.with_wishes(wishes.over(fast.settings), options)
            return io.NodeOutput(vae, report := vae.describe(), ui=ui(report))
        why = unfit() or "not a VAE the engine knows, or changed by another node"
        report = f"{type(vae.first_stage_model).__name__}: {why}; "
        vae, switched = conversion.with_scoped_settings(vae, options)
        if switched:
            report += f"its own network runs, with {' and '.join(switched)} switched on during its calls only"
        else:
            report += "the VAE is passed on unchanged"
        return io.NodeOutput(vae, report, ui=ui(report))


class DemoClip(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ZeroWasteVAEDemoClip", "Zero-Waste Demo Clip",
            ["demo video", "sample clip", "test video", "example frames"],
            description="Frames of the short clip that comes with this pack, for trying things out on a fresh host.",
            inputs=[count("frames", "Frames", 1024, "How many from its start; 4n+1 fill latents of most video "
                                  "VAEs.", least=1, default=9)],
            outputs=[
                io.Image.Output(display_name="Images", tooltip="The frames."),
                io.Float.Output(display_name="fps", tooltip="Frames per second."),
                report_output(),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, frames: int) -> io.NodeOutput:
        path = demo_clip_path()
        if not path.is_file():
            raise CheckpointError(f"{path}: the demo clip is missing; install the pack again")
        images, fps = read_video(path, frames)
        count, height, width, _ = images.shape
        report = counted(f"{count} frames of {width}x{height} at {float(fps):g} frames per second, from {path.name}")
        return io.NodeOutput(images, float(fps), report, ui=ui(report))
