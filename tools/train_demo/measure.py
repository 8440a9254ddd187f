"""Measure the PSNR of clips through a model: 8-bit frames as 0..1, peak 1, clamped, mean latent, weights in fp16.

    python -m zerowaste_vae.tools.train_demo.measure --clips clips/clips.npz
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch

from ...engine.extras.bench import metrics
from ...engine.network.plain import Network


@torch.no_grad()
def reconstruct(model: Network, frames: np.ndarray) -> np.ndarray:
    """Reconstruct uint8 [F, H, W, 3] as float32 in 0..1 of the same shape (F = 4n + 1, H and W multiples of 8).

    This is the engine's plain float32 forward with the weights rounded to fp16, as they ship.
    """
    model = copy.deepcopy(model).half().float()
    device = next(model.parameters()).device
    x = torch.from_numpy(frames).to(device).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    y = model.decoder(model.sample(model.encoder(x)))
    return (y[0].permute(1, 2, 3, 0) / 2 + 0.5).clamp(0, 1).cpu().numpy()


def psnr(source: np.ndarray, result: np.ndarray) -> float:
    """Return the PSNR in dB; `source` uint8, `result` 0..1."""
    return metrics.psnr(np.square(source / 255 - result.astype(np.float64)).mean())


def main() -> None:
    from ...engine import demo_vae_path, load

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", type=Path, default=demo_vae_path(), help="weights (default: the shipped ones)")
    parser.add_argument("--clips", type=Path, required=True, help=".npz of uint8 clips [F, H, W, 3] (make_clip)")
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    vae = load(args.vae, precision=args.precision)
    for name, clip in np.load(args.clips).items():
        for kind, frames in (("clip", clip), ("first frame alone", clip[:1])):
            latent = vae.encode(torch.from_numpy(frames).float() / 255)
            result = vae.decode(latent)[0].float().numpy()
            spread = latent.float().std((0, 2, 3, 4))
            print(
                f"{name}, {kind}: {psnr(frames, result):.2f} dB ({vae.precision}), latent std {latent.std():.2f}, "
                f"per channel {spread.min():.2f} to {spread.max():.2f}, largest {latent.abs().max():.1f}", flush=True,
            )


if __name__ == "__main__":
    main()
