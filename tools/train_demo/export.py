"""Write the demo VAE: fp16 safetensors with the published parameter names."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from ...engine.models.seedvr2 import SeedVR2


def save(model: SeedVR2, path: Path) -> None:
    """Weights rounded to fp16; metadata `norm_num_groups` tells loaders what shapes cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", torch.float16).contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, path, {"norm_num_groups": str(model.config.norm_groups), "format": "pt"})
