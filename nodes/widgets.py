"""Widgets that several nodes share, and those of the optimisations."""

from __future__ import annotations

from ..engine.archs import WORDS
from ..engine.kernels.cards import AUTO, CHOICES
from ..engine.loader import NAMES
from ..engine.options import TOGGLES, Options
from .frames import ANY_VAE
from .host import io
from .services import unavailable
from .settings import DEFAULT_OVERLAP, FRAMES

#: The pack's name, as users read it.
CATEGORY = "Zero-Waste VAE"
#: The families whose VAEs the engine runs, for descriptions.
MODELS = (
    "SeedVR2, Wan, Qwen-Image, HunyuanVideo, LTX, MiniMax H3, Mochi, Cosmos, Flux, Z-Image, SD3, SDXL and Stable "
    "Diffusion"
)

#: Words that users search for when a decode is slow or does not fit.
SEARCH = [
    "vae decode", "decode video", "tiled decode", "latent to video", "long video", *WORDS,
    "oom", "out of memory", "vram", "memory", "tiled", "slow", "fast", "slow vae", "vae oom", "vae out of memory",
    *(f"{word} vae" for word in WORDS),
]  # fmt: skip

_TILE = (
    "Tile size in pixels. 0 lets the planner choose one for the VRAM target; any other value is used as it is, "
    "from 16 pixels up."
)
_OVERLAP = "Pixels that neighbouring tiles share and blend over. Must be smaller than the tile."
_TILING = (
    "auto and untiled: whole frames. On a GPU, history waits in host memory where the VRAM target asks for it. What "
    "does not fit even so, auto does in blended tiles, and says so; with untiled and exact it is an error that says "
    "what would fit. exact: the same frames, with rows of large convolutions in "
    "bands of tile pixels where the fused kernels run. blended: tiles with a soft overlap, approximate, for frames "
    "that do not fit."
)


def schema(node_id: str, display_name: str, aliases: list[str], panel: bool = False, **fields: object) -> io.Schema:
    """Return the schema of a node of this pack; `aliases` are further words it is found by, on hosts that know them
    (0.10.0 on).

    panel: its report is shown in a line on it, also when the node comes from the host's cache (hosts from 0.18.1 on
    send it).
    """
    if panel and "has_intermediate_output" in io.Schema.__dataclass_fields__:
        fields["has_intermediate_output"] = True
    if "search_aliases" in io.Schema.__dataclass_fields__:
        fields["search_aliases"] = [*aliases, "zerowaste", "zero waste"]
    if "accept_all_inputs" in io.Schema.__dataclass_fields__ and any(i.id == "tiling" for i in fields["inputs"]):
        # Otherwise the host drops a tiling that is no option of the list, and the node runs as if none were given.
        fields["accept_all_inputs"] = True
    return io.Schema(node_id=node_id, display_name=display_name, category=CATEGORY, **fields)


def report_output() -> io.String.Output:
    return io.String.Output(display_name="report", tooltip="What was done and what it took, as text.")


def precision_input() -> io.Combo.Input:
    return io.Combo.Input(
        "precision",
        display_name="Precision",
        options=list(NAMES),
        default="auto",
        optional=True,
        tooltip="auto is exact while no dB floor is set: on a CUDA GPU the 16-bit type the VAE was made for (fp16 or "
        "bf16), on the CPU fp32. fp8 and int8 compute most convolutions in 8 bit, fp16_fast sums in fp16 (for VAEs "
        "made for fp16); all three are approximate.",
    )


def vram_input() -> io.Float.Input:
    return io.Float.Input(
        "vram_gb",
        display_name="VRAM limit (GB), 0 = auto",
        default=0.0,
        min=0.0,
        max=1024.0,
        # The frontend shows and keeps as many digits as the step has.
        step=0.05,
        optional=True,
        tooltip="Most memory this may take, in GB (2^30 bytes). 0: the value of the node before, else 81.25 % of the "
        "card (13 of 16 GB), more where whole frames need it and it is free.",
    )


def ram_input(tooltip: str) -> io.Float.Input:
    widget = io.Float.Input(
        "ram_gb", display_name="RAM limit (GB), 0 = auto", default=0.0, min=0.0, max=65536.0, step=0.05, optional=True,
        tooltip=tooltip,
    )  # fmt: skip
    return advanced(widget)


def parked_input(operation: str) -> io.Float.Input:
    """operation: "decode" or "encode"."""
    return ram_input(
        f"Host memory the {operation} may take for what it parks there, in GB (2^30 bytes). 0: the value of the node "
        f"before, else half of what is free. On a CPU: the memory the {operation} may take."
    )


def gpus_input() -> io.String.Input:
    widget = io.String.Input(
        "gpus", display_name="GPUs", default="auto", optional=True,
        tooltip="GPUs that share the clip, with the bits of one. auto: only the one ComfyUI runs this VAE on. all: "
        "every GPU of its kind. Or a list that names that one too, such as cuda:0,cuda:1.",
    )  # fmt: skip
    return advanced(widget)


def any_vae_input() -> io.Boolean.Input:
    widget = io.Boolean.Input(
        "any_vae", display_name=ANY_VAE, default=False, optional=True,
        tooltip="Off: a latent that says which VAE made it (those of this pack's encodes do) is refused by another "
        "one. On: any latent of the right shape is decoded.",
    )  # fmt: skip
    return advanced(widget)


