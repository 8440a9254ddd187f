"""Train the demo VAE: single frames first, then clips. Runs for a given time and continues from its saved state.

    python -m zerowaste_vae.tools.train_demo.train --pictures pictures.npz --state run/ --seconds 550 --total 1100

Needs a CUDA GPU for any useful speed; `--tiny` is a dry run with small batches for a CPU.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...engine.families.seedvr2 import ARCHITECTURE, Config
from ...engine.network.plain import Network
from . import fast
from .canvases import SIDE, make_pool
from .export import save
from .init import inflate, start
from .measure import psnr, reconstruct
from .motion import clips

#: multiples of 16: on an H200 a 3x3x3 conv of 32 channels takes less time than one of 24 (2.1 against 3.3 ms)
CONFIG = Config((32, 48, 64, 64), (32, 48, 64, 64), norm_groups=8)
#: weight of the KL term against log(MSE): latent noise then costs about half of it, relative, in MSE
KL_WEIGHT = 0.01
#: MSE of -1..1 pixels (36 dB) below which a sample no longer earns much
EASY = 1e-3
WARMUP_STEPS, CLIP_NORM, EMA = 300, 1.0, 0.999


@dataclass(frozen=True)
class Phase:
    """Batches of one shape, cut from `pool` canvases of `side` pixels, until `until` (share of the total time)."""

    until: float
    batch: int
    frames: int
    height: int
    width: int
    pool: int
    side: int = SIDE


PHASES = (Phase(0.3, 64, 1, 128, 128, 1024), Phase(0.75, 16, 9, 128, 128, 1024), Phase(1.0, 6, 17, 160, 176, 1024))
TINY = (Phase(0.5, 2, 1, 32, 32, 8, 96), Phase(1.0, 1, 5, 32, 32, 8, 96))


def loss_function(model: Network, frozen_past: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return loss(clips [B, F, H, W, 3], noise like the latent) -> (loss, mean MSE, latent std)."""

    def loss(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = fast.encode(model, x, frozen_past=frozen_past).chunk(2, -1)
        logvar = logvar.clamp(-12, 4)
        y = fast.decode(model, mean + (0.5 * logvar).exp() * noise, frozen_past=frozen_past)
        mse = (y - x).square().mean((1, 2, 3, 4))
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        # log(MSE) is PSNR: every clip counts alike, however hard its texture is.
        return (mse + EASY).log().mean() + KL_WEIGHT * kl, mse.detach().mean(), mean.detach().std()

    return loss


class Run:
    """Model, averaged weights, optimiser and the share of the planned time they have had."""

    def __init__(self, folder: Path, device: torch.device, config: Config, seed: int) -> None:
        self.path, self.device, self.seed = folder / "state.pt", device, seed
        self.model, self.ema = ARCHITECTURE.build(config), ARCHITECTURE.build(config)
        start(self.model, seed)
        self.model.to(device)
        self.ema.to(device).requires_grad_(False).load_state_dict(self.model.state_dict())
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=1e-3, fused=device.type == "cuda"
        )
        self.progress, self.step, self.phase = 0.0, 0, 0
        if self.path.exists():
            state = torch.load(self.path, map_location=device)
            self.model.load_state_dict(state["model"])
            self.ema.load_state_dict(state["ema"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.progress, self.step, self.phase = state["progress"], state["step"], state["phase"]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = {"model": self.model.state_dict(), "ema": self.ema.state_dict()}
        parts |= {"optimiser": self.optimiser.state_dict(), "progress": self.progress}
        temporary = self.path.with_suffix(".tmp")
        torch.save(parts | {"step": self.step, "phase": self.phase}, temporary)
        temporary.replace(self.path)

    @torch.no_grad()
    def average(self) -> None:
        decay = min(EMA, self.step / (self.step + 20))
        mine, theirs = list(self.ema.parameters()), list(self.model.parameters())
        torch._foreach_lerp_(mine, theirs, 1 - decay)


def train(
    run: Run,
    phases: tuple[Phase, ...],
    pictures: list[Tensor],
    seconds: float,
    total: float,
    peak_rate: float,
    steps: float = math.inf,
) -> None:
    """Train until `seconds` have passed or `steps` are done here, or `total` seconds of steps in all.

    Only steps count towards `total`, which the schedule spans; compiling and making canvases do not.
    """
    began, device, last = time.monotonic(), run.device, run.step + steps
    while run.progress < 1 and run.step < last and time.monotonic() - began < seconds:
        phase = phases[run.phase]
        images = phase.frames == 1
        loss = torch.compile(loss_function(run.model, images), dynamic=False, disable=device.type != "cuda")
        pool = make_pool(pictures, phase.pool, run.seed + 1000 * run.phase + run.step, device, phase.side)
        g = torch.Generator(device).manual_seed(run.seed + 7919 * run.phase + run.step)
        shape = (phase.batch, (phase.frames - 1) // 4 + 1, phase.height // 8, phase.width // 8, 16)
        clock, since, mses = None, run.step, []
        while run.step < last and time.monotonic() - began < seconds:
            x = clips(g, pool, phase.batch, phase.frames, phase.height, phase.width, objects=1 if images else 2)
            value, mse, std = loss(x, torch.randn(shape, generator=g, device=device))
            run.optimiser.zero_grad(set_to_none=True)
            value.backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), CLIP_NORM)
            rate = peak_rate * min(1, (run.step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * run.progress))
            for group in run.optimiser.param_groups:
                group["lr"] = rate
            run.optimiser.step()
            run.step += 1
            run.average()
            mses.append(mse)
            if len(mses) == 50 or clock is None:
                decibel = 10 * math.log10(4 / torch.stack(mses).mean().item())  # waits for the GPU
                if not math.isfinite(decibel):
                    raise SystemExit(f"diverged before step {run.step}; the saved state is from before")
                now = time.monotonic()
                if clock is None:
                    print(f"phase {run.phase}: first step after {now - began:.0f} s", flush=True)
                else:
                    run.progress += (now - clock) / total
                    if run.step // 500 > since // 500:
                        run.save()
                        pace = 1000 * (now - clock) / len(mses)
                        print(
                            f"step {run.step} done {run.progress:.3f} batch {decibel:.2f} dB latent std {std:.2f} "
                            f"rate {rate:.1e} {pace:.1f} ms/step", flush=True,
                        )
                clock, since, mses = now, run.step, []
                if run.progress >= phase.until:
                    break
        if run.progress >= phase.until:
            run.phase += 1
            if images and run.phase < len(phases):
                inflate(run.model)
                inflate(run.ema)
        run.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, required=True, help="pack of training pictures (pictures.pack)")
    parser.add_argument("--state", type=Path, required=True, help="folder of the saved state; continued if present")
    parser.add_argument("--out", type=Path, required=True, help="where the averaged weights go (.safetensors)")
    parser.add_argument("--clips", type=Path, help=".npz of uint8 clips [F, H, W, 3] to measure at the end")
    parser.add_argument("--seconds", type=float, required=True, help="stop after this long")
    parser.add_argument("--total", type=float, required=True, help="seconds of training steps the schedule spans")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="dry run with small batches")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    pictures = [torch.from_numpy(p).permute(2, 0, 1) for p in np.load(args.pictures).values()]
    run = Run(args.state, device, CONFIG, args.seed)
    train(run, TINY if args.tiny else PHASES, pictures, args.seconds, args.total, args.rate)
    save(run.ema, args.out)
    for name, clip in np.load(args.clips).items() if args.clips else ():
        for kind, frames in (("clip", clip), ("first frame alone", clip[:1])):
            print(f"{name}, {kind}: {psnr(frames, reconstruct(run.ema, frames)):.2f} dB", flush=True)


if __name__ == "__main__":
    main()
