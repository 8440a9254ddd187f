"""Zero-Waste VAE Optimize."""

from __future__ import annotations

from . import making
from .conversion import check_vae
from .decode import SEARCH
from .host import EngineVAE, io
from .reports import ui
from .scoped import with_scoped_settings
from .settings import from_widgets
from .toggles import options_from, toggle_inputs
from .widgets import (
    MODELS,
    advanced,
    chunk_input,
    precision_input,
    ram_input,
    report_output,
    schema,
    tiling_inputs,
    vae_input,
    vram_input,
)

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
        convert = making.with_precision if isinstance(vae, EngineVAE) else making.from_host_vae
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
