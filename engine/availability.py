"""Which optimisations can do something for a model on a device."""

from __future__ import annotations

import torch

from .options import unavailable
from .planning.fusable import why_off


def availability(
    device: torch.device | str, architecture: str, config: object, dtype: torch.dtype
) -> dict[str, str | None]:
    """For each toggle None where it can do something for this model on this device, else the reason why not.

    architecture, config: as a VideoVAE's `arch` and `model.config` (None: the published widths). Imports no Triton.
    """
    device = torch.device(device)
    return unavailable(device, dtype, why_off(architecture, config, dtype, device))
