"""Draw the pictures of docs/figures: charts from the recorded JSON files there, seams from a decode of the demo clip.

    python tools/draw_figures.py

Needs the installed pack and matplotlib (`pip install ".[standalone,report]"`). Charts are changed by recording new
numbers, never in this script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import zerowaste_vae
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from zerowaste_vae.engine.extras.media.clips import read_video

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
TILE, OVERLAP = 96, 16
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
    """Draw one frame of the demo clip decoded whole and in blended tiles, with their difference."""
    vae = zerowaste_vae.load(zerowaste_vae.demo_vae_path(), device="cpu")
    clip, _ = read_video(str(zerowaste_vae.demo_vae_path().parent / "demo_clip.mp4"))
    latent = vae.encode(clip[:9])
    whole = vae.decode(latent)[0, 4]
    blended = vae.decode(latent, tiling="blended", tile=TILE, overlap=OVERLAP)[0, 4]
    difference = (blended - whole).abs().mul(4).clamp(0, 1)
    shown = {
        "whole frame (ours, under any limit)": whole,
        f"blended tiles of {TILE} pixels, overlap {OVERLAP}": blended,
        f"difference x 4, at most {(blended - whole).abs().max() * 255:.0f} of 255": difference,
    }
    figure, places = plt.subplots(1, 3, figsize=(10, 2.5), layout="constrained")
    for axes, (title, picture) in zip(places, shown.items(), strict=True):
        axes.imshow(picture.numpy(), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.set_axis_off()
    save(figure, "seams")


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
