"""Plots of a report: time against the speed limit, time by stage, memory over time against the target, dB against
speed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .canvas import SERIES, Figure
from .schema import OURS
from .table import cell, setting, source

Row = Mapping[str, Any]
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 210, 90, 68, 46


def plots(reports: Sequence[Mapping[str, Any]], profile: Mapping[str, Any] | None = None) -> dict[str, Figure]:
    """Return the figures of every setting that was measured, by name, without rows that did not run.

    Args:
        reports: results of `bench`.
        profile: JSON of `profile`, for a plot by stage.
    """
    places = [source(report) for report in reports]
    found = {}
    for place in dict.fromkeys(places):
        rows = [row for own, report in zip(places, reports, strict=True) if own == place for row in report["rows"]]
        # Reports of two cards, or of two VAEs, share no speed limit.
        found |= _plots([row for row in rows if row["skipped"] is None], f"{place}: " if len(set(places)) > 1 else "")
    if profile is not None:
        found["stages"] = stage_plot(profile)
    return found


def _plots(rows: Sequence[Row], place: str) -> dict[str, Figure]:
    groups: dict[str, list[Row]] = {}
    by_clip: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(place + setting(row), []).append(row)
        if row["db"] is not None:
            what = "decode" if row["half"] == "decoder" else "encode"
            by_clip.setdefault(f"{place}{what} {row['width']}x{row['height']} x {row['frames']}", []).append(row)
    found = {}
    for name, own in groups.items():
        found[f"time-{_key(name)}"] = time_plot(name, own)
        if any(row["trace"] for row in own):
            found[f"memory-{_key(name)}"] = memory_plot(name, own)
    return found | {f"quality-{_key(name)}": quality_plot(name, own) for name, own in by_clip.items()}


def _key(name: str) -> str:
    """Return the name in lower case with every other run of characters than letters and digits as one "-"."""
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def time_plot(name: str, rows: Sequence[Row]) -> Figure:
    """Draw bars of ms per frame with their spread, and the speed limit as a line."""
    pitch = 34
    figure = Figure(_WIDTH, _TOP + pitch * len(rows) + _BOTTOM, f"Milliseconds per frame: {name}")
    _title(figure, "Time per frame against the speed limit", name)
    limit = 1e3 * rows[0]["floor_s"] / rows[0]["frames"]
    top = max(1e3 * row["high_s"] / row["frames"] for row in rows)
    ticks = _ticks(0, top)
    bottom = _TOP + pitch * len(rows)
    scale = _axis_x(figure, ticks, bottom, "ms per frame (median; whisker: fastest to slowest call)")
    for index, row in enumerate(rows):
        y = _TOP + pitch * index + 7
        colour = "s0" if _ours(row) else "peer"
        figure.text(_LEFT - 10, y + 15, row["who"], size=13, anchor="end")
        hint = f"{row['who']}: {row['ms_per_frame']:.2f} ms per frame. {row['ran']}"
        figure.box(_LEFT, y, scale(row["ms_per_frame"]) - _LEFT, pitch - 14, colour, hint)
        low, high = (scale(1e3 * row[n] / row["frames"]) for n in ("low_s", "high_s"))
        middle = y + (pitch - 14) / 2
        figure.line([(low, middle), (high, middle)], "ink", 1.5)
        share = f"{row['ms_per_frame']:.1f} ms, {100 * row['floor_share']:.0f} %"
        figure.text(max(high, scale(row["ms_per_frame"])) + 8, y + 15, share, "dim", 12)
    figure.line([(scale(limit), _TOP - 4), (scale(limit), bottom)], "limit", 1.5, dashed=True)
    figure.text(scale(limit) + 4, _TOP - 8, f"speed limit {limit:.1f} ms (100 %)", "limit", 12)
    return figure


def memory_plot(name: str, rows: Sequence[Row]) -> Figure:
    """Draw the reserved GB (CPU: of the process) over one call for every row, and the target as a line."""
    figure = Figure(_WIDTH, 380 + 18 * len(rows), f"Memory over time: {name}")
    process = rows[0]["process_gb"] is not None
    what = "resident memory of the process" if process else "reserved on the GPU; thin: allocated"
    _title(figure, "Memory during one call", f"{name} ({what})")
    left, bottom = 64, 320
    seconds = max((p[0] for row in rows for p in row["trace"]), default=1.0)
    target = rows[0]["target_gb"]
    top = max([p[2] for row in rows for p in row["trace"]] + ([target] if target else []))
    y_ticks, x_ticks = _ticks(0, top), _ticks(0, seconds)
    y = _axis_y(figure, y_ticks, left, _TOP, bottom, "GB")
    x = _axis_x(figure, x_ticks, bottom, "seconds", left)
    for index, row in enumerate(rows):
        colour = f"s{index % SERIES}"
        points = row["trace"]
        if not points:
            continue
        if not process:
            figure.line([(x(t), y(a)) for t, a, _ in points], colour, 0.7)
        figure.line([(x(t), y(r)) for t, _, r in points], colour, 2)
        stated = f", stated {row['stated_gb']:.2f} GB" if row.get("stated_gb") else ""
        peak = row["process_gb"] if process else row["reserved_gb"]
        place = bottom + 56 + 18 * index
        figure.box(left, place - 9, 18, 4, colour)
        figure.text(left + 26, place - 2, f"{row['who']}: peak {cell(peak)} GB{stated}", size=12)
    if target:
        figure.line([(left, y(target)), (_WIDTH - _RIGHT, y(target))], "limit", 1.5, dashed=True)
        figure.text(_WIDTH - _RIGHT, y(target) - 5, f"target {target:g} GB", "limit", 12, "end")
    return figure


def quality_plot(name: str, rows: Sequence[Row]) -> Figure:
    """Draw dB against fp32 over frames per second, one dot per row."""
    figure = Figure(_WIDTH, 380 + 18 * len(rows), f"Quality against speed: {name}")
    _title(figure, "Quality against speed (up and right is better)", f"{name}: {rows[0]['db_note']}")
    left, bottom = 64, 320
    rates = [1e3 / row["ms_per_frame"] for row in rows]
    low, high = min(row["db"] for row in rows), max(row["db"] for row in rows)
    y = _axis_y(figure, _ticks(low - 3, high + 3), left, _TOP, bottom, "dB")
    x = _axis_x(figure, _ticks(0, max(rates)), bottom, "frames per second", left)
    for index, (row, rate) in enumerate(zip(rows, rates, strict=True)):
        colour = f"s{index % SERIES}"
        label = f"{row['who']}, {row['precision']}" + (f", target {row['target_gb']:g} GB" if row["target_gb"] else "")
        figure.dot(x(rate), y(row["db"]), 6, colour, f"{label}: {row['db']:.1f} dB, {rate:.1f} frames/s")
        place = bottom + 56 + 18 * index
        figure.dot(left + 9, place - 7, 5, colour)
        figure.text(left + 26, place - 2, f"{label}: {row['db']:.1f} dB at {rate:.1f} frames per second", size=12)
    return figure


def stage_plot(profile: Mapping[str, Any]) -> Figure:
    """Draw bars of milliseconds by stage with the speed limit of each, from the JSON of `profile`."""
    stages = profile["stages"]
    pitch = 30
    figure = Figure(_WIDTH, _TOP + pitch * len(stages) + _BOTTOM, "Time by stage against the speed limit")
    below = profile.get("title", "red: the speed limit of each stage")
    _title(figure, "Time by stage against the speed limit", str(below))
    scale = _axis_x(figure, _ticks(0, max(s["ms"] for s in stages)), _TOP + pitch * len(stages), "ms per frame")
    for index, stage in enumerate(stages):
        y = _TOP + pitch * index + 6
        figure.text(_LEFT - 10, y + 14, stage["name"], size=13, anchor="end")
        figure.box(_LEFT, y, scale(stage["ms"]) - _LEFT, pitch - 12, "s0", f"{stage['name']}: {stage['ms']:.2f} ms")
        share = f"{stage['ms']:.2f} ms"
        if stage.get("floor_ms") is not None and stage["ms"]:
            mark = scale(stage["floor_ms"])
            figure.line([(mark, y - 3), (mark, y + pitch - 9)], "limit", 2)
            share += f", {100 * stage['floor_ms'] / stage['ms']:.0f} %"
        figure.text(scale(stage["ms"]) + 8, y + 14, share, "dim", 12)
    return figure


def _ours(row: Row) -> bool:
    return row["who"] == OURS


def _title(figure: Figure, title: str, below: str) -> None:
    figure.text(12, 20, title, size=16)
    figure.text(12, 38, below, "dim", 12)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values from low to at least high."""
    span = max(high - low, 1e-9)
    unit = 10 ** math.floor(math.log10(span / 5))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if span / (unit * m) <= 6)
    first = math.floor(low / step)
    return [step * i for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def _axis_x(figure: Figure, ticks: Sequence[float], bottom: float, label: str,
            left: float = _LEFT) -> Callable[[float], float]:
    right = _WIDTH - _RIGHT

    def place(value: float) -> float:
        return left + (right - left) * (value - ticks[0]) / ((ticks[-1] - ticks[0]) or 1)

    for tick in ticks:
        figure.line([(place(tick), _TOP), (place(tick), bottom)], "grid")
        figure.text(place(tick), bottom + 16, f"{tick:g}", "dim", 11, "middle")
    figure.text((left + right) / 2, bottom + 34, label, "dim", 12, "middle")
    return place


def _axis_y(figure: Figure, ticks: Sequence[float], left: float, top: float, bottom: float,
            label: str) -> Callable[[float], float]:
    def place(value: float) -> float:
        return bottom - (bottom - top) * (value - ticks[0]) / ((ticks[-1] - ticks[0]) or 1)

    for tick in ticks:
        figure.line([(left, place(tick)), (_WIDTH - _RIGHT, place(tick))], "grid")
        figure.text(left - 8, place(tick) + 4, f"{tick:g}", "dim", 11, "end")
    figure.text(left - 8, top - 6, label, "dim", 12, "end")
    return place
