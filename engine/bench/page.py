"""A report as one HTML page without scripts and outside requests, readable in light, in dark and on paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from . import projection
from .plots import COLOURS, svg
from .table import cell, clip, environment_line, limit_line, setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
@media print { :root { color-scheme: light; LIGHT } .figure, tr { break-inside: avoid } body { max-width: none } }
body { box-sizing: border-box; margin: 0 auto; max-width: 960px; padding: 24px 16px 64px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
h2 { font-size: 19px; margin: 40px 0 8px; border-top: 1px solid var(--grid); padding-top: 20px }
p { max-width: 72ch }
.dim, caption, td small { color: var(--dim) }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px }
caption { text-align: left; padding: 6px 0 }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--grid); vertical-align: top }
th { font-weight: 600; white-space: nowrap }
th:first-child, td:first-child, td.why { text-align: left }
td small { display: block; max-width: 46ch; font-weight: 400 }
tr.ours td { font-weight: 600 }
.figure { margin: 24px 0 } .figure svg { width: 100%; height: auto; display: block }
svg text { font-family: inherit !important }
.projected { border: 1px dashed var(--limit); padding: 12px 16px; margin-top: 12px }
.projected h2 { border: 0; margin: 0; padding: 0 } .tag { color: var(--limit) }
"""
_HEADS = ("", "ms per frame", "first call, s", "allocated, GB", "reserved, GB", "stated, GB", "of speed limit", "dB")
_PROJECTED = ("card", "clip", "projected, s", "projected, ms per frame", "speed limit at its peaks, s", "share used")


def page(reports: Sequence[Mapping[str, Any]], figures: Mapping[str, Figure]) -> str:
    """Return the page as text. figures: result of plots.plots for the same reports."""
    body = [
        "<h1>Zero-Waste VAE: measured</h1>",
        '<p class="dim">Times are medians of whole calls, host memory to host memory, after a first call that is '
        "stated apart; in brackets the fastest and the slowest. GB are 2<sup>30</sup> bytes. The speed limit is the "
        "FLOP at the rate of the vendor's matrix products plus the bytes at that of copies, both measured in the same "
        "run.</p>",
    ]
    for report in reports:
        body += _report(report)
    body += [f'<div class="figure">{svg(figure)}</div>' for figure in figures.values()]
    for report in reports:
        body += _projected(report)
    light, dark = (";".join(f"--{role}: {pair[i]}" for role, pair in COLOURS.items()) for i in (0, 1))
    style = _STYLE.replace("LIGHT", light).replace("DARK", dark)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (f'<!doctype html>\n<html lang="en"><head>{head}<title>Zero-Waste VAE: measured</title>'
            f"<style>{style}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n")


def _report(report: Mapping[str, Any]) -> Iterator[str]:
    about, settings = report["environment"], report["settings"]
    yield f"<h2>{escape(environment_line(about))}</h2>"
    named = f"weights {settings['weights']} ({settings['architecture']})" if settings["weights"] else ""
    extra = [named or f"weights of {settings['architecture']}", f"widths {', '.join(map(str, settings['widths']))}",
             f"{settings['runs']} runs", f"input {settings['input']}", str(about.get("system")),
             f"Python {about.get('python')}", str(about.get("time"))]  # fmt: skip
    yield f'<p class="dim">{escape("; ".join(extra))}</p>'
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(setting(row), []).append(row)
    for name, rows in groups.items():
        heads = list(_HEADS)
        if any(row.get("process_gb") is not None for row in rows):
            heads[4] = "process, GB"
        caption = f"<caption><b>{escape(name)}</b><br>{escape(limit_line(rows[0]))}</caption>"
        yield _table(heads, map(_row, rows), caption)


def _table(heads: Sequence[str], rows: Iterator[str], caption: str = "") -> str:
    cells = "".join(f"<th>{head}</th>" for head in heads)
    return f'<div class="wide"><table>{caption}<tr>{cells}</tr>\n' + "\n".join(rows) + "\n</table></div>"


def _row(row: Mapping[str, Any]) -> str:
    who = escape(row["who"])
    if row["skipped"] is not None:
        return f'<tr><td>{who}</td><td class="why" colspan="7">did not run: {escape(row["skipped"])}</td></tr>'
    each = 1e3 / row["frames"]
    spread = f"{row['ms_per_frame']:.2f}<small>({row['low_s'] * each:.2f} to {row['high_s'] * each:.2f})</small>"
    memory = row["reserved_gb"] if row["process_gb"] is None else row["process_gb"]
    db = f"{row['db']:.1f}" if row["db"] is not None else escape(row["db_note"])
    texts = (f"{who}<small>{escape(row['ran'])}</small>", spread, f"{row['first_s']:.2f}", cell(row["allocated_gb"]),
             cell(memory), cell(row.get("stated_gb")), f"{100 * row['floor_share']:.0f} %", db)
    kind = ' class="ours"' if row["who"] == projection.OURS else ""
    return f"<tr{kind}>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>"


def _projected(report: Mapping[str, Any]) -> Iterator[str]:
    rows = list(projection.project(report))
    if rows:
        yield ('<div class="projected"><h2><span class="tag">Projected</span>, not measured</h2>'
               "<p>What the measured share of the speed limit would give on cards that nobody measured here, if their "
               "products and copies reach the published peaks and the kernels come as close to them as on "
               f"{escape(str(report['environment'].get('gpu')))}.</p>")
        yield _table(_PROJECTED, map(_projected_row, rows)) + "</div>"


def _projected_row(row: Mapping[str, Any]) -> str:
    name = (f"<td>{escape(row['card'])}<small>{escape(row['source'])}</small></td>"
            f"<td>{escape(clip(row))}, {escape(row['precision'])}</td>")
    if row["skipped"]:
        return f'<tr>{name}<td class="why" colspan="4">none: {escape(row["skipped"])}</td></tr>'
    return (f"<tr>{name}<td>{row['projected_s']:.1f}</td><td>{1e3 * row['projected_s'] / row['frames']:.1f}</td>"
            f"<td>{row['floor_s']:.1f}</td><td>{100 * row['share']:.0f} %</td></tr>")
