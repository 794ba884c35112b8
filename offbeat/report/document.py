"""What a report consists of: text, tables, and plots that are tables too.

A plot holds its numbers, nothing of how it looks; `table()` is what it shows as text. So whatever
is drawn can also be read, in report.html as in report.md.
"""

import math
from dataclasses import dataclass

METRIC_LIMITS = {"accuracy": (0.0, 1.0)}
"""What a metric can be at all."""


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True)
class Line:
    """A curve; `band` has the lowest and the highest value at each point, where there are several.
    Colors are counted from 0; whatever has the same name has the same color in all of a report."""

    name: str
    color: int
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...] = ()
    dashed: bool = False

    def cell(self, index: int) -> str:
        band = f" ({spelled(self.band[index])})" if self.band else ""
        return f"{short(self.points[index][1])}{band}"


@dataclass(frozen=True)
class LinePlot:
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    marks: tuple[tuple[float, str], ...] = ()
    """Moments that something happened at."""
    limits: tuple[float, float] | None = None
    """What y can be at all, if that is known."""
    log_x: bool = False
    log_y: bool = False
    """By the logarithm; there nothing is 0 or less."""

    def legend(self) -> list[tuple[str, int]]:
        return [(line.name, line.color) for line in self.lines]

    def table(self) -> Table:
        """A column for each line where they have points at the same places, else a row for each
        point."""
        title = f"{self.title}: {self.y}"
        names = [line.name for line in self.lines]
        cells = [{x: line.cell(i) for i, (x, _) in enumerate(line.points)} for line in self.lines]
        places = sorted(set().union(*cells))
        marks = [(short(x), text, *[""] * (len(names) - 1)) for x, text in self.marks if names]
        told_once = all(
            len(c) == len(line.points) for c, line in zip(cells, self.lines, strict=True)
        )
        if told_once and len(places) <= 2 * max(map(len, cells), default=0):
            rows = [(short(x), *(column.get(x, "") for column in cells)) for x in places]
            return Table((self.x, *names), (*rows, *marks), title)
        long = [
            (line.name, short(x), line.cell(i))
            for line in self.lines
            for i, (x, _) in enumerate(line.points)
        ]
        return Table(("", self.x, self.y), (*long, *((t, x, "") for x, t, *_ in marks)), title)


@dataclass(frozen=True)
class Bar:
    name: str
    color: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class BarPlot:
    """One bar for each name, with its spread."""

    title: str
    y: str
    bars: tuple[Bar, ...]

    def legend(self) -> list[tuple[str, int]]:
        return []  # the bars have their names under them

    def table(self) -> Table:
        rows = tuple((b.name, short(b.value), short(b.low), short(b.high)) for b in self.bars)
        return Table(("", "mean", "lowest", "highest"), rows, f"{self.title}: {self.y}")


@dataclass(frozen=True)
class Histogram:
    """How often each value came, as shares of all; one layer for each of `names`."""

    title: str
    x: str
    bins: tuple[str, ...]
    names: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]
    """For each bin one share per name."""

    def legend(self) -> list[tuple[str, int]]:
        return [(name, color) for color, name in enumerate(self.names)]

    def table(self) -> Table:
        rows = tuple(
            (name, *map(percent, shares))
            for name, shares in zip(self.bins, self.shares, strict=True)
        )
        return Table((self.x, *self.names), rows, self.title)


PARTS = ("computing", "preparing", "waiting", "exchanging")


@dataclass(frozen=True)
class Shares:
    """How each row's time divides into PARTS."""

    title: str
    rows: tuple[tuple[str, tuple[float, ...]], ...]

    def legend(self) -> list[tuple[str, int]]:
        return [(name, color) for color, name in enumerate(PARTS)]

    def table(self) -> Table:
        rows = tuple((name, *map(percent, shares)) for name, shares in self.rows)
        return Table(("", *PARTS), rows, self.title)


@dataclass(frozen=True)
class Step:
    """One step of one worker: when it began, and how long its PARTS took."""

    row: int
    number: int
    start_s: float
    parts_s: tuple[float, ...]


@dataclass(frozen=True)
class Timeline:
    """What each row did when, step by step."""

    title: str
    rows: tuple[str, ...]
    steps: tuple[Step, ...]
    unit: str = "step"
    """What a `Step` is here."""

    def legend(self) -> list[tuple[str, int]]:
        return [(name, color) for color, name in enumerate(PARTS)]

    def table(self) -> Table:
        rows = tuple(
            (self.rows[s.row], str(s.number), f"{s.start_s:.4f}", *(f"{p:.4f}" for p in s.parts_s))
            for s in self.steps
        )
        header = ("", self.unit, "began, s", *(f"{name}, s" for name in PARTS))
        return Table(header, rows, self.title)


Plot = LinePlot | BarPlot | Histogram | Shares | Timeline


@dataclass(frozen=True)
class Section:
    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    folded: tuple[Table, ...] = ()
    """Shown when somebody asks for them, as the plots' own tables are."""


@dataclass(frozen=True)
class Document:
    title: str
    lead: str
    sections: tuple[Section, ...]


# -- numbers as people write them ------------------------------------------------------------------


def short(value: float | None) -> str:
    """Four digits or so, and no more than it has."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1e12 or abs(value) < 1e-4:
        return f"{value:.2g}"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def score(value: float | None) -> str:
    """The same, of a metric, which may be no number."""
    return "nan" if value is not None and math.isnan(value) else short(value)


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def spelled(band: tuple[float, float]) -> str:
    low, high = band
    return short(low) if low == high else f"{short(low)} to {short(high)}"
