"""Widgets that several nodes share, and those of the optimisations."""

from __future__ import annotations

from ..engine.extras.residents.keeping import KEEP
from ..engine.families import WORDS
from ..engine.kernels.cards import AUTO, CHOICES
from ..engine.loader import NAMES
from ..engine.options import TOGGLES, Options
from .frames import ANY_VAE
from .host import io
from .services import unavailable
from .settings import DEFAULT_OVERLAP, DIRECT, FRAMES

#: The pack's name, as users read it.
CATEGORY = "Zero-Waste VAE"
#: The families whose VAEs the engine runs, for descriptions.
MODELS = (
    "SeedVR2, Wan, Qwen-Image, HunyuanVideo, HunyuanImage, Mage-Flow, LTX, MiniMax H3, Mochi, Cosmos, CogVideoX, Flux, "
    "Z-Image, SD3, SDXL, Stable Diffusion, Stable Video Diffusion, TAESD and TAEHV"
)
#: Words that users search for when a decode is slow or does not fit.
SEARCH = [
    "vae decode", "decode video", "tiled decode", "latent to video", "long video", *WORDS,
    "oom", "out of memory", "vram", "memory", "tiled", "slow", "fast", "slow vae", "vae oom", "vae out of memory",
    *(f"{word} vae" for word in WORDS),
]  # fmt: skip
#: Toggles of Optimize in front of its last widget of old, and those in front of `kernels` and `keep_models`, which came
#: after them: saved workflows know widgets by their place.
FIRST, BEFORE_KERNELS = 9, 10


def schema(node_id: str, display_name: str, aliases: list[str], panel: bool = False, **fields: object) -> io.Schema:
    """Return the schema of a node of this pack.

    Args:
        node_id: as saved workflows name it.
        display_name: its title.
        aliases: further words it is found by, on hosts that know them (0.10.0 on).
        panel: its report is shown in a line on it, also when it comes from the host's cache (hosts from 0.18.1 on send
            it).
        fields: the other fields of the host's schema.
    """
    known = io.Schema.__dataclass_fields__
    if panel and "has_intermediate_output" in known:
        fields["has_intermediate_output"] = True
    if "search_aliases" in known:
        fields["search_aliases"] = [*aliases, "zerowaste", "zero waste"]
    if "accept_all_inputs" in known and any(i.id == "tiling" for i in fields["inputs"]):
        # Otherwise the host drops a tiling that is no option of the list, and the node runs as if none were given.
        fields["accept_all_inputs"] = True
    return io.Schema(node_id=node_id, display_name=display_name, category=CATEGORY, **fields)


def advanced(widget: io.Input) -> io.Input:
    """Mark a widget as advanced; hosts before 0.9.2 know no such argument but pass extra entries on."""
    widget.extra_dict["advanced"] = True
    return widget


def choice(name: str, label: str, options: list[str], default: str, tooltip: str, optional: bool = True) -> io.Input:
    return io.Combo.Input(
        name, display_name=label, options=options, default=default, optional=optional, tooltip=tooltip
    )


def count(name: str, label: str, most: int, tooltip: str, least: int = 0, default: int = 0, **rest: object) -> io.Input:
    """Return a widget of a whole number in least..most."""
    return io.Int.Input(name, display_name=label, default=default, min=least, max=most, tooltip=tooltip, **rest)


def switch(name: str, label: str, default: bool, tooltip: str) -> io.Input:
    return io.Boolean.Input(name, display_name=label, default=default, optional=True, tooltip=tooltip)


def report_output() -> io.String.Output:
    return io.String.Output(display_name="report", tooltip="What was done and what it took, as text.")


