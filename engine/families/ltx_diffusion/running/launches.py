"""Every kernel that the decoder launches."""

from __future__ import annotations

import copy

import torch

from ....network.plain import Half
from ....network.state import State
from ....planning.launches import LARGE, META
from ..diffusion import Given


def launch(half: Half, dtype: torch.dtype, kind: str | None) -> None:
    """Run one latent, which is a whole clip, without values. kind: type of its products' operands, "fp8" or "int8";
    None: `dtype`."""
    side, state = LARGE // 8, State(given=Given(kind=kind))
    state.ending = True
    latents = torch.empty(1, half.program.takes, 1, side, side, device=META, dtype=dtype)
    copy.deepcopy(half).to(dtype)(latents, state)
