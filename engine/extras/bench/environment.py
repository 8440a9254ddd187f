"""Hardware and versions of a measurement, which a reader needs to compare it with another."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import torch

from ...system.hardware import survey
from ..tuning import kept

#: Names of nvidia-smi's figures, and their names in a report.
_ASKED = {
    "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "clocks.max.sm": "sm_max_mhz",
    "power.draw": "watts", "power.limit": "watts_limit", "temperature.gpu": "celsius",
}  # fmt: skip


def environment(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions for the report: texts, numbers, or None where unknown."""
    from .... import __version__

    hardware = survey()
    found: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "zerowaste_vae": __version__,
        "system": hardware.system,
        "python": hardware.python,
        "cores": hardware.cores,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "torch": hardware.torch,
        "cuda": hardware.cuda,
        "cudnn": hardware.cudnn,
        **{name.replace("-", "_"): number for name, number in hardware.packages.items()},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_sm": properties.major * 10 + properties.minor,
            "gpu_gb": properties.total_memory / 2**30,
            "allocator": torch.cuda.get_allocator_backend(),
            "driver": kept.driver(),
            "schedules": kept.words(device),
        }
    return found


def clocks(device: torch.device) -> dict[str, Any]:
    """Return the GPU's state now, from nvidia-smi: MHz, W, degrees Celsius. Empty where it cannot be read."""
    if device.type != "cuda" or torch.version.hip:
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    # CUDA numbers the visible GPUs only, nvidia-smi all of them, so the card is asked for by its own name.
    which = [f"--id=GPU-{uuid}"] if uuid is not None else []
    lines = kept.nvidia_smi(",".join(_ASKED), *which)
    if len(lines) != 1 or len(lines[0].split(",")) != len(_ASKED):
        return {}
    values = (text.strip() for text in lines[0].split(","))
    return {name: _number(text) for name, text in zip(_ASKED.values(), values, strict=True)}


def _number(text: str) -> float | None:
    """Return a figure as a number, and None for what the driver does not tell ("[N/A]")."""
    try:
        return float(text)
    except ValueError:
        return None