# The frontend shows and keeps as many digits as the step has.
_GIGABYTES = {"default": 0.0, "min": 0.0, "step": 0.05}
#: The inputs that several nodes have: name -> kind, label, fields, tooltip.
_SHARED = {
    "samples": (io.Latent.Input, "Latent", {}, "From a sampler or an encode."),
    "vae": (io.Vae.Input, "VAE", {}, "From any loader. What the engine does not know runs by ComfyUI's own code."),
    "precision": (
        io.Combo.Input, "Precision", {"options": list(NAMES), "default": "auto"},
        "auto is exact while no dB floor is set: on a CUDA GPU the 16-bit type the VAE was made for (fp16 or bf16), on "
        "the CPU fp32. fp8 and int8 compute most convolutions in 8 bit, fp16_fast sums in fp16 (VAEs made for "
        "fp16, Wan, HunyuanVideo 1.0, CogVideoX); all three are approximate.",
    ),
    "vram_gb": (
        io.Float.Input, "VRAM limit (GB), 0 = auto", {"max": 1024.0, **_GIGABYTES},
        "Most memory this may take, in GB (2^30 bytes). 0: the value of the node before, else 81.25 % of the card (13 "
        "of 16 GB), more where whole frames need it and it is free.",
    ),
    "ram_gb": (
        io.Float.Input, "RAM limit (GB), 0 = auto", {"max": 65536.0, **_GIGABYTES},
        "Host memory the {0} may take for what it parks there, in GB (2^30 bytes); on a CPU, for all it does. 0: the "
        "value of the node before, else half of what is free.",
    ),
    "chunk": (
        io.Int.Input, "Latents per step, 0 = auto", {"default": 0, "min": 0, "max": 4096},
        "Latents per step: 4 frames each with most video VAEs, 6 to 8 with others, one picture with image VAEs. 0 lets "
        "the planner choose; every value gives the same result.",
    ),
    "output": (
        io.Combo.Input, "Number type of frames", {"options": list(FRAMES), "default": "auto"},
        "Number type of the frames in host memory: 121 frames of 1920x1080 take 2.8 GB in float32 and 1.4 GB in "
        "float16. auto: ComfyUI's own, float32 unless it was started with --fp16-intermediates.",
    ),
    "gpus": (
        io.String.Input, "GPUs", {"default": "auto"},
        "GPUs that share the clip, with the bits of one. auto: only the one ComfyUI runs this VAE on; all: every GPU "
        "of its kind; or a list that names that one too, such as cuda:0,cuda:1. On Windows ComfyUI sees one GPU, "
        "unless started with --cuda-device all.",
    ),
    "keep_models": (
        io.Combo.Input, "Keep models", {"options": list(KEEP), "default": "auto"},
        "Other models on the card. auto: they stay where moving them out and back would take longer than a leaner plan "
        "costs; always: they stay where an exact plan leaves room for them; never: whatever is in the way leaves. The "
        "result is the same; VRAM limit and tiling come first.",
    ),
    "any_vae": (
        io.Boolean.Input, ANY_VAE, {"default": False},
        "Off: a latent with a note of the VAE that made it (this pack's encodes write one) is refused by another VAE. "
        "On: any latent of the right shape is decoded.",
    ),
}  # fmt: skip
_REQUIRED, _ADVANCED = ("samples", "vae"), ("ram_gb", "output", "gpus", "any_vae", "keep_models")


def shared(name: str, tooltip: str = "", operation: str = "") -> io.Input:
    """Return the input `name`. tooltip: another one than usual; operation: "decode" or "encode", where it is named."""
    kind, label, fields, usual = _SHARED[name]
    optional = {} if name in _REQUIRED else {"optional": True}
    widget = kind(name, display_name=label, tooltip=tooltip or usual.format(operation), **fields, **optional)
    return advanced(widget) if name in _ADVANCED else widget


