"""Draw the pictures of docs/figures: charts from the recorded JSON files there, seams from a photo in the demo VAE.

    python tools/draw_figures.py

Needs the installed pack, matplotlib and, for the photo, SciPy (`pip install ".[standalone,report]" scipy pooch`); the
decodes of seams.png take a minute on a CPU. Charts are changed by recording new numbers, never in this script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
import zerowaste_vae
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from PIL import Image
from scipy import datasets
from zerowaste_vae.engine.extras.bench.metrics import psnr

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
#: What ComfyUI's VAE Decode (Tiled) begins with, in pixels.
TILE, OVERLAP = 512, 64
OURS, OTHERS = "#2a7f62", "#b8b8b8"


def main() -> None:
    """Write one PNG for each recorded file."""
    decodes()
    limits()
    seams()


def decodes() -> None:
    """Draw time and memory of decodes next to ComfyUI's own, as bars."""
    recorded = read("decodes")
    rows = recorded["rows"][::-1]
    figure, (times, memory) = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
    bars(times, rows, "ms", "ms a frame, lower is better")
    bars(memory, rows, "gb", "GB of GPU memory, lower is better")
    times.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel(wrapped(recorded["measured"]), fontsize=7, color="#555555")
    save(figure, "decodes")


def bars(axes: Axes, rows: list[dict[str, Any]], key: str, title: str) -> None:
    """Draw one pair of bars a row, each with its number."""
    kinds = ((-0.2, "ComfyUI 0.33.0", f"comfy_{key}", OTHERS), (0.2, "Zero-Waste VAE", key, OURS))
    for shift, name, field, colour in kinds:
        places = [i + shift for i in range(len(rows))]
        drawn = axes.barh(places, [row[field] for row in rows], 0.38, label=name, color=colour)
        axes.bar_label(drawn, fmt="%g", padding=2, fontsize=8)
    axes.set_xlabel(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)


def limits() -> None:
    """Draw the time of a frame against the memory limit, one line a clip."""
    recorded = read("limits")
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for clip in recorded["clips"]:
        gb, ms = zip(*clip["points"], strict=True)
        axes.plot(gb, ms, marker="o", label=clip["name"])
    axes.set_xlabel("memory limit, GB (--vram-gb)", fontsize=9)
    axes.set_ylabel("ms a frame", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.supxlabel(wrapped(recorded["measured"]), fontsize=7, color="#555555")
    save(figure, "limits")


def seams() -> None:
    """Draw a photo of 1024x768 that went through the demo VAE, decoded whole and in blended tiles, and the difference.

    The photo is SciPy's raccoon (public domain, from public-domain-image.com), which the VAE never saw in training."""
    photo = torch.from_numpy(datasets.face().copy()).to(torch.float32) / 255
    vae = zerowaste_vae.load(zerowaste_vae.demo_vae_path(), device="cpu")
    latent = vae.encode(photo[None])
    whole = vae.decode(latent)[0, 0]
    blended = vae.decode(latent, tiling="blended", tile=TILE, overlap=OVERLAP)[0, 0]
    off = (blended - whole).abs()
    grey = off.amax(-1, keepdim=True).mul(4).clamp(0, 1).expand(whole.shape)
    shown = {
        f"whole frame (ours, under any limit)\n{decibels(whole - photo)} from the photo": whole,
        f"blended tiles of {TILE} pixels, overlap {OVERLAP}\n{decibels(blended - photo)} from the photo": blended,
        f"difference of the two x 4\n{decibels(off)}, at most {off.max() * 255:.0f} of 255": grey,
    }
    figure, places = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    for axes, (title, picture) in zip(places, shown.items(), strict=True):
        axes.imshow(picture.numpy(), interpolation="antialiased")
        axes.set_title(title, fontsize=9)
        axes.set_axis_off()
    save(figure, "seams")
    with Image.open(FIGURES / "seams.png") as drawn:  # a third of the bytes
        drawn.convert("RGB").quantize(256).save(FIGURES / "seams.png", optimize=True)


def decibels(error: torch.Tensor) -> str:
    """Return the PSNR, peak 1, of an error."""
    return f"{psnr(error.square().mean().item()):.1f} dB"


def read(name: str) -> dict[str, Any]:
    """Return a recorded file."""
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def wrapped(text: str) -> str:
    """Break a long line in two."""
    words = text.split(", ")
    half = (len(words) + 1) // 2
    return ", ".join(words[:half]) + ",\n" + ", ".join(words[half:])


def save(figure: plt.Figure, name: str) -> None:
    """Write the picture without the date that matplotlib puts in, so that equal numbers give equal files."""
    figure.savefig(FIGURES / f"{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
