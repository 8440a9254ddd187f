"""Optimisations by name: what a VAE may use, and which of them this machine and model cannot serve, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch

from .errors import InputError
from .kernels.targets import target

OFF = "switched off"


@dataclass(frozen=True)
class Options:
    """Which optimisations a VAE may use. The defaults are the exact fast path; each can be switched off alone.

    fp8: 8-bit operands where `min_db` allows. Approximate, so off.
    channels_last_3d: activations as NDHWC. None: on the fused kernels, which know no other layout; plain torch keeps
        NCDHW (its own group norm makes a channels-last SeedVR2 decode 1.8 times slower on an H200). True: plain torch
        as well.
        False: NCDHW, and with it plain torch, everywhere.
    triton_fusion: the fused kernels. Off: the plain torch modules.
    composed_upsample: expansion, pixel shuffle and convolution as one convolution. Off: one after the other.
    cuda_graphs: chunks that come again are replayed from a captured graph where that saves time: small frames, whose
        launches take the host longer than the GPU's work for them, in long clips or in calls that repeat. After such a
        call its memory on the device stays for the next one, if it is below 1 GB; the VAE's `release`, a call of
        another size, changed options and a lack of memory free it.
    flash_attention: attention kernels, ours or torch's. Off: plain products in fp32, a block of queries at a time.
    tf32: fp32 runs multiply in TF32. Ten bits of mantissa are left, so off.
    cudnn_benchmark: cuDNN tries its algorithms out. Other algorithms round differently and take workspaces that no plan
        can know, so off; on an H200 it changed nothing in a Wan decode.
    async_offload: input, finished frames and parked history are copied while the GPU goes on. Off: each copy is waited
        for, and nothing is read or fetched ahead.
    min_db: PSNR (dB, peak 2.0) that approximations must keep against the exact path; 0 allows only what is switched
        on by name.
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
    min_db: float = 0.0

    def __post_init__(self) -> None:
        for name in TOGGLES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "channels_last_3d" and value is None):
                raise InputError(f"{name}={value!r} is no switch: give True or False")
        number = isinstance(self.min_db, (int, float)) and not isinstance(self.min_db, bool)
        if not number or not 0 <= self.min_db < math.inf:
            raise InputError(f"min_db={self.min_db!r} is no PSNR: give dB, or 0 for none")

    def switched(self, on: Iterable[str] = (), off: Iterable[str] = ()) -> Options:
        """A copy with these toggles switched. Raises InputError on a name that is none, or is in both."""
        on, off = set(on), set(off)
        for name in sorted(on | off):
            if name not in TOGGLES:
                raise InputError(f"{name!r} is no optimisation; there are {', '.join(TOGGLES)}")
            if name in on and name in off:
                raise InputError(f"{name} is switched both on and off")
        return replace(self, **dict.fromkeys(on, True), **dict.fromkeys(off, False))


TOGGLES = tuple(f.name for f in fields(Options) if f.name != "min_db")
DEFAULTS = Options()


def availability(
    device: torch.device | str, architecture: str, config: object, dtype: torch.dtype
) -> dict[str, str | None]:
    """For each toggle None where it can do something for this model on this device, else the reason why not.

    architecture, config: as a VideoVAE's `arch` and `model.config` (None: the published widths). Imports no Triton.
    """
    from .fused.path import why_off  # whose networks read Options

    device = torch.device(device)
    return unavailable(device, dtype, why_off(architecture, config, dtype, device))


def unavailable(device: torch.device, dtype: torch.dtype, kernels_off: str | None) -> dict[str, str | None]:
    """As `availability`, where it is known already why the fused kernels cannot run (None: they can)."""
    here = target(device)
    cuda = device.type == "cuda"
    reasons: dict[str, str | None] = dict.fromkeys(TOGGLES)
    for name in ("triton_fusion", "composed_upsample", "cuda_graphs", "fp8"):
        reasons[name] = kernels_off
    if kernels_off is None and not here.fp8:
        reasons["fp8"] = f"{here.name} (sm_{here.sm}) has no fp8 matrix instruction"
    if not cuda:
        reasons["cuda_graphs"] = reasons["cuda_graphs"] or "only CUDA GPUs replay graphs"
        reasons["tf32"] = "TF32 is a mode of NVIDIA GPUs"
        reasons["cudnn_benchmark"] = "there is no cuDNN on a CPU"
        reasons["async_offload"] = "on a CPU nothing has to be copied"
    elif here.sm < 80:
        reasons["tf32"] = f"{here.name} has no TF32"
    elif dtype != torch.float32:
        reasons["tf32"] = "it is a mode of fp32 runs, and this one has 16 bit"
    return reasons


def unused(options: Options, reasons: dict[str, str | None], dtype: torch.dtype, fused: bool) -> dict[str, str]:
    """Toggle -> why a run does not use it, for all that it does not use. `reasons`: from `unavailable`.

    fused: whether the run goes through the fused kernels.
    """
    off = {name: OFF if getattr(options, name) is False else reasons[name] for name in TOGGLES}
    if fused:
        off["cudnn_benchmark"] = off["cudnn_benchmark"] or "the fused kernels use no cuDNN"
    else:
        for name in ("composed_upsample", "cuda_graphs", "async_offload"):
            off[name] = off[name] or "only the fused kernels have it, and this run is plain torch"
        off["triton_fusion"] = off["triton_fusion"] or _why_plain(options)
        if options.channels_last_3d is None:
            off["channels_last_3d"] = "plain torch keeps NCDHW unless this is switched on"
        if dtype == torch.float32 and not options.tf32:
            exact = "fp32 convolutions run as matrix products, without cuDNN"
            off["cudnn_benchmark"] = off["cudnn_benchmark"] or exact
    return {name: reason for name, reason in off.items() if reason}


def _why_plain(options: Options) -> str:
    if options.channels_last_3d is False:
        return "channels_last_3d is switched off, and the kernels know no other layout"
    return "blended tiles are encoded by plain torch"
