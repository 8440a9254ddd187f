"""A small drawing surface: lines, boxes, dots and text, as inline SVG and as PNG.

Colours are names of roles ("ink", "s0", ...), not values: in SVG they are CSS variables that the page sets for light
and dark, in PNG the light values are used. Coordinates are pixels from the upper left corner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import ImageDraw

#: role -> (light, dark). The series colours are Okabe and Ito's, which stay apart for colour-blind eyes.
COLOURS = {
    "paper": ("#ffffff", "#15181d"), "ink": ("#1b1f24", "#e8eaee"), "dim": ("#5d6673", "#9aa3b0"),
    "grid": ("#dfe3e8", "#2c323b"), "peer": ("#a9b1bd", "#5a6472"), "limit": ("#c0392b", "#ff7b6b"),
    "s0": ("#0072b2", "#56b4e9"), "s1": ("#d55e00", "#f0883e"), "s2": ("#009e73", "#34c79a"),
    "s3": ("#b3589a", "#d98cc4"), "s4": ("#8a6d00", "#e6c229"), "s5": ("#5b6ee1", "#98a6ff"),
    "s6": ("#7a4b2a", "#c99a6b"), "s7": ("#4d5560", "#b7bfca"),
}  # fmt: skip
SERIES = 8
_SCALE = 2  # PNG pixels per drawing pixel


@dataclass
class Figure:
    """One plot. `title` is its accessible name."""

    width: int
    height: int
    title: str
    marks: list[tuple] = field(default_factory=list)

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.0, dashed: bool = False
    ) -> None:
        """Draw a line through points (x, y) in pixels."""
        self.marks.append(("line", [(float(x), float(y)) for x, y in points], colour, width, dashed))

    def box(self, x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> None:
        """Draw a filled box with its upper left corner at (x, y). hint: its tooltip."""
        self.marks.append(("box", float(x), float(y), float(width), float(height), colour, hint))

    def dot(self, x: float, y: float, radius: float, colour: str, hint: str = "") -> None:
        """Draw a filled circle with its centre at (x, y). hint: its tooltip."""
        self.marks.append(("dot", float(x), float(y), float(radius), colour, hint))

    def text(self, x: float, y: float, text: str, colour: str = "ink", size: int = 12, anchor: str = "start") -> None:
        """Write text with its baseline at `y`; anchor: start, middle or end."""
        self.marks.append(("text", float(x), float(y), text, colour, size, anchor))

    def svg(self) -> str:
        """Return an <svg> element; the page around it sets the colours."""
        parts = [f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">']
        for kind, *mark in self.marks:
            parts.append(_SVG[kind](*mark))
        return "\n".join([*parts, "</svg>"])

    def to_png(self, path: Path) -> None:
        """Write the light version, twice as large. Raises OSError."""
        from PIL import Image, ImageDraw

        from ..files.writing import replacing

        big = Image.new("RGB", (self.width * _SCALE, self.height * _SCALE), COLOURS["paper"][0])
        draw = ImageDraw.Draw(big)
        for kind, *mark in self.marks:
            _PNG[kind](draw, *mark)
        with replacing(path) as temporary:
            big.save(temporary, format="PNG")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _svg_line(points: list[tuple[float, float]], colour: str, width: float, dashed: bool) -> str:
    corners = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    style = f'fill="none" stroke="var(--{colour})" stroke-width="{width:g}" stroke-linejoin="round"{dash}'
    return f'<polyline points="{corners}" {style}/>'


def _svg_box(x: float, y: float, width: float, height: float, colour: str, hint: str) -> str:
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    return f'<rect {place} fill="var(--{colour})"><title>{escape(hint)}</title></rect>'


def _svg_dot(x: float, y: float, radius: float, colour: str, hint: str) -> str:
    place = f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"'
    return f'<circle {place} fill="var(--{colour})"><title>{escape(hint)}</title></circle>'


def _svg_text(x: float, y: float, text: str, colour: str, size: int, anchor: str) -> str:
    place = f'x="{_n(x)}" y="{_n(y)}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="var(--{colour})">{escape(text)}</text>'


_SVG = {"line": _svg_line, "box": _svg_box, "dot": _svg_dot, "text": _svg_text}


def _light(colour: str) -> str:
    return COLOURS[colour][0]


def _png_line(draw: ImageDraw.ImageDraw, points: list, colour: str, width: float, dashed: bool) -> None:
    scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
    thick = max(1, round(width * _SCALE))
    if not dashed:
        draw.line(scaled, fill=_light(colour), width=thick, joint="curve")
        return
    for (x0, y0), (x1, y1) in pairwise(scaled):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
        at = 0.0
        while at < length:
            a, b = at / length, min(1.0, (at + 6 * _SCALE) / length)
            ends = [(x0 + (x1 - x0) * t, y0 + (y1 - y0) * t) for t in (a, b)]
            draw.line(ends, fill=_light(colour), width=thick)
            at += 10 * _SCALE


def _png_box(draw: ImageDraw.ImageDraw, x: float, y: float, width: float, height: float, colour: str, _: str) -> None:
    if width > 0 and height > 0:
        corner = ((x + width) * _SCALE - 1, (y + height) * _SCALE - 1)
        draw.rectangle([(x * _SCALE, y * _SCALE), (max(corner[0], x * _SCALE), max(corner[1], y * _SCALE))],
                       fill=_light(colour))


def _png_dot(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: str, _: str) -> None:
    draw.ellipse([((x - radius) * _SCALE, (y - radius) * _SCALE), ((x + radius) * _SCALE, (y + radius) * _SCALE)],
                 fill=_light(colour))


def _png_text(draw: ImageDraw.ImageDraw, x: float, y: float, text: str, colour: str, size: int, anchor: str) -> None:
    from PIL import ImageFont

    where = {"start": "l", "middle": "m", "end": "r"}[anchor] + "s"
    draw.text((x * _SCALE, y * _SCALE), text, fill=_light(colour), font=ImageFont.load_default(size * _SCALE),
              anchor=where)


_PNG = {"line": _png_line, "box": _png_box, "dot": _png_dot, "text": _png_text}
