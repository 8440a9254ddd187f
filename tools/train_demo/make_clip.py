"""Render the shipped demo clip and the held-back clip.

    python -m zerowaste_vae.tools.train_demo.make_clip --out clips/

Writes demo_clip.mp4 (ships in assets/), held_back.mp4 and clips.npz (both as uint8, before video coding, to measure).
The shipped clip shows pictures that are in the training set under motion that is not; the held-back clip shows a
picture and a marble that never were.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from ...engine.extras.media.mp4 import write_mp4
from .canvases import coloured_noise
from .pictures import read
from .scene import Camera, Marble, render

FRAMES, HEIGHT, WIDTH, FPS = 25, 176, 288, 12
#: H.264 quality at which coding the clip costs far less than the VAE
CRF = 8


def demo_clip() -> np.ndarray:
    """Render a slow push over a coffee cup while a galaxy marble and an amber one roll past."""
    galaxy, amber = read("hubble_deep_field.jpg") / 255.0, read("retina.jpg")
    galaxy = (255 * (galaxy**0.45 * (0.55, 0.75, 1.0))).astype(np.uint8)  # brightened to blue glass with stars in it
    camera = Camera(x=(0.43, 0.49), y=(0.52, 0.49), zoom=(1.5, 1.35), turn=(-0.02, 0.03))
    marbles = (
        Marble(amber, x=(0.92, 0.72), y=(0.26, 0.30), radius=15, spin=(0.6, -0.6), scale=0.6),
        Marble(galaxy, x=(0.10, 0.44), y=(0.74, 0.78), radius=27, spin=(-0.2, 1.6), scale=0.35),
    )
    return render(read("coffee.png"), camera, marbles, FRAMES, HEIGHT, WIDTH)


def held_back_clip() -> np.ndarray:
    """Render a cat under a panning camera and a marble of noise rolling past it."""
    g = torch.Generator().manual_seed(20_240_229)
    noise = coloured_noise(g, 1, 256)[0].permute(1, 2, 0)
    blend = torch.sigmoid(1.5 * noise.mean(2, keepdim=True))
    texture = (torch.lerp(torch.tensor([0.05, 0.25, 0.3]), torch.tensor([0.75, 0.9, 0.8]), blend) * 255).byte().numpy()
    camera = Camera(x=(0.46, 0.52), y=(0.42, 0.45), zoom=(1.15, 1.0), turn=(0.02, -0.02))
    marbles = (Marble(texture, x=(0.12, 0.42), y=(0.80, 0.76), radius=24, spin=(0.0, 1.8), scale=0.5),)
    return render(read("chelsea.png"), camera, marbles, FRAMES, HEIGHT, WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    clips = {"demo_clip": demo_clip(), "held_back": held_back_clip()}
    for name, frames in clips.items():
        write_mp4(args.out / f"{name}.mp4", torch.from_numpy(frames), FPS, crf=CRF)
        print(f"{name}: {len(frames)} frames of {WIDTH} x {HEIGHT}")
    np.savez_compressed(args.out / "clips.npz", **clips)


if __name__ == "__main__":
    main()
