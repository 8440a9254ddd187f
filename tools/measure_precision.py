"""Measure each precision's loss: PSNR (peak 2.0, not clamped), SSIM of decode and encode against fp32 on plain torch.

    python tools/measure_precision.py [VAE] --clips clips.npz [--clip held_back] [--frames 25] [--modes fp16,fp8,...]

Ranges of 8-bit inputs come from the VAE's calibration. Encoders are judged by the fp32 decode of their mean latents.
`auto` is the choice of a floor of --min-db for this clip on a GPU with fp8. fp16_fast is computed with fp16 sums even
where the GPU gains nothing by them, and left out on a CPU. Random weights: `zerowaste-vae bench decode --precisions`.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from zerowaste_vae.engine import VideoVAE, demo_vae_path, load, read_checkpoint
from zerowaste_vae.engine.errors import ZeroWasteError
from zerowaste_vae.engine.extras.bench import metrics
from zerowaste_vae.engine.extras.bench.subject import copy_of
from zerowaste_vae.engine.extras.eight_bit.mixed import Mixed
from zerowaste_vae.engine.extras.eight_bit.sampling import (
    Saturation,
    decibel,
    decode,
    encode,
    latent_samples,
    mse,
    video_samples,
)
from zerowaste_vae.engine.extras.eight_bit.table import Table
from zerowaste_vae.engine.kernels.targets import standing_in, target
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime.scope import scoped_math

MODES = "fp16,fp16_fast,fp8,int8,auto"


def ssim(a: Tensor, b: Tensor) -> float:
    """Return the mean SSIM of frames [F, H, W, 3] in -1..1."""
    x, y = (t.clamp(-1, 1).add(1).div(2) for t in (a, b))
    return sum(metrics.ssim(p, q) for p, q in zip(x, y, strict=True)) / len(x)


class Judge:
    """The fp32 reference on the plain modules. Clips are [F, H, W, 3] in -1..1, latents [T, h, w, C] as the network has
    them."""

    def __init__(self, vae: VideoVAE) -> None:
        self._vae = vae

    def encode(self, clip: Tensor) -> Tensor:
        moments = self._vae.encode_raw(clip.permute(3, 0, 1, 2)[None], chunk=1)
        return moments[0, : self._vae.latent_channels].permute(1, 2, 3, 0)

    def decode(self, latent: Tensor) -> Tensor:
        return self._vae.decode_raw(latent.permute(3, 0, 1, 2)[None], chunk=1)[0].permute(1, 2, 3, 0)


class Subject:
    """A fp16 VAE with samples for each component, to check a floor on."""

    def __init__(self, vae: VideoVAE, clips: dict[str, list[Tensor]]) -> None:
        self.vae = vae
        self._clips = clips

    def table(self, half: str) -> Table:
        table = self.vae.store.table(half)
        if table is None or not table.fits(eligible(getattr(self.vae.model, half))):
            raise SystemExit(f"{self.vae.path}: calibrate it first (zerowaste-vae calibrate)")
        return table

    def policy(self, half: str, mode: str, min_db: float) -> Policy:
        """Return the choice of a floor for `auto`, otherwise the whole component in `mode`."""
        vae = self.vae
        if mode in ("fp16", "fp16_fast"):
            return Policy(half_accumulate=mode == "fp16_fast")
        if mode == "auto":
            self.table(half)
            options = replace(vae.options, min_db=min_db)
            mixed = Mixed(Mode("fp8"), vae.model, vae.dtype, options, vae.store)
            return mixed.settle(half, lambda *_: self._clips[half])
        return Policy(dict.fromkeys(eligible(getattr(vae.model, half)), mode), self.table(half).ranges)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vae", nargs="?", type=Path, default=demo_vae_path())
    parser.add_argument("--clips", type=Path, required=True, help=".npz of uint8 clips (tools/train_demo/make_clip.py)")
    parser.add_argument("--clip", default="held_back")
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--min-db", type=float, default=50.0, help="floor of auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="append one line of JSON per mode")
    args = parser.parse_args()
    device, half = torch.device(args.device), torch.float16
    name, weights = f"{args.vae.name}, {args.clip}", read_checkpoint(args.vae)
    video = torch.from_numpy(np.load(args.clips)[args.clip][: args.frames]).float() / 255
    clip = 2 * video.to(device) - 1
    with scoped_math(device):
        judge = Judge(load(copy_of(weights), precision="fp32", device=device))
        latent = judge.encode(clip)
        frames = judge.decode(latent)
        vae = load(weights, precision="fp16", device=device)
        subject = Subject(vae, {"encoder": video_samples(clip),
                                "decoder": latent_samples(latent.permute(3, 0, 1, 2)[None])})  # fmt: skip
        print(f"{name}, {len(clip)} frames of {clip.shape[2]}x{clip.shape[1]}, on {device}")
        print(f"{'':10}{'decode dB':>10}{'SSIM':>9}{'8 bit':>7}{'encode dB':>10}{'SSIM':>9}{'8 bit':>7}  saturated")
        for mode in args.modes.split(","):
            if mode == "fp16_fast" and device.type == "cpu":
                continue
            row: dict[str, object] = {"weights": name, "mode": mode}
            saturation, text, fast = Saturation(), mode.ljust(10), mode == "fp16_fast"
            for part in ("decoder", "encoder"):
                policy = subject.policy(part, mode, args.min_db)
                network = fuse(getattr(vae.model, part), half, operands=Operands(half, policy), device=vae.device)
                run, source = (decode, latent) if part == "decoder" else (encode, clip)
                with standing_in(replace(target(device), half_accumulate=True)) if fast else nullcontext():
                    out = run(network, source, saturation)
                if part == "encoder":
                    out = judge.decode(out)
                db, similar = decibel(mse([out], [frames])), ssim(out, frames)
                share = subject.table(part).share(policy.kinds) if policy.kinds else 0.0
                row[part] = {"db": db, "ssim": similar, "share": share, "convolutions": len(policy.kinds)}
                text += f"{db:10.2f}{similar:9.5f}{100 * share:6.0f} %"
            row["saturated"], row["operands"] = saturation.count, saturation.total
            print(f"{text}  {saturation.count} of {saturation.total}", flush=True)
            if args.json:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    try:
        main()
    except ZeroWasteError as error:
        sys.exit(f"error: {error}")
