"""Plots as SVG: shapes with classes, which page.py's style sheet gives their colors.

A plot is WIDTH units wide, and about as many pixels on a phone as on a screen, so that its text
can be read on both. Everything that is drawn has a `<title>`, which browsers show under the mouse.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from offbeat.report.document import (
    PARTS,
    Bar,
    BarPlot,
    Histogram,
    Line,
    LinePlot,
    Plot,
    Shares,
    Timeline,
    percent,
    short,
    spelled,
)

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 18, 10, 36
NUM_COLORS = 8
ROW = 18
"""Of a plot that has rows."""


def draw(plot: Plot) -> str:
    match plot:
        case LinePlot():
            return _draw_lines(plot)
        case BarPlot():
            return _draw_bars(plot)
        case Histogram():
            return _draw_histogram(plot)
        case Shares():
            return _draw_shares(plot)
        case Timeline():
            return _draw_timeline(plot)


@dataclass(frozen=True)
class _Scale:
    """From values to places."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)


def ticks(
    low: float, high: float, most: int = 6, limits: tuple[float, float] | None = None
) -> list[float]:
    """Round numbers from `low` or below it to `high` or above it; `limits` are round themselves,
    and beyond them there are none."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
        if limits is not None:
            low, high = max(low, limits[0]), min(high, limits[1])
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    digits = max(0, 3 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Powers of ten, with what is between them where there is room, from `low` or below it to
    `high` or above it."""
    for factors in ((1, 2, 5), (1, 3), (1,)):
        every = [f * 10.0**power for power in range(-12, 16) for f in factors]
        first = max((i for i, v in enumerate(every) if v <= low * (1 + 1e-9)), default=0)
        last = next(i for i, v in enumerate(every) if v >= high * (1 - 1e-9))
        found = every[first : max(last, first + 1) + 1]
        if len(found) <= most:
            break
    return found[:: -(-len(found) // most)] if len(found) > most else found


def _svg(plot: Plot, height: float, body: Iterable[str]) -> str:
    label = escape(f"{plot.title}; its numbers are in the table below", quote=True)
    inner = "".join(body)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{inner}</svg>'


def _text(x: float, y: float, text: str, kind: str = "", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}"{more}>{escape(text)}</text>'


def _below(x: float, y: float, number: str) -> str:
    """A number on the x axis; at the right edge it ends there."""
    half = 3.4 * len(number)
    return _text(WIDTH - 1, y, number, "end") if x + half > WIDTH else _text(x, y, number, "mid")


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _axes(xs: _Scale | None, ys: _Scale, x: str, y: str, marks: Sequence[float]) -> list[str]:
    """Grid, numbers and names; `marks` are the ticks of y, `xs` None: what is below has names."""
    bottom = HEIGHT - BOTTOM
    parts = []
    for value in marks:
        at = ys(value)
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 5, at + 3.5, short(value), "end"))
    if xs is not None:
        for value in (log_ticks if xs.is_log else ticks)(xs.low, xs.high):
            if xs.low * (1 - 1e-9) <= value <= xs.high * (1 + 1e-9):
                parts.append(_below(xs(value), bottom + 14, short(value)))
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>')
    if x:
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x, "mid name"))
    middle = (TOP + bottom) / 2
    turn = f' transform="rotate(-90 10 {middle:g})"'
    return [*parts, _text(10, middle, y, "mid name", turn)]


def _draw_lines(plot: LinePlot) -> str:
    points = [p for line in plot.lines for p in line.points]
    values = [y for _, y in points] + [y for line in plot.lines for b in line.band for y in b]
    if not points:
        return _svg(plot, HEIGHT, [_text(WIDTH / 2, HEIGHT / 2, "nothing to show", "mid")])
    lowest, highest = min(values), max(values)
    marks = log_ticks(lowest, highest) if plot.log_y else ticks(lowest, highest, limits=plot.limits)
    last = max(x for x, _ in points)
    first = min(x for x, _ in points) if plot.log_x else 0
    xs = _Scale(first, last or 1, LEFT, WIDTH - RIGHT, plot.log_x)
    ys = _Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP, plot.log_y)
    body = _axes(xs, ys, plot.x, plot.y, marks)
    for x, text in plot.marks:
        if x <= xs.high:
            at = xs(x)
            line = f'<path class="mark" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>'
            body.append(f"<g>{line}{_title(f'{text}, {short(x)}')}</g>")
    body += [_band(line, xs, ys) for line in plot.lines if line.band]
    body += [_line(line, xs, ys, plot) for line in plot.lines]
    return _svg(plot, HEIGHT, body)


def _band(line: Line, xs: _Scale, ys: _Scale) -> str:
    places = [xs(x) for x, _ in line.points]
    upper = [f"{x} {ys(high)}" for x, (_, high) in zip(places, line.band, strict=True)]
    lower = [f"{x} {ys(low)}" for x, (low, _) in zip(places, line.band, strict=True)]
    return f'<path class="band f{line.color % NUM_COLORS}" d="M{"L".join(upper + lower[::-1])}Z"/>'


def _line(line: Line, xs: _Scale, ys: _Scale, plot: LinePlot) -> str:
    color = line.color % NUM_COLORS
    again = line.dashed or line.color >= NUM_COLORS
    path = "L".join(f"{xs(x)} {ys(y)}" for x, y in line.points)
    dash = ' stroke-dasharray="5 4"' if again else ""
    shapes = [f'<path class="line s{color}"{dash} d="M{path}"/>']
    for index, (x, y) in enumerate(line.points):
        words = f"{line.name}: {line.cell(index)} at {short(x)} {plot.x}"
        shapes.append(
            f'<circle class="dot f{color}" cx="{xs(x)}" cy="{ys(y)}" r="1.8">{_title(words)}'
            f"</circle>"
        )
    return f"<g>{''.join(shapes)}</g>"


