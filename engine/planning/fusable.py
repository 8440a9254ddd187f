"""Check if the fused operators can run a model, and which optimisations have an effect on it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..families import by_name
from ..kernels.cards import AUTO
from ..kernels.conv3d import padded_channels
from ..kernels.probe import proven
from ..kernels.targets import target
from ..network.architecture import Architecture
from ..network.program import Program
from ..options import unavailable


def why_off(
    architecture: str, config: Any, dtype: torch.dtype, device: torch.device, emulate: bool = False,
    probe: bool = False, kernels: str = AUTO,
) -> str | None:
    """Return the reason that the fused operators cannot run this model on this device, or None.

    Args:
        architecture: its name.
        config: its widths; None: the published ones.
        dtype: of activations.
        device: where it is to run.
        emulate: accept a CPU, where reference operators give numbers that plain torch cannot (8 bit).
        probe: a GPU must have run a first kernel; False: nothing is run, and an untried GPU is trusted.
        kernels: which kernels are asked for ("auto", prebuilt, Triton or none).
    """
    known = by_name(architecture)
    if known is None:
        return f"no fused network for {architecture}"
    here = proven(device, kernels) if probe else target(device, kernels)
    if not (emulate and device.type == "cpu"):
        if not here.kernels:
            return here.notes[0] if here.notes else f"no kernels for {device}"
        if not here.supports(dtype):
            return f"no fused kernels for {dtype}: plain torch keeps its precision"
    return None if config is None else _not_fused(known, config, dtype)


def availability(
    device: torch.device | str, architecture: str, config: object, dtype: torch.dtype, kernels: str = AUTO
) -> dict[str, str | None]:
    """Return for each toggle None where it has an effect on this model and device, else the reason why not.

    Imports no Triton.

    Args:
        device: where the model is to run.
        architecture, config: as a VideoVAE's `arch` and `model.config` (None: the published widths).
        dtype: of activations.
        kernels: which kernels are asked for.
    """
    device = torch.device(device)
    off = why_off(architecture, config, dtype, device, False, False, kernels)
    return unavailable(device, dtype, off, kernels)


@functools.cache  # asked several times for every run
def _not_fused(architecture: Architecture, config: Any, dtype: torch.dtype) -> str | None:
    return not_fused(architecture.programs(config), dtype)


def half_not_fused(program: Program, dtype: torch.dtype) -> str | None:
    """Return the reason that the fused operators can run this component on no device, or None."""
    odd = sorted({w for w in program.widths() if padded_channels(w, dtype) != w})
    return program.why_not_fused() or (f"widths {odd} are no multiples of {padded_channels(1, dtype)}" if odd else None)


def no_8_bit(programs: Sequence[Program], dtype: torch.dtype) -> str | None:
    """Return the reason that 8-bit operands are unavailable even where the fused operators run, or None."""
    if any(p.style.after for p in programs):
        return "its convolutions look ahead, and 8 bit is measured on causal ones"
    return next((why for p in programs if (why := half_not_fused(p, dtype))), None)


def why_no_8_bit(programs: Sequence[Program], dtype: torch.dtype, off: str | None) -> str | None:
    """Return the reason that 8-bit operands are unavailable, or None.

    Args:
        programs: the model's components.
        dtype: of activations.
        off: why the fused operators cannot run. Products that scale their own inputs (transformers) do not need them,
            but where they are kernels of ours, what keeps these from running counts.
    """
    if any(p.scales for p in programs):
        launches = any(p.scales and p.launches for p in programs)
        return off if launches and off != not_fused(programs, dtype) else None
    return off or no_8_bit(programs, dtype)


def not_fused(programs: Sequence[Program], dtype: torch.dtype) -> str | None:
    """Return the reason that the fused operators can run none of these components on any device, or None."""
    reasons = [half_not_fused(p, dtype) for p in programs]
    return None if None in reasons else next(iter(reasons), None)
