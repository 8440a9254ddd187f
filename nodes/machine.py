"""ComfyUI's view of the machine: the device that runs VAEs, and the one that holds their weights meanwhile."""

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
    """Return the machine that decodes run on, as it was when the pack was loaded or a VAE last ran: no device is
    touched again."""
    return _machine or sampled()


_machine: Machine | None = None


def sampled() -> Machine:
    """Return the machine that decodes run on, as it is now."""
    global _machine
    if getattr(args, "disable_pinned_memory", False):
        forbid("--disable-pinned-memory")
    obey(args)
    _machine = bare(mm.vae_device())
    return _machine


def bare(device: torch.device) -> Machine:
    """Return a device of this machine, with the host's figure of its memory."""
    return Machine.bare(device, None if device.type == "cpu" else mm.get_total_memory(device))


def offload_device() -> torch.device:
    """Return the device that holds the weights of a VAE while it does not run."""
    return mm.vae_offload_device()


@functools.cache
def unavailable() -> dict[str, str | None]:
    """Return optimisation -> why it has no effect here for the first family's VAE in its default precision, or None."""
    device = mm.vae_device()
    return availability(device, DEFAULT.name, None, PRECISIONS[auto_precision(device, DEFAULT)])
