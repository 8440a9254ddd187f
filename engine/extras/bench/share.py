"""A file of one GPU's measurements to share (card, versions, times, dB and schedules), and a table of such files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..tuning import kept
from . import schema
from .environment import environment
from .measure import Bench, Case
from .schema import OURS
from .subject import read_weights
from .table import cell, clip

#: Frames, width and height of the decode; its calls after the first one; the frames that are compared with fp32.
CLIP, RUNS, COMPARED = (21, 1280, 720), 5, 9
_COLUMNS = ("GPU", "VAE", "clip", "precision", "ms per frame", "GB", "dB against fp32", "schedules", "versions")
#: Longest text of a cell: files come from anywhere.
_LONGEST = 60


def measured(weights: str, precision: str, device: torch.device, norm_groups: int | None) -> dict[str, Any]:
    """Measure one decode and return a report like `bench decode`, with the tuned schedules.

    Args:
        weights: as for `read_weights`.
        precision: name of the precision.
        device: the GPU.
        norm_groups: groups of norms, if the file does not tell.
    """
    bench = Bench(read_weights(weights), device, RUNS, COMPARED, norm_groups)
    frames, width, height = CLIP
    row = bench.ours(Case("decoder", precision, frames - (frames - 1) % bench.architecture.temporal, width, height))
    settings = {"command": "tune", "weights": "", "architecture": bench.architecture.name, "widths": bench.widths,
                "runs": RUNS, "input": "seeded", "db_frames": COMPARED}  # fmt: skip
    return with_tuning(schema.report("decode", environment(device), settings, [row]), device)


def with_tuning(report: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the report with the tuned schedules of the device, if it has some."""
    known = kept.of(device)
    return report if known is None else report | {"tuning": known.as_dict()}


def gpus(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return lines of a Markdown table with a row for each decode that this pack ran in the reports."""
    yield "| " + " | ".join(_COLUMNS) + " |"
    yield "|" + "---|" * len(_COLUMNS)
    rows = [(report["environment"], report["settings"], row) for report in reports for row in report["rows"]
            if report["kind"] == "decode" and row["who"] == OURS and row["skipped"] is None]  # fmt: skip
    for about, settings, row in sorted(rows, key=lambda r: (r[2]["width"] * r[2]["height"], r[2]["ms_per_frame"])):
        target = f" under {row['target_gb']:g} GB" if row["target_gb"] else ""
        known = ("zerowaste_vae", "torch", "triton", "driver")
        versions = [f"{name} {about[name]}" for name in known if about.get(name)]
        yield "| " + " | ".join(map(_plain, (
            about.get("gpu") or about.get("device"), settings.get("architecture"),
            f"{clip(row).partition(' ')[2]}{target}", row["precision"], cell(row["ms_per_frame"]),
            cell(row["reserved_gb"]), cell(row["db"]), about.get("schedules") or "-", ", ".join(versions),
        ))) + " |"  # fmt: skip


def _plain(value: object) -> str:
    """Return a value as text that Markdown does not interpret."""
    text = " ".join(str(value).split())[:_LONGEST]
    return "".join(c if c.isalnum() or c in " .,()+-_/%:" else f"&#{ord(c)};" for c in text)
