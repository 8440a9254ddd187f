"""Projected times on cards that were not measured: their published peaks at the measured share of the speed limit.

A projection is never a measurement, and is always called projected: it assumes that the other card's products and
copies reach its published peaks, and that the kernels come as close to that as on the measured card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..archs import DEFAULT
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


#: GeForce cards run products with fp32 accumulation at half the rate of fp16 accumulation; all figures are dense.
CARDS = (
    Card("RTX 5070 Ti", 120, {"fp16": 88, "bf16": 88, "fp16_fast": 176, "fp8": 352, "int8": 352}, 0.896,
         "derived: scaled from the published rates of the RTX 5090, within 2 %"),
    Card("RTX 4090", 89, {"fp16": 165.2, "bf16": 165.2, "fp16_fast": 330.3, "fp8": 660.6, "int8": 660.6}, 1.008,
         "derived: NVIDIA's Ada architecture paper, boost clock; fp8 with fp16 accumulation"),
    Card("RTX 3090", 86, {"fp16": 71, "bf16": 71, "fp16_fast": 142, "int8": 284}, 0.936,
         "derived: NVIDIA's GA102 architecture paper, boost clock; has no fp8"),
)  # fmt: skip

#: Width, height and frames of the projected clip.
CLIP = 1280, 720, 81


def published(name: str, sm: int) -> Card | None:
    """Return the card of this name, or the one kept for a generation's name ("sm_89"); None if there is none."""
    known = (card for card in CARDS if card.name.lower() == name.lower() or (name.startswith("sm_") and card.sm == sm))
    return next(known, None)


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
