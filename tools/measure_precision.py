"""What each precision costs: PSNR (peak 2.0) and SSIM of decode and encode against fp32, with the fused networks.

    python tools/measure_precision.py [VAE] --clips clips.npz [--clip held_back] [--frames 25] [--modes fp16,fp8,...]

Ranges of 8-bit inputs come from the VAE's calibration. Encoders are judged by what the fp32 decoder makes of their mean
latents. fp16_fast is computed with fp16 sums whether or not the GPU gains by them, and left out on a CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from zerowaste_vae.engine import demo_vae_path, load, metrics
from zerowaste_vae.engine.fused.decoder import FusedDecoder
from zerowaste_vae.engine.fused.encoder import FusedEncoder
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.conv3d import dispatch
from zerowaste_vae.engine.precision.measure import Saturation, decibel, decode, encode, mse
from zerowaste_vae.engine.precision.operands import Operands
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime.scope import scoped_math


def ssim(a: Tensor, b: Tensor) -> float:
    """Mean SSIM of frames [F, H, W, 3] in -1..1."""
    x, y = (t.clamp(-1, 1).add(1).div(2) for t in (a, b))
    return sum(metrics.ssim(p, q) for p, q in zip(x, y, strict=True)) / len(x)


def policy_of(vae: object, half: str, mode: str) -> Policy:
    if mode in ("fp16", "fp16_fast"):
        return Policy(half_accumulate=mode == "fp16_fast")
    table, keys = vae.store.table(half), eligible(getattr(vae.model, half))
    if table is None or not table.fits(keys):
        raise SystemExit(f"{vae.path}: calibrate it first (zerowaste-vae calibrate)")
    return Policy(dict.fromkeys(keys, mode), table.ranges)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vae", nargs="?", type=Path, default=demo_vae_path())
    parser.add_argument("--clips", type=Path, required=True, help=".npz of uint8 clips (tools/train_demo/make_clip.py)")
    parser.add_argument("--clip", default="held_back")
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--modes", default="fp16,fp16_fast,fp8,int8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device, half = torch.device(args.device), torch.float16
    clip = torch.from_numpy(np.load(args.clips)[args.clip][: args.frames]).to(device).float() / 127.5 - 1
    with scoped_math(device):
        model = load(args.vae, precision="fp32", device=device).model
        judge = FusedDecoder(model.decoder, torch.float32)
        latent = encode(FusedEncoder(model.encoder, torch.float32), clip)
        frames = decode(judge, latent)
        print(f"{args.vae.name}, {args.clip}, {len(clip)} frames of {clip.shape[2]}x{clip.shape[1]}, on {device}")
        print(f"{'':10} {'decode':>8} {'SSIM':>8} {'encode':>8} {'SSIM':>8}  saturated")
        vae = load(args.vae, precision="fp16", device=device)
        capable = dispatch.target
        for mode in args.modes.split(","):
            if mode == "fp16_fast":
                if device.type == "cpu":
                    continue
                dispatch.target = lambda where: replace(targets.target(where), half_accumulate=True)
            row, saturation = [mode.ljust(10)], Saturation()
            operands = [Operands(half, policy_of(vae, name, mode)) for name in ("decoder", "encoder")]
            network = FusedDecoder(vae.model.decoder, half, operands=operands[0])
            coded = FusedEncoder(vae.model.encoder, half, operands=operands[1])
            for out in (decode(network, latent, saturation), decode(judge, encode(coded, clip, saturation))):
                row += [f"{decibel(mse([out], [frames])):8.2f}", f"{ssim(out, frames):8.5f}"]
            print(*row, f" {saturation.count} of {saturation.total}", flush=True)
            dispatch.target = capable


if __name__ == "__main__":
    main()
