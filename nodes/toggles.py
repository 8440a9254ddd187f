"""One widget per optimisation, and the engine's options that they stand for."""

from __future__ import annotations

from ..engine.options import TOGGLES, Options
from .host import io, unavailable
from .widgets import advanced

_TOOLTIPS = {
    "fp8": "8-bit products where the dB floor allows them. Approximate.",
    "channels_last_3d": "Activations as NDHWC, the only layout the fused kernels know. Plain torch keeps NCDHW either "
    "way, which is faster there. Off: NCDHW everywhere, without fused kernels.",
    "triton_fusion": "Fused kernels for convolution, GroupNorm and SiLU. On an H200 a decode at 1280x720 takes 31 ms "
    "per frame with them and 77 without. Off: plain torch.",
    "composed_upsample": "Upsampling and the convolution after it as one: 21 % fewer products in the whole decoder. "
    "Off: one after the other.",
    "cuda_graphs": "Chunks of long clips of small frames are replayed from a captured graph within a run, where their "
    "launches take longer than the work itself; not under cudaMallocAsync. Nothing is kept after the run.",
    "flash_attention": "Attention without a stored score matrix. Off: plain products, block by block.",
    "tf32": "fp32 runs multiply in TF32, with 10 bits of mantissa instead of 23. Approximate.",
    "cudnn_benchmark": "cuDNN tries its algorithms out during our calls. They take memory that no plan can know, and "
    "changed no decode time on an H200.",
    "async_offload": "Finished frames and parked history are copied while the GPU goes on. Off: it waits for each.",
}
_LABELS = {
    "fp8": "8-bit products (fp8)",
    "channels_last_3d": "Channels-last layout",
    "triton_fusion": "Fused kernels (Triton)",
    "composed_upsample": "Joined upsampling",
    "cuda_graphs": "CUDA graphs",
    "flash_attention": "Attention without score matrix",
    "tf32": "TF32 in fp32 runs",
    "cudnn_benchmark": "cuDNN benchmark",
    "async_offload": "Copies beside the work",
}


def toggle_inputs() -> list[io.Input]:
    """The dB floor and the toggles; those that can do nothing here carry the reason, for the tooltip and the panel."""
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
    return [advanced(floor), *(_toggle(name, reason) for name, reason in unavailable().items())]


def _toggle(name: str, reason: str | None) -> io.Boolean.Input:
    default = getattr(Options(), name) is not False
    tooltip = _TOOLTIPS[name] + (f" Not in use here: {reason}." if reason else "")
    widget = io.Boolean.Input(name, display_name=_LABELS[name], default=default, optional=True, tooltip=tooltip)
    if reason:
        widget.extra_dict["zerowaste_off"] = reason
    return advanced(widget)


def options_from(min_db: float = 0.0, **toggles: bool) -> Options:
    """Options from widget values; what is not given keeps the engine's default."""
    given = {name: toggles[name] for name in TOGGLES if name in toggles}
    if given.get("channels_last_3d"):
        # Where the kernels run; for plain torch it is slower (1.8 times on an H200), so this widget never asks for it.
        given["channels_last_3d"] = None
    return Options(**given, min_db=min_db)


def without_optimisations() -> Options:
    """Plain torch, nothing else."""
    return Options().switched(off=TOGGLES)
