"""Curves over names, beside each other, as one SVG that needs no style sheet: medians, least and
greatest, on a logarithmic scale.

>>> svg = draw([Panel("seconds", ["slow", "fast"], [Curve("plain", [[], [2.0, 3.0]])])])
>>> svg.startswith("<svg") and "not reached" in svg
True
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM, ROW = 48, 24, 34, 30, 15
WIDTH, HEIGHT = 380, 300
COLORS = (
    *("#3867d6", "#d35f2b", "#12876b", "#8548c9", "#a87a00"),
    *("#c2367a", "#35808f", "#6d6a75", "#7fa650", "#1d1b20"),
    *("#86a9ff", "#ffb08a", "#5fd0ae", "#c9a0ff", "#d9bf5a"),
)
STYLE = (
    "text{font:11px sans-serif;fill:#666}.title{font-weight:bold}.end{text-anchor:end}"
    ".mid{text-anchor:middle}path{fill:none;stroke-width:2}.grid{stroke:#ccc;stroke-width:1}"
)


@dataclass(frozen=True)
class Curve:
    name: str
    values: Sequence[Sequence[float] | None]
    """For each place those of all runs; none of them: nobody came there; None: nobody tried."""


@dataclass(frozen=True)
class Panel:
    title: str
    places: Sequence[str]
    curves: Sequence[Curve]


def draw(panels: Sequence[Panel]) -> str:
    values = [v for p in panels for c in p.curves for found in c.values for v in found or ()]
    low = 10.0 ** math.floor(math.log10(max(min(values, default=1.0), 1e-3)))
    high = 10.0 ** math.ceil(math.log10(max(*values, 10 * low) if values else 10.0))
    inner = "".join(_panel(panel, WIDTH * i, low, high) for i, panel in enumerate(panels))
    names = dict.fromkeys(curve.name for panel in panels for curve in panel.curves)
    legend = "".join(_legend(name, index) for index, name in enumerate(names))
    width, height = WIDTH * len(panels), HEIGHT + ROW * len(names) + 8
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return f"{head}<style>{STYLE}</style>{inner}{legend}</svg>\n"


def _panel(panel: Panel, x: float, low: float, high: float) -> str:
    parts = [f'<text class="title" x="8" y="16">{escape(panel.title)}</text>']
    mark = low
    while mark <= high * 1.001:
        y = _y(mark, low, high)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="end" x="{LEFT - 5}" y="{y + 4}">{mark:g}</text>')
        mark *= 10
    parts.append(f'<text class="end" x="{WIDTH - 4}" y="{TOP - 6}">not reached</text>')
    for index, place in enumerate(panel.places):
        at = _x(index, len(panel.places))
        parts.append(f'<text class="mid" x="{at}" y="{HEIGHT - 8}">{escape(place)}</text>')
    parts += [_curve(curve, i, low, high) for i, curve in enumerate(panel.curves)]
    return f'<g transform="translate({x:g} 0)">{"".join(parts)}</g>'


def _curve(curve: Curve, index: int, low: float, high: float) -> str:
    """Whoever did not come there is shown as a ring above the scale."""
    color, count = COLORS[index % len(COLORS)], len(curve.values)
    points, shapes = [], []
    for place, found in enumerate(curve.values):
        x = _x(place, count)
        if found:
            y = _y(statistics.median(found), low, high)
            points.append(f"{x} {y}")
            ends = f"M{x} {_y(min(found), low, high)}V{_y(max(found), low, high)}"
            shapes.append(f'<path stroke="{color}" d="{ends}"/>')
            shapes.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>')
        elif found is not None:
            at = f'cx="{x + 5 * (index - 6):g}" cy="{TOP}"'  # beside each other
            shapes.append(f'<circle {at} r="3" fill="none" stroke="{color}"/>')
    line = f'<path stroke="{color}" d="M{"L".join(points)}"/>' if points else ""
    return f"<g><title>{escape(curve.name)}</title>{line}{''.join(shapes)}</g>"


def _legend(name: str, index: int) -> str:
    y = HEIGHT + ROW * index + 10
    swatch = (
        f'<rect x="{LEFT}" y="{y - 8}" width="8" height="8" fill="{COLORS[index % len(COLORS)]}"/>'
    )
    return f'{swatch}<text x="{LEFT + 14}" y="{y}">{escape(name)}</text>'


def _x(index: int, count: int) -> float:
    room = (WIDTH - LEFT - RIGHT) / count
    return round(LEFT + room * (index + 0.5), 1)


def _y(value: float, low: float, high: float) -> float:
    share = math.log(max(value, low) / low) / math.log(high / low)
    bottom = HEIGHT - BOTTOM
    return round(bottom - share * (bottom - TOP - 14), 1)
