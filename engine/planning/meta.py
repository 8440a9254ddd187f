"""Networks on the meta device, for results that depend on their shapes alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..extras.plain_memory.layouts import ByRules
from ..network.architecture import Architecture
from ..network.plain import Network
from ..runtime.scope import as_usual


@functools.lru_cache(maxsize=8)
def meta_model(architecture: Architecture, config: Any) -> Network:
    """Return the network on the meta device, in fp32. It is cached and shared: do not change it."""
    # Its tensors outlive a caller's inference mode, and dry runs are made outside of it.
    with as_usual(), torch.inference_mode(False), torch.device("meta"), ByRules():  # torch 2.6 would import sympy
        return architecture.build(config).requires_grad_(False)
