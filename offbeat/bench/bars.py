"""Bars beside each other, as one SVG that needs no style sheet: medians, least and greatest.

>>> svg = draw([Bars("share", {"sync": [0.5, 0.6, 0.9]})])
>>> svg.startswith("<svg") and "0.60" in svg
True
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, ROW, TOP, BOTTOM = 96, 44, 20, 30, 12
WIDTH = 330
STYLE = (
    "text{font:12px sans-serif;fill:#666}.title{font-weight:bold}.end{text-anchor:end}"
    "rect{fill:#4c78a8}path{stroke:#888;stroke-width:1.5;fill:none}.one{stroke-dasharray:4 3}"
)


@dataclass(frozen=True)
class Bars:
    title: str
    values: Mapping[str, list[float]]
    """By name, those of every round; at 1 there is a line."""


def draw(panels: Sequence[Bars]) -> str:
    height = TOP + ROW * max((len(panel.values) for panel in panels), default=0) + BOTTOM
    width = WIDTH * len(panels)
    inner = "".join(_panel(panel, WIDTH * index, height) for index, panel in enumerate(panels))
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return f"{head}<style>{STYLE}</style>{inner}</svg>\n"


def _panel(panel: Bars, x: float, height: float) -> str:
    most = max(1.0, *(max(found) for found in panel.values.values()))
    scale = (WIDTH - LEFT - RIGHT) / most
    one = f'<path class="one" d="M{LEFT + scale:.1f} {TOP - 4}V{height - BOTTOM}"/>'
    rows = [
        _row(name, found, TOP + ROW * index, scale)
        for index, (name, found) in enumerate(panel.values.items())
    ]
    title = f'<text class="title" x="8" y="16">{escape(panel.title)}</text>'
    return f'<g transform="translate({x:g} 0)">{title}{one}{"".join(rows)}</g>'


def _row(name: str, found: list[float], y: float, scale: float) -> str:
    value, low, high = statistics.median(found), min(found), max(found)
    middle = y + ROW / 2
    return (
        f'<text class="end" x="{LEFT - 6}" y="{middle + 4}">{escape(name)}</text>'
        f'<rect x="{LEFT}" y="{y + 3}" width="{value * scale:.1f}" height="{ROW - 6}" rx="2"/>'
        f'<path d="M{LEFT + low * scale:.1f} {middle}H{LEFT + high * scale:.1f}"/>'
        f'<text x="{LEFT + high * scale + 6:.1f}" y="{middle + 4}">{value:.2f}</text>'
    )
