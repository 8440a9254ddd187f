"""Projected times on cards that were not measured: their published peaks at the measured share of the speed limit.

A projection is never a measurement, and is always called projected: it assumes that the other card's products and
copies reach its published peaks, and that the kernels come as close to that as on the measured card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...families import DEFAULT
from ...kernels.gpus import GPUS, Gpu
from . import speed_limit
from .schema import OURS
from .subject import PUBLISHED
from .table import clip


@dataclass(frozen=True)
class Card:
    """Published dense peaks of a card in TFLOP/s by precision, and its bandwidth in TB/s.

    fp16 and bf16 accumulate in fp32, fp16_fast in fp16; fp8 is the fastest form that gives right results on the card.
    """

    name: str
    sm: int
    peaks: Mapping[str, float]
    bandwidth: float
    source: str


def peaks_of(gpu: Gpu) -> Card:
    """Return the peaks that follow from a GPU's processors, listed clock and products."""
    exact, fast, eight = (gpu.tflops(kind) for kind in ("f32", "f16", "s32"))
    peaks = {"fp16": exact, "bf16": exact, "fp16_fast": fast, "int8": eight}
    # fp8 with sums in fp16 on RTX 40, block-scaled on RTX 50: both at int8's rate.
    return Card(gpu.name, gpu.sm, peaks | ({"fp8": eight} if gpu.sm >= 89 else {}), 1e-3 * gpu.bandwidth,
                f"derived: {gpu.processors} processors at {gpu.mhz} MHz; source {gpu.source} of engine/kernels/gpus.py")


#: The cards that results are projected to where none is named, a generation each.
CARDS = tuple(peaks_of(gpu) for name in ("RTX 5070 Ti", "RTX 4090", "RTX 3090") for gpu in GPUS if gpu.name == name)

#: Width, height and frames of the projected clip.
CLIP = 1280, 720, 81


def published(name: str, sm: int) -> Card | None:
    """Return the card of this name in the table, or the one of CARDS for a generation's name ("sm_89"); None if there
    is none, and for GPUs whose own products are not mma.sync's."""
    row = next((gpu for gpu in GPUS if gpu.name == name and gpu.rates != "hopper"), None)
    if row is not None:
        return peaks_of(row)
    return next((card for card in CARDS if name.startswith("sm_") and card.sm == sm), None)


def project(report: Mapping[str, Any], cards: Sequence[Card] = CARDS) -> Iterator[dict[str, Any]]:
    """Return projected rows for these cards, for every component and precision measured on this pack's fused kernels.

    The share of the speed limit is that of the largest clip measured. Rows carry `projected` True and have no median,
    so they never look like measured ones.

    Args:
        report: result of `bench decode` or `encode` at SeedVR2's published widths; others give no rows.
        cards: cards to project to.
    """
    about = report["settings"]
    if (about.get("architecture"), about.get("widths")) != (DEFAULT.name, list(PUBLISHED.decoder_widths)):
        return
    best: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in report["rows"]:
        if row["who"] != OURS or row["skipped"] is not None or not row.get("fused"):
            continue
        key = row["half"], row["precision"]
        if key not in best or _pixels(row) > _pixels(best[key]):
            best[key] = row
    width, height, frames = CLIP
    latents = (frames - 1) // DEFAULT.temporal + 1
    for (half, precision), row in best.items():
        work = speed_limit.work(DEFAULT, PUBLISHED, half, latents, height // DEFAULT.spatial, width // DEFAULT.spatial)
        for card in cards:
            common = {"projected": True, "card": card.name, "half": half, "precision": precision, "width": width,
                      "height": height, "frames": frames, "source": card.source, "share": row["floor_share"]}
            if precision not in card.peaks:
                yield common | {"skipped": f"no published {precision} rate"}
                continue
            least = speed_limit.seconds(work, precision, card.peaks[precision], card.bandwidth)
            yield common | {"skipped": None, "floor_s": least, "projected_s": least / row["floor_share"]}


def line(row: Mapping[str, Any]) -> str:
    """Format a projected row as text."""
    name = f"projected  {row['card']:12} {clip(row)}, {row['precision']:9}"
    if row["skipped"]:
        return f"{name} none: {row['skipped']}"
    return (f"{name} {row['projected_s']:7.1f} s, {1e3 * row['projected_s'] / row['frames']:7.1f} ms/frame "
            f"(speed limit {row['floor_s']:.1f} s, share {100 * row['share']:.0f} % as measured)")


def _pixels(row: Mapping[str, Any]) -> int:
    return row["width"] * row["height"] * row["frames"]
