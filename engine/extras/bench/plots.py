"""Draw the plots of a report with matplotlib: time against the speed limit, memory over time, dB against speed."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from .schema import OURS
from .table import cell, clip, setting, source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
#: Those of the series are Okabe and Ito's, which stay apart for colour-blind eyes.
COLOURS = {
    "ink": "#1b1f24", "dim": "#5d6673", "grid": "#dfe3e8", "peer": "#a9b1bd", "limit": "#c0392b", "ours": "#0072b2",
}  # fmt: skip
_SERIES = ("#0072b2", "#d55e00", "#009e73", "#b3589a", "#8a6d00", "#5b6ee1", "#7a4b2a", "#4d5560")
_SETTINGS = {
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "zerowaste-vae", "font.size": 9,
    "axes.axisbelow": True, "axes.grid": True, "grid.color": COLOURS["grid"], "axes.edgecolor": COLOURS["grid"],
    "text.color": COLOURS["ink"], "axes.labelcolor": COLOURS["dim"], "xtick.color": COLOURS["dim"],
    "ytick.color": COLOURS["dim"], "ytick.labelcolor": COLOURS["ink"], "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def check_matplotlib() -> None:
    """Raise InputError, with the cure, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--html and --png draw with matplotlib, which is not installed: pip install matplotlib")


def plots(reports: Sequence[Mapping[str, Any]], profile: Mapping[str, Any] | None = None) -> dict[str, Figure]:
    """Return a figure by name for every setting that was measured, without rows that did not run.

    Args:
        reports: results of `bench`.
        profile: JSON of `profile`, for a plot by stage.
    """
    from matplotlib import rc_context

    places = [source(report) for report in reports]
    found: dict[str, Figure] = {}
    with rc_context(_SETTINGS):
        for place in dict.fromkeys(places):
            rows = [row for own, report in zip(places, reports, strict=True) if own == place for row in report["rows"]]
            # Reports of two cards, or of two VAEs, share no speed limit.
            prefix = f"{place}: " if len(set(places)) > 1 else ""
            found |= _plots([row for row in rows if row["skipped"] is None], prefix)
        if profile is not None:
            found["stages"] = _stages(profile)
    return found


def svg(figure: Figure) -> str:
    """Return a figure as the text of an SVG file."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context(_SETTINGS):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all. Raises OSError."""
    from matplotlib import rc_context

    from ..output.writing import replacing

    with replacing(path) as temporary, rc_context(_SETTINGS):
        figure.savefig(temporary, format="png", dpi=200)


def _plots(rows: Sequence[Row], place: str) -> dict[str, Figure]:
    groups: dict[str, list[Row]] = {}
    by_clip: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(place + setting(row), []).append(row)
        if row["db"] is not None:
            by_clip.setdefault(place + clip(row), []).append(row)
    found = {}
    for name, own in groups.items():
        found[f"time-{_key(name)}"] = _times(name, own)
        if any(row["trace"] for row in own):
            found[f"memory-{_key(name)}"] = _memory(name, own)
    return found | {f"quality-{_key(name)}": _quality(name, own) for name, own in by_clip.items()}


def _key(name: str) -> str:
    """Return the name in lower case with every other run of characters than letters and digits as one "-"."""
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def _times(name: str, rows: Sequence[Row]) -> Figure:
    """Draw bars of ms per frame with their spread, and the speed limit as a line."""
    ms = [row["ms_per_frame"] for row in rows]
    low, high = ([1e3 * row[end] / row["frames"] for row in rows] for end in ("low_s", "high_s"))
    limit = 1e3 * rows[0]["floor_s"] / rows[0]["frames"]
    notes = [f"{row['ms_per_frame']:.1f} ms, {100 * row['floor_share']:.0f} %" for row in rows]
    below = f"{name}; red: the speed limit, {limit:.1f} ms (100 %)"
    figure, axes = _bars("Time per frame against the speed limit", below, [row["who"] for row in rows], ms, notes, high)
    for bar, row in zip(axes.patches, rows, strict=True):
        bar.set_color(COLOURS["ours" if row["who"] == OURS else "peer"])
    axes.hlines(range(len(ms)), low, high, color=COLOURS["ink"], linewidth=1.2)
    axes.axvline(limit, color=COLOURS["limit"], linestyle="--", linewidth=1.2)
    axes.set_xlabel("ms per frame (median; whisker: fastest to slowest call)")
    return figure


