"""A report as one HTML page without scripts and outside requests, readable in light, in dark and on paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from . import projection
from .canvas import COLOURS, Figure
from .table import cell, environment_line, limit_line, setting

_STYLE = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
@media print { :root { color-scheme: light; LIGHT } .figure, tr { break-inside: avoid } body { max-width: none } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 960px; padding: 24px 16px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
h1 { font-size: 26px; margin: 8px 0 }
h2 { font-size: 19px; margin: 40px 0 8px; border-top: 1px solid var(--grid); padding-top: 20px }
p, li { max-width: 72ch }
.dim, caption, td small { color: var(--dim) }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px }
caption { text-align: left; padding: 6px 0 }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--grid); vertical-align: top }
th { font-weight: 600; white-space: nowrap }
td.why { text-align: left }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
td small { display: block; max-width: 46ch }
tr.ours td { font-weight: 600 } tr.ours td small { font-weight: 400 }
.figure { margin: 24px 0 } .figure svg { width: 100%; height: auto; display: block }
svg text { font-family: inherit }
.projected { border: 1px dashed var(--limit); padding: 12px 16px; margin-top: 12px } .projected h2 { border: 0;
  margin: 0; padding: 0 } .tag { color: var(--limit); font-weight: 600 }
"""


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
    for figure in figures.values():
        body.append(f'<div class="figure">{figure.svg()}</div>')
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
    extra = [f"weights {settings['weights']} ({settings['architecture']}, widths "
             f"{', '.join(map(str, settings['widths']))})", f"{settings['runs']} runs", f"input {settings['input']}",
             f"{about.get('system')}", f"Python {about.get('python')}", str(about.get("time"))]
    yield f'<p class="dim">{escape("; ".join(extra))}</p>'
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(setting(row), []).append(row)
    for name, rows in groups.items():
        yield from _table(name, rows)


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    first = rows[0]
    memory = "process, GB" if any(row.get("process_gb") is not None for row in rows) else "reserved, GB"
    heads = ("", "ms per frame", "first call, s", "allocated, GB", memory, "stated, GB", "of speed limit", "dB")
    cells = "".join(f"<th>{escape(text)}</th>" for text in heads)
    caption = f"<caption><b>{escape(name)}</b><br>{escape(limit_line(first))}</caption>"
    yield f'<div class="wide"><table>{caption}<tr>{cells}</tr>'
    for row in rows:
        yield _row(row)
    yield "</table></div>"


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
    if not rows:
        return
    yield '<div class="projected"><h2><span class="tag">Projected</span>, not measured</h2>'
    yield ("<p>What the measured share of the speed limit would give on cards that nobody measured here, if their "
           "products and copies reach the published peaks and the kernels come as close to them as on "
           f"{escape(str(report['environment'].get('gpu')))}.</p>")
    heads = ("card", "clip", "projected, s", "projected, ms per frame", "speed limit at its peaks, s", "share used")
    yield '<div class="wide"><table><tr>' + "".join(f"<th>{h}</th>" for h in heads) + "</tr>"
    for row in rows:
        what = "decode" if row["half"] == "decoder" else "encode"
        clip = f"{what} {row['width']}x{row['height']} x {row['frames']}, {row['precision']}"
        name = f"<td>{escape(row['card'])}<small>{escape(row['source'])}</small></td><td>{escape(clip)}</td>"
        if row["skipped"]:
            yield f'<tr>{name}<td class="why" colspan="4">none: {escape(row["skipped"])}</td></tr>'
            continue
        yield (f"<tr>{name}<td>{row['projected_s']:.1f}</td><td>{1e3 * row['projected_s'] / row['frames']:.1f}</td>"
               f"<td>{row['floor_s']:.1f}</td><td>{100 * row['share']:.0f} %</td></tr>")
    yield "</table></div></div>"
