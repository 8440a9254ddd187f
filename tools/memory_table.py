"""Write the table of docs/memory.md: what the planner states today for the decodes that its rows name.

    python tools/memory_table.py            with the checkout importable as zerowaste_vae; needs no GPU

A row names families and a size, and frames where they are not the usual number: "CogVideoX, 720x480, 49 frames".
tests/tools/test_memory_table.py compares rows with the planner.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from zerowaste_vae.engine.errors import PlanError
from zerowaste_vae.engine.extras.cli.card import Card
from zerowaste_vae.engine.extras.cli.plan import planner_of
from zerowaste_vae.engine.families import by_words
from zerowaste_vae.engine.network.architecture import Architecture
from zerowaste_vae.engine.planning.budget import DEFAULT_SHARE, Limits, Machine
from zerowaste_vae.engine.planning.planner import Planner
from zerowaste_vae.engine.request import Request

PAGE = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
#: The table's lines, below its head.
TABLE = re.compile(r"(?<=^\| \| 8 GB \| 12 GB \| 16 GB \| 24 GB \|\n\|---\|---\|---\|---\|---\|\n)(?:\|.*\|\n)+", re.M)
CARDS, HOST_GB, GIB = (8, 12, 16, 24), 32.0, 1 << 30
#: Its generation's form of convolutions is that of RTX 30 and 50.
CARD = Card("RTX 4090", 89)


def labels(text: str) -> list[str]:
    """Return the first cells of the table's rows. text: of the page."""
    return [line.split("|")[1].strip() for line in TABLE.search(text)[0].splitlines()]


def row(label: str) -> str:
    """Return the row of the table for a label. Raises ValueError where its families differ."""
    *names, size = label.removesuffix(" frames").split(", ")
    frames = None
    if size.isdigit():
        frames, size = int(size), names.pop()
    width, height = map(int, size.split("x"))
    cells = set()
    for family in map(by_words, names):
        planner, shape = planned(family, width, height, frames)
        cells.add(tuple(cell(planner, shape, gb) for gb in CARDS))
    if len(cells) > 1:
        raise ValueError(f"{label}: {sorted(cells)}")
    return f"| {' | '.join((label, *cells.pop()))} |\n"


def planned(family: Architecture, width: int, height: int, frames: int | None) -> tuple[Planner, tuple[int, int, int]]:
    """Return a family's planner for CARD, and a latent's time steps, rows and columns. Sizes are in pixels; frames
    None: the usual number."""
    usual = 1 if family.still else family.filled(81)
    planner, _ = planner_of(family, family.published.config, "decoder", "auto", CARD, "auto")
    return planner, (family.latents(frames or usual), height // family.spatial, width // family.spatial)


def cell(planner: Planner, shape: tuple[int, int, int], gb: int) -> str:
    """Return the stated GB on a card of that many GB, and after a + those in host memory; or "blended"."""
    host = Machine.bare(torch.device("cuda"), None).host(HOST_GB)
    try:
        plan = planner.plan("decoder", shape, Request(), Limits(int(DEFAULT_SHARE * gb * GIB), host=host))
    except PlanError:
        return "no"
    if plan.tiled:
        return "blended"
    parked = f" + {plan.host_bytes / GIB:.1f}" if plan.host_bytes >= GIB / 20 else ""
    return f"{plan.peak_bytes / GIB:.1f}{parked}"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub("".join(map(row, labels(page))), page), encoding="utf-8")