def tiling_inputs() -> list[io.Input]:
    """Return the tiling mode with the widgets that belong to it.

    A host from before io.DynamicCombo (0.8.0) always has tile and overlap; of a workflow saved with nested ones it
    reads the widgets before them right.
    """

    def tile(default: int, **rest: bool) -> io.Input:
        text = ("Tile size in pixels. 0 lets the planner choose one for the VRAM target; any other value is used as it "
                "is, from 16 pixels up.")  # fmt: skip
        return count("tile", "Tile size (px), 0 = auto", 16384, text, default=default, step=8, **rest)

    def overlap(more: str = "", **rest: bool) -> io.Input:
        text = f"Pixels that neighbouring tiles share and blend over. Must be smaller than the tile.{more}"
        return count("overlap", "Tile overlap (px)", 16384, text, default=DEFAULT_OVERLAP, step=8, **rest)

    modes = (
        "auto, untiled: whole frames, with history in host memory where the VRAM target asks for it; if they do not "
        "fit even so, auto blends tiles and says so, untiled and exact say what would fit. exact: whole frames, large "
        "convolutions in bands of tile pixels where the fused kernels run; blended: approximate, tiles with a soft "
        "overlap."
    )
    if not hasattr(io, "DynamicCombo"):
        mode = choice("tiling", "Tiling", ["auto", "untiled", "exact", "blended"], "auto", modes)
        return [mode, tile(0, optional=True), overlap(" Only for blended tiles.", optional=True)]
    nested = {"auto": [], "untiled": [], "exact": [tile(0)], "blended": [tile(512), overlap()]}
    options = [io.DynamicCombo.Option(mode, inputs) for mode, inputs in nested.items()]
    return [io.DynamicCombo.Input("tiling", display_name="Tiling", options=options, optional=True, tooltip=modes)]


def toggle_inputs() -> tuple[list[io.Input], list[io.Input]]:
    """Return the dB floor with the first toggles, and what came later. Toggles that have no effect here carry the
    reason, for the tooltip and the panel; those that plans depend on are marked for the panel."""
    floor = io.Float.Input(
        "min_db", display_name="Least quality (dB), 0 = exact", default=0.0, min=0.0, max=200.0, step=1.0,
        optional=True, tooltip="PSNR in dB (peak 2.0) that approximations must keep against the exact decode. 0: "
        "nothing approximate except what is switched on here.",
    )  # fmt: skip
    kernels = choice(
        "kernels", "Which fused kernels", list(CHOICES), AUTO,
        "auto: the compiled kernels that come with this pack, or Triton's where those lack one (on data-centre cards "
        "Triton's first). triton, plain (plain torch) or a compiled set, on any card: A is for RTX 30, B for RTX 40, C "
        "and D for RTX 50.",
    )  # fmt: skip
    kernels.extra_dict["zerowaste_planned"] = True
    toggles = [_toggle(name, reason) for name, reason in unavailable().items()]
    # The third state of the switch before `kernels`, which saved workflows know as on or not.
    direct = advanced(switch(
        DIRECT, "Direct convolutions", False, "No card uses the Winograd form, even if its own switch is on: all "
        "products are made, weights take less memory, and rounding is about 2 dB less.",
    ))  # fmt: skip
    direct.extra_dict["zerowaste_planned"] = True
    between = advanced(kernels), direct, shared("keep_models")
    later = [*toggles[FIRST:BEFORE_KERNELS], *between, *toggles[BEFORE_KERNELS:]]
    return [advanced(floor), *toggles[:FIRST]], later


def _toggle(name: str, reason: str | None) -> io.Input:
    toggle = TOGGLES[name]
    tooltip = toggle.text + (f" Not in use here: {reason}." if reason else "")
    widget = switch(name, toggle.label, name != "winograd" and getattr(Options(), name) is not False, tooltip)
    widget.extra_dict |= {"zerowaste_planned": True} if toggle.memory else {}
    widget.extra_dict |= {"zerowaste_off": reason} if reason else {}
    return advanced(widget)


def options_from(min_db: float = 0.0, kernels: str = AUTO, direct: bool = False, **toggles: bool) -> Options:
    """Return options from widget values; those not given keep the engine's default."""
    given = {name: toggles[name] for name in TOGGLES if name in toggles}
    if given.get("channels_last_3d"):
        # Only for the kernels: plain torch is slower with it (1.8 times on an H200), so this widget never asks for it.
        given["channels_last_3d"] = None
    # Not on is as the table of cards says, also in workflows that were saved before it said anything.
    given["winograd"] = False if direct else given.get("winograd") or None
    return Options(**given, min_db=min_db, kernels=kernels)