def _draw_bars(plot: BarPlot) -> str:
    marks = ticks(0, max((bar.high for bar in plot.bars), default=1))
    ys = _Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    body = _axes(None, ys, "", plot.y, marks)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(plot.bars))
    for index, bar in enumerate(plot.bars):
        middle = LEFT + room * (index + 0.5)
        body.append(_bar(bar, middle, min(40.0, room * 0.62), ys))
        lines = _in_two(bar.name, room)
        y = HEIGHT - BOTTOM + 14
        body += [_text(middle, y + 12 * i, line, "mid") for i, line in enumerate(lines)]
    return _svg(plot, HEIGHT, body)


def _bar(bar: Bar, middle: float, width: float, ys: _Scale) -> str:
    top = ys(bar.value)
    words = f"{bar.name}: {short(bar.value)} ({spelled((bar.low, bar.high))})"
    shape = (
        f'<rect class="f{bar.color % NUM_COLORS}" x="{middle - width / 2:.1f}" y="{top}" '
        f'width="{width:.1f}" height="{max(0.0, ys(0) - top):.1f}" rx="2"/>'
    )
    whisker = ""
    if bar.low < bar.high:
        whisker = f'<path class="whisker" d="M{middle:.1f} {ys(bar.low)}V{ys(bar.high)}"/>'
    number = _text(middle, ys(max(bar.high, bar.value)) - 3, short(bar.value), "mid")
    return f"<g>{shape}{whisker}{number}{_title(words)}</g>"


def _in_two(name: str, room: float) -> list[str]:
    """A bar's name, cut where it is too wide to stand in one line."""
    if len(name) * 6.2 <= room:
        return [name]
    cut = name.rfind("-", 0, max(1, len(name) * 2 // 3)) + 1 or name.find(" ") + 1
    return [name[:cut].strip(), name[cut:].strip()] if cut else [name]


def _draw_histogram(plot: Histogram) -> str:
    tops = [sum(shares) for shares in plot.shares]
    marks = ticks(0, max(tops, default=1) or 1)
    ys = _Scale(0, marks[-1], HEIGHT - BOTTOM, TOP)
    body = _axes(None, ys, plot.x, "share of gradients", marks)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(plot.bins))
    widest = 10 + 6.4 * max(map(len, plot.bins), default=0)
    every = max(1, math.ceil(len(plot.bins) * widest / (WIDTH - LEFT - RIGHT)))
    width = min(40.0, room * 0.82)
    for index, (name, shares) in enumerate(zip(plot.bins, plot.shares, strict=True)):
        middle = LEFT + room * (index + 0.5)
        if index % every == 0:
            body.append(_text(middle, HEIGHT - BOTTOM + 14, name, "mid"))
        below = 0.0
        for color, (who, share) in enumerate(zip(plot.names, shares, strict=True)):
            y, height = ys(below + share), ys(below) - ys(below + share)
            below += share
            if share:
                words = _title(f"{who}: {plot.x} {name}, {percent(share)}")
                body.append(
                    f'<rect class="f{color % NUM_COLORS}" x="{middle - width / 2:.1f}" y="{y}" '
                    f'width="{width:.1f}" height="{height:.1f}">{words}</rect>'
                )
    return _svg(plot, HEIGHT, body)


def _draw_shares(plot: Shares) -> str:
    left = min(150.0, 10 + 6.0 * max((len(name) for name, _ in plot.rows), default=0))
    xs = _Scale(0, 1, left, WIDTH - RIGHT)
    height = TOP + ROW * len(plot.rows) + 20
    body = []
    for index, (name, shares) in enumerate(plot.rows):
        y = TOP + ROW * index
        body.append(_text(left - 5, y + 11, name, "end"))
        begun = 0.0
        for part, share in zip(PARTS, shares, strict=True):
            if share > 0:
                words = f"{name}: {part} {percent(share)}"
                body.append(_cell(xs(begun), xs(begun + share), y, part, words))
            begun += share
    for value in (0, 0.25, 0.5, 0.75, 1):
        body.append(_below(xs(value), height - 6, f"{100 * value:g}%"))
    return _svg(plot, height, body)


def _draw_timeline(plot: Timeline) -> str:
    left = 64.0
    start = min((s.start_s for s in plot.steps), default=0.0)
    end = max((s.start_s + sum(s.parts_s) for s in plot.steps), default=1.0)
    xs = _Scale(start, end, left, WIDTH - RIGHT)
    height = TOP + ROW * len(plot.rows) + 34
    body = [
        _text(left - 5, TOP + ROW * index + 11, name, "end") for index, name in enumerate(plot.rows)
    ]
    for step in plot.steps:
        at = step.start_s
        for part, part_s in zip(PARTS, step.parts_s, strict=True):
            if part_s > 0:
                who = f"{plot.rows[step.row]}, {plot.unit} {step.number}"
                words = f"{who}: {part} {1000 * part_s:.2f} ms"
                body.append(_cell(xs(at), xs(at + part_s), TOP + ROW * step.row, part, words))
            at += part_s
    for value in ticks(start, end, 5):
        if start <= value <= end:
            body.append(_below(xs(value), height - 20, short(value)))
    body.append(_text((left + WIDTH - RIGHT) / 2, height - 5, "s of training", "mid name"))
    return _svg(plot, height, body)


def _cell(start: float, end: float, y: float, part: str, words: str) -> str:
    return (
        f'<rect class="{part}" x="{start}" y="{y:g}" width="{max(0.2, end - start):.1f}" '
        f'height="{ROW - 4}">{_title(words)}</rect>'
    )
