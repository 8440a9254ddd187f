"""PSNR of clips through a model: 8-bit frames as 0..1, peak 1, reconstruction clamped, mean latent, weights in fp16."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch

from ...engine.models.seedvr2 import SeedVR2


@torch.no_grad()
def reconstruct(model: SeedVR2, frames: np.ndarray) -> np.ndarray:
    """uint8 [F, H, W, 3] -> float32 in 0..1 of the same shape (F = 4n + 1, H and W multiples of 8).

    The engine's plain float32 forward with the weights rounded to fp16, as they ship.
    """
    model = copy.deepcopy(model).half().float()
    device = next(model.parameters()).device
    x = torch.from_numpy(frames).to(device).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    y = model.decoder(model.sample(model.encoder(x)))
    return (y[0].permute(1, 2, 3, 0) / 2 + 0.5).clamp(0, 1).cpu().numpy()


def psnr(source: np.ndarray, result: np.ndarray) -> float:
    """dB; `source` uint8, `result` 0..1."""
    error = np.square(source.astype(np.float64) / 255 - result.astype(np.float64)).mean()
    return math.inf if error == 0 else -10 * math.log10(error)