def _stages(profile: Mapping[str, Any]) -> Figure:
    """Draw bars of milliseconds by stage with the speed limit of each, from the JSON of `profile`."""
    stages = profile["stages"]
    ms, limits = [s["ms"] for s in stages], [s.get("floor_ms") for s in stages]
    notes = [f"{m:.2f} ms" + (f", {100 * limit / m:.0f} %" if limit is not None and m else "")
             for m, limit in zip(ms, limits, strict=True)]  # fmt: skip
    below = str(profile.get("title", "red: the speed limit of each stage"))
    figure, axes = _bars("Time by stage against the speed limit", below, [s["name"] for s in stages], ms, notes, ms)
    for place, limit in enumerate(limits):
        if limit is not None:
            axes.vlines(limit, place - 0.4, place + 0.4, color=COLOURS["limit"], linewidth=1.5)
    axes.set_xlabel("ms per frame")
    return figure


def _memory(name: str, rows: Sequence[Row]) -> Figure:
    """Draw the reserved GB (CPU: of the process) over one call for every row, and the target as a line."""
    process = any(row["process_gb"] is not None for row in rows)
    what = "resident memory of the process" if process else "reserved on the GPU; thin: allocated"
    figure, axes = _axes("Memory during one call", f"{name} ({what})", 3.4 + 0.2 * len(rows))
    for index, row in enumerate(rows):
        if not row["trace"]:
            continue
        seconds, allocated, reserved = zip(*row["trace"], strict=True)
        colour = _SERIES[index % len(_SERIES)]
        stated = f", stated {row['stated_gb']:.2f} GB" if row.get("stated_gb") else ""
        peak = row["process_gb"] if process else row["reserved_gb"]
        axes.plot(seconds, reserved, color=colour, label=f"{row['who']}: peak {cell(peak)} GB{stated}")
        if not process:
            axes.plot(seconds, allocated, color=colour, linewidth=0.7)
    if target := rows[0]["target_gb"]:
        axes.axhline(target, color=COLOURS["limit"], linestyle="--", linewidth=1.2, label=f"target {target:g} GB")
    axes.set(xlabel="seconds", ylabel="GB", ylim=(0, 1.05 * axes.get_ylim()[1]), xlim=(0, None))
    return _with_legend(figure, axes)


def _quality(name: str, rows: Sequence[Row]) -> Figure:
    """Draw dB against fp32 over frames per second, one dot per row."""
    below = f"{name}: {rows[0]['db_note']}"
    figure, axes = _axes("Quality against speed (up and right is better)", below, 3.4 + 0.2 * len(rows))
    for index, row in enumerate(rows):
        rate, target = 1e3 / row["ms_per_frame"], f", target {row['target_gb']:g} GB" if row["target_gb"] else ""
        label = f"{row['who']}, {row['precision']}{target}: {row['db']:.1f} dB at {rate:.1f} frames per second"
        axes.plot(rate, row["db"], "o", color=_SERIES[index % len(_SERIES)], label=label)
    low, high = min(row["db"] for row in rows), max(row["db"] for row in rows)
    axes.set(xlabel="frames per second", ylabel="dB", ylim=(low - 3, high + 3), xlim=(0, axes.get_xlim()[1]))
    return _with_legend(figure, axes)


def _axes(title: str, below: str, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of a height in inches with a title and a smaller line below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    axes.set_title(below, loc="left", fontsize=9, color=COLOURS["dim"])
    return figure, axes


def _bars(
    title: str, below: str, names: Sequence[str], ms: Sequence[float], notes: Sequence[str], ends: Sequence[float]
) -> tuple[Figure, Axes]:
    """Draw a horizontal bar for each name, the first at the top, with a note right of `ends`."""
    figure, axes = _axes(title, below, 1.3 + 0.32 * len(names))
    axes.barh(range(len(names)), ms, 0.6, color=COLOURS["ours"])
    for place, (note, end, wide) in enumerate(zip(notes, ends, ms, strict=True)):
        axes.annotate(note, (max(end, wide), place), (6, 0), textcoords="offset points", va="center",
                      fontsize=8, color=COLOURS["dim"])  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.18 * max((*ends, *ms)) or 1)
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left")
    return figure
