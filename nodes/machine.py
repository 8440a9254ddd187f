"""What ComfyUI says of the machine: where VAEs run, and where their weights wait."""

from __future__ import annotations

import functools

import comfy.model_management as mm
import torch
from comfy.cli_args import args

from ..engine.archs import DEFAULT
from ..engine.loader import PRECISIONS, auto_precision
from ..engine.planning.budget import Machine
from ..engine.planning.fusable import availability
from ..engine.run.pinned import forbid
from .flags import obey


def machine() -> Machine:
    """Where decodes run, as it was when the pack was loaded or a VAE last ran: asking again touches no device."""
    return _machine or sampled()


_machine: Machine | None = None


def sampled() -> Machine:
    """Where decodes run, as it is now."""
    global _machine
    if getattr(args, "disable_pinned_memory", False):
        forbid("--disable-pinned-memory")
    obey(args)
    _machine = bare(mm.vae_device())
    return _machine


def bare(device: torch.device) -> Machine:
    """A device of this machine, by the host's count of its memory."""
    return Machine.bare(device, None if device.type == "cpu" else mm.get_total_memory(device))


def offload_device() -> torch.device:
    """Where the weights of a VAE wait while it does not run."""
    return mm.vae_offload_device()


@functools.cache
def unavailable() -> dict[str, str | None]:
    """Optimisation -> why it can do nothing here for the first family's VAE in its default precision, or None."""
    device = mm.vae_device()
    return availability(device, DEFAULT.name, None, PRECISIONS[auto_precision(device, DEFAULT)])
