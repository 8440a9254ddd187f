"""Conversion of network frames to the output tensor, chunk by chunk, and of video frames to network input."""

from __future__ import annotations

import torch
from torch import Tensor

OUTPUTS = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}


def to_unit(x: Tensor) -> Tensor:
    """Convert frames of any layout in 0..1 (or uint8 0..255) to float32 in -1..1."""
    return (x.float() / 127.5 if x.dtype == torch.uint8 else x.float() * 2.0).sub_(1.0)


def to_network(video: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Convert [B, f, H, W, 3] in 0..1 (or uint8 0..255) to [B, 3, f, H, W] in -1..1 on the device."""
    return to_unit(video.to(device)).to(dtype).permute(0, 4, 1, 2, 3).contiguous()


def to_pixels(frames: Tensor, output: torch.dtype, signed: bool = False) -> Tensor:
    """Convert [B, 3, f, H, W] about -1..1 to [B, f, H, W, 3] of type `output`, still on the device.

    Values are clamped to 0..1, or rounded to 0..255 for uint8; signed ones stay as they are."""
    if signed:
        return frames.to(output).permute(0, 2, 3, 4, 1)
    x = frames.float().clamp(-1.0, 1.0).mul_(0.5).add_(0.5)
    if output == torch.uint8:
        x = x.mul_(255.0).round_()
    return x.to(output).permute(0, 2, 3, 4, 1)