def output_input() -> io.Combo.Input:
    return advanced(
        io.Combo.Input(
            "output",
            display_name="Number type of frames",
            options=list(FRAMES),
            default="auto",
            optional=True,
            tooltip="Number type of the frames in host memory. auto: ComfyUI's own, float32 unless it was started with "
            "--fp16-intermediates. 121 frames of 1920x1080 take 2.8 GB in float32 and 1.4 GB in float16.",
        )
    )


def chunk_input() -> io.Int.Input:
    return io.Int.Input(
        "chunk",
        display_name="Latents per step, 0 = auto",
        default=0,
        min=0,
        max=4096,
        optional=True,
        tooltip="Latents per step: 4 frames each with most video VAEs, 6 to 8 with others, one picture with image "
        "VAEs. 0 lets the planner choose; every value gives the same result.",
    )


def tiling_inputs() -> list[io.Input]:
    """Return the tiling mode with the widgets that belong to it. A host from before io.DynamicCombo (0.8.0) always has
    tile and overlap; of a workflow saved with nested ones it reads the widgets before them right."""
    if not hasattr(io, "DynamicCombo"):
        return [
            io.Combo.Input(
                "tiling",
                display_name="Tiling",
                options=["auto", "untiled", "exact", "blended"],
                default="auto",
                optional=True,
                tooltip=_TILING,
            ),
            _pixels("tile", 0, _TILE, optional=True),
            _pixels("overlap", DEFAULT_OVERLAP, _OVERLAP + " Only for blended tiles.", optional=True),
        ]
    option = io.DynamicCombo.Option
    return [
        io.DynamicCombo.Input(
            "tiling",
            display_name="Tiling",
            options=[
                option("auto", []),
                option("untiled", []),
                option("exact", [_pixels("tile", 0, _TILE)]),
                option("blended", [_pixels("tile", 512, _TILE), _pixels("overlap", DEFAULT_OVERLAP, _OVERLAP)]),
            ],
            optional=True,
            tooltip=_TILING,
        )
    ]


def advanced(widget: io.Input) -> io.Input:
    """Mark a widget as advanced; hosts before 0.9.2 know no such argument but pass extra entries on."""
    widget.extra_dict["advanced"] = True
    return widget


def _pixels(name: str, default: int, tooltip: str, optional: bool = False) -> io.Int.Input:
    label = {"tile": "Tile size (px), 0 = auto", "overlap": "Tile overlap (px)"}[name]
    return io.Int.Input(
        name, display_name=label, default=default, min=0, max=16384, step=8, optional=optional, tooltip=tooltip
    )


def vae_input(tooltip: str = "From any loader. What the engine does not know runs by ComfyUI's own code.") -> io.Input:
    return io.Vae.Input("vae", display_name="VAE", tooltip=tooltip)


#: Saved workflows know widgets by their place: the first so many toggles stand before Optimize's last widget, later
#: ones after it.
FIRST = 9
#: The number of toggles before `kernels`, which came after them.
BEFORE_KERNELS = 10


def toggle_inputs() -> tuple[list[io.Input], list[io.Input]]:
    """Return the dB floor with the first toggles, and the toggles that came later. Those that have no effect here carry
    the reason, for the tooltip and the panel; those that plans depend on are marked for the panel."""
    floor = io.Float.Input(
        "min_db",
        display_name="Least quality (dB), 0 = exact",
        default=0.0,
        min=0.0,
        max=200.0,
        step=1.0,
        optional=True,
        tooltip="PSNR in dB (peak 2.0) that approximations must keep against the exact decode. 0: nothing approximate "
        "but what is switched on here.",
    )
    toggles = [_toggle(name, reason) for name, reason in unavailable().items()]
    later = [*toggles[FIRST:BEFORE_KERNELS], _kernels(), *toggles[BEFORE_KERNELS:]]
    return [advanced(floor), *toggles[:FIRST]], later


def _kernels() -> io.Combo.Input:
    widget = io.Combo.Input(
        "kernels", display_name="Which fused kernels", options=list(CHOICES), default=AUTO, optional=True,
        tooltip="auto: the compiled kernels that come with this pack, or Triton's where those lack one (on data-centre "
        "cards Triton's first). triton, plain (plain torch) or a compiled set, on any card: A is for RTX 30, B for RTX "
        "40, C and D for RTX 50.",
    )  # fmt: skip
    widget.extra_dict["zerowaste_planned"] = True
    return advanced(widget)


def _toggle(name: str, reason: str | None) -> io.Boolean.Input:
    default = getattr(Options(), name) is not False
    toggle = TOGGLES[name]
    tooltip = toggle.text + (f" Not in use here: {reason}." if reason else "")
    widget = io.Boolean.Input(name, display_name=toggle.label, default=default, optional=True, tooltip=tooltip)
    if toggle.memory:
        widget.extra_dict["zerowaste_planned"] = True
    if reason:
        widget.extra_dict["zerowaste_off"] = reason
    return advanced(widget)


def options_from(min_db: float = 0.0, kernels: str = AUTO, **toggles: bool) -> Options:
    """Return options from widget values; those not given keep the engine's default."""
    given = {name: toggles[name] for name in TOGGLES if name in toggles}
    if given.get("channels_last_3d"):
        # Only for the kernels: plain torch is slower with it (1.8 times on an H200), so this widget never asks for it.
        given["channels_last_3d"] = None
    return Options(**given, min_db=min_db, kernels=kernels)


def without_optimisations() -> Options:
    """Return the options of plain torch without optimisations."""
    return Options().switched(off=TOGGLES)
