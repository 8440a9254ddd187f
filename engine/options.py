"""Optimisations by name: those a VAE may use, and those that this machine or model cannot serve, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from .errors import InputError
from .kernels.cards import AUTO, checked
from .kernels.targets import Target, has_fp8, target
from .system.orders import ORDERS

OFF = "switched off"
#: The reason for toggles that are off until the user switches them on.
BY_DEFAULT = "off by default"
#: The reason for the Winograd form where nobody asked for it.
BY_CARD = "not asked for, and by the table of cards this one gains no time by it"
#: Toggles of three states: None leaves them to a rule.
_BY_RULE = ("channels_last_3d", "winograd")


@dataclass(frozen=True)
class Options:
    """Optimisations that a VAE may use; `TOGGLES` describes each. The defaults are the exact fast path; each can be
    switched off alone. channels_last_3d None: on the fused kernels; True: plain torch as well. winograd None: as the
    table of cards says (kernels/gpus.py).

    min_db: PSNR (dB, peak 2.0) that approximations must keep against the exact path; 0 allows only those that are
    switched on by name. kernels: the fused kernels to run: "auto", "triton", "plain" or a prebuilt set, as for
    `--kernels`; "auto" asks the environment variable ZEROWASTE_KERNELS.
    Raises InputError on values of the wrong kind.
    """

    fp8: bool = False
    channels_last_3d: bool | None = None
    triton_fusion: bool = True
    composed_upsample: bool = True
    cuda_graphs: bool = True
    flash_attention: bool = True
    tf32: bool = False
    cudnn_benchmark: bool = False
    async_offload: bool = True
    winograd: bool | None = None
    min_db: float = 0.0
    kernels: str = AUTO

    def __post_init__(self) -> None:
        for name in TOGGLES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name in _BY_RULE and value is None):
                raise InputError(f"{name}={value!r} is no switch: give True or False")
        if checked(self.kernels, "kernels") != self.kernels:
            raise InputError(f"kernels={self.kernels!r}: write {checked(self.kernels, 'kernels')}")
        number = isinstance(self.min_db, (int, float)) and not isinstance(self.min_db, bool)
        if not number or not 0 <= self.min_db < math.inf:
            raise InputError(f"min_db={self.min_db!r} is no PSNR: give dB, or 0 for none")

    def switched(self, on: Iterable[str] = (), off: Iterable[str] = ()) -> Options:
        """Return a copy with these toggles switched. Raises InputError on an unknown name, or one in both."""
        on, off = set(on), set(off)
        for name in sorted(on | off):
            if name not in TOGGLES:
                raise InputError(f"{name!r} is no optimisation; there are {', '.join(TOGGLES)}")
            if name in on and name in off:
                raise InputError(f"{name} is switched both on and off")
        return replace(self, **dict.fromkeys(on, True), **dict.fromkeys(off, False))

    def decided(self, here: Target) -> Options:
        """Return a copy for runs on a device, with `winograd` on or off. It depends on the options and the card alone,
        so that a layer has one form in every plan."""
        by_card = here.kernels and here.winograd
        wanted = by_card if self.winograd is None else self.winograd
        return replace(self, winograd=wanted and not here.winograd_off)

    @property
    def overlap(self) -> bool:
        """Return True if copies run at the same time as the GPU's work."""
        return self.async_offload and not ORDERS.no_overlap


@dataclass(frozen=True)
class Place:
    """The device and dtype of a model, why the fused kernels cannot run it there (None: they can), and the requested
    kernels."""

    device: torch.device
    dtype: torch.dtype
    kernels_off: str | None
    kernels: str = AUTO

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def gpu(self) -> Target:
        return target(self.device, self.kernels)


@dataclass(frozen=True)
class Walk:
    """A run that could use an optimisation: on the fused kernels, or in plain torch. winograd: as decided for it."""

    options: Options
    dtype: torch.dtype
    fused: bool
    winograd: bool


Reason = str | None
#: Why a run on a GPU with kernels launches none: for an encoder's tiles, and those of networks whose norms need whole
#: frames to the end.
PLAIN_TILES = "plain torch runs blended tiles of this component"


@dataclass(frozen=True)
class Toggle:
    """One optimisation.

    label, text: its name and effect, for people. memory: plans depend on it. here(place): why this machine or model
    cannot use it. walk(walk): why a run does not use it although it could.
    """

    label: str
    text: str
    memory: bool
    here: Callable[[Place], Reason] = lambda place: None
    walk: Callable[[Walk], Reason] = lambda walk: None

    def off(self, name: str) -> str:
        """Return why a run does not use it under options where it is False; name: that of its field."""
        return BY_DEFAULT if getattr(DEFAULTS, name) is False else OFF


def _kernels(place: Place) -> Reason:
    return place.kernels_off


def _fused_only(walk: Walk) -> Reason:
    return None if walk.fused else "only the fused kernels have it, and this run is plain torch"


def _winograd(place: Place) -> Reason:
    return place.kernels_off or place.gpu.winograd_off or None


def _by_card(walk: Walk) -> Reason:
    return _fused_only(walk) or (BY_CARD if walk.options.winograd is None and not walk.winograd else None)


def _fp8(place: Place) -> Reason:
    there = place.gpu.fp8 or has_fp8(place.device, place.kernels)
    return place.kernels_off or (None if there else why_no_fp8(place.gpu))


