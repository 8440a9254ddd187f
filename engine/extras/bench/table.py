"""Reports as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Figures of a row that ran, memory in GB.
COLUMNS = ("by", "ms/frame", "(min to max)", "first", "alloc", "reserved", "stated", "of limit", "dB")
_WIDTHS = (34, 9, 20, 8, 7, 8, 7, 8, 7)
#: Last line of a table that holds such figures.
NOTE = "* resident memory of the whole process: a CPU has no allocator that could be asked"


def environment_line(environment: Mapping[str, Any]) -> str:
    """Return the GPU (or CPU) and versions in one line."""
    where = environment.get("gpu") or f"CPU, {environment.get('threads')} threads"
    parts = [where, f"torch {environment.get('torch')}"]
    for name, label in (("cuda", "CUDA"), ("cudnn", "cuDNN"), ("triton", "Triton"), ("driver", "driver")):
        if environment.get(name):
            parts.append(f"{label} {environment[name]}")
    return ", ".join(parts)


def source(report: Mapping[str, Any]) -> str:
    """Return the device and VAE of a report: `NVIDIA H200, flux`."""
    about, settings = report["environment"], report["settings"]
    return f"{about.get('gpu') or 'CPU'}, {settings['weights'] or settings['architecture']}"


def clip(row: Mapping[str, Any]) -> str:
    """Return what was done with which clip: `decode 1280x720 x 21`."""
    what = "decode" if row["half"] == "decoder" else "encode"
    return f"{what} {row['width']}x{row['height']} x {row['frames']}"


def setting(row: Mapping[str, Any]) -> str:
    """Return the setting that a group of rows shares: `decode 1280x720 x 21 frames, fp16, target 13 GB`."""
    target = f", target {row['target_gb']:g} GB" if row["target_gb"] else ""
    return f"{clip(row)} frames, {row['precision']}{target}"


def limit_line(row: Mapping[str, Any]) -> str:
    """Return the speed limit of a row and the figures it follows from."""
    tops = row["ceilings"]
    work = f"{row['composed_tflop']:.4g} TFLOP (as published {row['tflop']:.4g})"
    rates = f"{tops['matrix']:.4g} TFLOP/s ({tops['product']} products), copies at {tops['copy']:.3g} TB/s"
    return f"speed limit {1e3 * row['floor_s'] / row['frames']:.2f} ms per frame: {work} at {rates}"


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Format all rows of decode and encode, grouped by setting, with the speed limit of each group."""
    for before, row in zip((None, *rows), rows, strict=False):
        yield from after(before, row)


def after(before: Mapping[str, Any] | None, row: Mapping[str, Any]) -> Iterator[str]:
    """Format `row` when `before` was the last one: under a new heading where the setting changes."""
    if before is None or setting(before) != setting(row):
        yield from ("", setting(row), limit_line(row), _line(COLUMNS))
    if row["skipped"] is not None:  # with the reason
        yield f"{row['who']:{_WIDTHS[0]}} did not run: {row['skipped']}"
        return
    yield _line(cells(row))
    yield f"{'':{_WIDTHS[0]}} {row['ran']}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts of a row that ran, one for each of COLUMNS."""
    per_frame = 1e3 / row["frames"]
    spread = f"({row['low_s'] * per_frame:.2f} to {row['high_s'] * per_frame:.2f})"
    process = row["process_gb"]
    reserved = cell(row["reserved_gb"]) if process is None else f"{process:.2f}*"  # of the whole process, see NOTE
    db = f"{row['db']:.1f}" if row["db"] is not None else "equal" if row["db_note"].startswith("equal") else "-"
    return (row["who"], cell(row["ms_per_frame"]), spread, f"{row['first_s']:.1f} s", cell(row["allocated_gb"]),
            reserved, cell(row.get("stated_gb")), f"{100 * row['floor_share']:.0f} %", db)


def _line(cells: Sequence[str]) -> str:
    first, *rest = cells
    return f"{first:{_WIDTHS[0]}} " + " ".join(f"{c:>{w}}" for c, w in zip(rest, _WIDTHS[1:], strict=True))


def cell(value: float | None) -> str:
    """Format a figure of a table; "-" where there is none."""
    return "-" if value is None else f"{value:.2f}"
