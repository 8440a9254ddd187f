"""Frames that a node shows under its widgets."""

from __future__ import annotations

import torch
from comfy_api.latest import ui
from torch import Tensor

from .host import io


def preview(images: list[Tensor], node: type[io.ComfyNode]) -> dict[str, object]:
    """Return the ui entries of frames [1, H, W, 3] of one size, written to the host's temporary folder."""
    return ui.PreviewImage(torch.cat([image.float().cpu() for image in images]), cls=node).as_dict()