def why_no_fp8(here: Target) -> str:
    """Return why kernels have no fp8 products: because of the card, or of the prebuilt set."""
    if here.set is not None and here.capability >= 89:
        return f"set {here.set} of the prebuilt kernels has no fp8 products"
    return f"{here.name} (sm_{here.capability}) has no fp8 matrix instruction"


def _fusion(walk: Walk) -> Reason:
    if walk.fused:
        return None
    if walk.options.channels_last_3d is False:
        return "channels_last_3d is switched off, and the kernels know no other layout"
    return PLAIN_TILES


def _layout(walk: Walk) -> Reason:
    plain = not walk.fused and walk.options.channels_last_3d is None
    return "plain torch keeps NCDHW unless this is switched on" if plain else None


def _graphs(place: Place) -> Reason:
    return place.kernels_off or (None if place.cuda else "only CUDA GPUs replay graphs")


def _tf32(place: Place) -> Reason:
    if not place.cuda:
        return "TF32 is a mode of NVIDIA GPUs"
    if place.gpu.sm < 80:
        return f"{place.gpu.name} has no TF32"
    return None if place.dtype == torch.float32 else "it is a mode of fp32 runs, and this one has 16 bit"


def _overlap(place: Place) -> Reason:
    return ORDERS.no_overlap or (None if place.cuda else "on a CPU nothing has to be copied")


def _cudnn(walk: Walk) -> Reason:
    if walk.fused:
        return "the fused kernels use no cuDNN"
    products = walk.dtype == torch.float32 and not walk.options.tf32
    return "fp32 convolutions run as matrix products, without cuDNN" if products else None


#: Add a new one at the end; nodes place its widget so that saved workflows, which know widgets by place, still load.
TOGGLES: dict[str, Toggle] = {
    "fp8": Toggle("8-bit products (fp8)", "8-bit products where the dB floor allows them. Approximate.", True, _fp8),
    "channels_last_3d": Toggle(
        "Channels-last layout",
        "Activations as NDHWC, the only layout the fused kernels know. Plain torch keeps NCDHW, which is faster there "
        "(its own group norm makes a channels-last SeedVR2 decode 1.8 times slower on an H200). Off: NCDHW everywhere, "
        "without fused kernels.",
        True, walk=_layout,
    ),
    "triton_fusion": Toggle(
        "Fused kernels (Triton)",
        "Fused kernels for convolution, norm and SiLU. On an H200 a decode at 1280x720 takes 31 ms per frame with them "
        "and 77 without. Off: plain torch.",
        True, _kernels, _fusion,
    ),
    "composed_upsample": Toggle(
        "Joined upsampling",
        "Upsampling and the convolution after it as one: 21 % fewer products in the whole decoder. Off: one after the "
        "other.",
        True, _kernels, _fused_only,
    ),
    "cuda_graphs": Toggle(
        "CUDA graphs",
        "Repeated chunks are replayed from a recorded graph where launching takes longer than computing: long clips of "
        "small frames. Not under cudaMallocAsync.",
        True, _graphs, _fused_only,
    ),
    "flash_attention": Toggle(
        "Attention without score matrix",
        "Attention without a stored score matrix. Off: plain products, a block of queries at a time.", True,
    ),
    "tf32": Toggle(
        "TF32 in fp32 runs", "fp32 runs multiply in TF32, with 10 bits of mantissa instead of 23. Approximate.",
        False, _tf32,
    ),
    # On an H200 it changed nothing in a Wan decode.
    "cudnn_benchmark": Toggle(
        "cuDNN benchmark",
        "cuDNN times its algorithms during our calls; the fastest may round differently and take memory that no plan "
        "can know. No decode became faster on an H200.",
        False, lambda place: None if place.cuda else "there is no cuDNN on a CPU", _cudnn,
    ),
    "async_offload": Toggle(
        "Asynchronous copies",
        "Input, finished frames and parked histories are copied while the GPU computes. Off: it waits for each copy.",
        False, _overlap, _fused_only,
    ),
    "winograd": Toggle(
        "Winograd convolutions",
        "Convolutions in 16 bit with four ninths of the products, of rounded sums and differences of neighbouring "
        "values: other bits, about 2 dB more rounding, weights of nearly twice the size. Off: used on the cards "
        "that gain by it, RTX 30, 40 and 50 and others of their generations, and not on A100 to B300, where it is "
        "slower. On: used on every card.",
        True, _winograd, _by_card,
    ),
}  # fmt: skip
DEFAULTS = Options()


def unavailable(
    device: torch.device, dtype: torch.dtype, kernels_off: str | None, kernels: str = AUTO
) -> dict[str, str | None]:
    """Return for each toggle None where it can have an effect for a model of `dtype` on this device, else the reason
    why not.

    kernels_off: why the fused kernels cannot run the model there (None: they can). kernels: the requested ones. Imports
    no Triton.
    """
    place = Place(device, dtype, kernels_off, kernels)
    return {name: toggle.here(place) for name, toggle in TOGGLES.items()}


def unused(
    options: Options, reasons: dict[str, str | None], dtype: torch.dtype, fused: bool, winograd: bool = False
) -> dict[str, str]:
    """Return toggle -> reason, for each one that a run does not use. reasons: from `unavailable`. fused: the run goes
    through the fused kernels. winograd: as `Options.decided` has it for the run's device."""
    walk = Walk(options, dtype, fused, winograd)
    off = {
        name: toggle.off(name) if getattr(options, name) is False else reasons[name] or toggle.walk(walk)
        for name, toggle in TOGGLES.items()
    }
    return {name: reason for name, reason in off.items() if reason}
