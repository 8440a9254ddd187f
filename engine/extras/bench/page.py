"""A report as one HTML page without scripts and outside requests, readable in light, in dark and on paper."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from . import projection
from .plots import svg
from .table import COLUMNS, NOTE, cells, environment_line, limit_line, setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Zero-Waste VAE: measured</title><style>
:root { color-scheme: light dark }
body { margin: 0 auto; max-width: 960px; padding: 24px 16px; font: 15px/1.5 system-ui, sans-serif }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px }
caption, th:first-child, td:first-child, td[colspan] { text-align: left }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid GrayText; vertical-align: top }
td:nth-child(n+3) { white-space: nowrap }
td small { display: block }
img { width: 100%; margin: 24px 0; background: white }
.projected { border: 1px dashed; padding: 0 16px }
@media print { img, tr { break-inside: avoid } }
</style></head><body>
<h1>Zero-Waste VAE: measured</h1>
<p>Times are medians of whole calls, host memory to host memory, after a first call that is stated apart; in brackets
the fastest and the slowest. Memory is in GB of 2<sup>30</sup> bytes. The speed limit is the FLOP at the rate of the
vendor's matrix products plus the bytes at that of copies, both measured in the same run.</p>
"""


def page(reports: Sequence[Mapping[str, Any]], figures: Mapping[str, Figure]) -> str:
    """Return the page as text. figures: result of plots.plots for the same reports."""
    body = [line for report in reports for line in _report(report)]
    for figure in figures.values():
        picture = b64encode(svg(figure).encode()).decode()
        body.append(f'<img alt="{escape(figure.get_suptitle())}" src="data:image/svg+xml;base64,{picture}">')
    body += [line for report in reports for line in _projected(report)]
    return _HEAD + "\n".join(body) + "\n</body></html>\n"


def _report(report: Mapping[str, Any]) -> Iterator[str]:
    about, settings = report["environment"], report["settings"]
    yield f"<h2>{escape(environment_line(about))}</h2>"
    named = f"weights {settings['weights']} ({settings['architecture']})" if settings["weights"] else ""
    extra = [named or f"weights of {settings['architecture']}", f"widths {', '.join(map(str, settings['widths']))}",
             f"{settings['runs']} runs", f"input {settings['input']}", str(about.get("system")),
             f"Python {about.get('python')}", str(about.get("time"))]  # fmt: skip
    yield f"<p>{escape('; '.join(extra))}</p>"
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(setting(row), []).append(row)
    for name, rows in groups.items():
        yield f"<table><caption><b>{escape(name)}</b><br>{escape(limit_line(rows[0]))}</caption>"
        yield f"<tr>{''.join(f'<th>{head}</th>' for head in COLUMNS)}</tr>"
        yield from map(_row, rows)
        yield "</table>"
    if any(row.get("process_gb") is not None for row in report["rows"]):
        yield f"<p>{NOTE}</p>"


def _row(row: Mapping[str, Any]) -> str:
    who = escape(row["who"])
    if row["skipped"] is not None:
        return f'<tr><td>{who}</td><td colspan="8">did not run: {escape(row["skipped"])}</td></tr>'
    _, *figures = cells(row)
    return f"<tr><td>{who}<small>{escape(row['ran'])}</small></td>{''.join(f'<td>{f}</td>' for f in figures)}</tr>"


def _projected(report: Mapping[str, Any]) -> Iterator[str]:
    rows = list(projection.project(report))
    if rows:
        yield ('<div class="projected"><h2>Projected, not measured</h2>'
               "<p>What the measured share of the speed limit would give on cards that nobody measured here, if their "
               "products and copies reach the published peaks and the kernels come as close to them as on "
               f"{escape(str(report['environment'].get('gpu')))}.</p><ul>")
        yield from (f"<li>{escape(projection.line(row))}; {escape(row['source'])}</li>" for row in rows)
        yield "</ul></div>"
