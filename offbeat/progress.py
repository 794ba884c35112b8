"""What a person sees while something is under way: a live bar in a terminal, plain lines
elsewhere."""

import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WINDOW_S = 5.0
"""Rates are those of the last so many seconds."""
LINE_EVERY_S = 5.0
REDRAW_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """A moment of a run."""

    num_gradients: int
    num_examples: int
    at_s: float
    loss: float | None
    staleness: float | None
    metric_name: str
    score: tuple[int, float] | None
    """The version that was scored last, and the metric it got."""


def say(line: str) -> None:
    """Print a line. When nobody can read it any more (`| head`, a full disk), go on without."""
    try:
        print(line, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Display(ABC):
    """Told the status several times a second; decides itself what to show of it."""

    @abstractmethod
    def update(self, status: Status) -> None: ...

    @abstractmethod
    def notice(self, text: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def make_display(title: str, total: int | None, *, quiet: bool) -> Display:
    """The display that fits where the output goes; `total` gradients are expected, if known."""
    if quiet or sys.stdout is None:
        return _Silent()
    if sys.stdout.isatty():
        return _Bar(title, total)
    return _Lines(title, total)


@contextmanager
def make_meter() -> Iterator[Callable[[str, int, int | None], None]]:
    """For a download: shows of what, how many bytes there are, and of how many. Nothing where no
    terminal is."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console, expand=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield show


class _Silent(Display):
    def update(self, status: Status) -> None:
        pass

    def notice(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Rates:
    """Gradients and examples per second over the last few seconds in which there were any."""

    def __init__(self) -> None:
        self._history: deque[Status] = deque()

    def add(self, status: Status) -> tuple[float, float] | None:
        history = self._history
        if not history or status.num_gradients > history[-1].num_gradients:
            history.append(status)
        while history[-1].at_s - history[0].at_s > WINDOW_S and len(history) > 2:
            history.popleft()
        first, last = history[0], history[-1]
        time_s = last.at_s - first.at_s
        if not time_s:
            return None
        return (
            (last.num_gradients - first.num_gradients) / time_s,
            (last.num_examples - first.num_examples) / time_s,
        )


def figures(status: Status, rates: tuple[float, float] | None, *, brief: bool = False) -> list[str]:
    """The numbers worth showing, each with its name; `brief` fits them into 80 columns."""
    shown = []
    if rates is not None:
        gradients, examples = ("grad/s", "ex/s") if brief else ("gradients/s", "examples/s")
        shown += [f"{_short(rates[0])} {gradients}", f"{_short(rates[1])} {examples}"]
    if status.loss is not None:
        shown.append(f"loss {status.loss:.3f}")
    if status.staleness is not None:
        shown.append(f"staleness {status.staleness:.1f}")
    if status.score is not None:
        version, metric = status.score
        where = "" if brief else f" at version {version}"
        shown.append(f"test {status.metric_name} {metric:.4f}{where}")
    return shown


class _Lines(Display):
    """A line every few seconds, and one whenever the evaluator found something new."""

    def __init__(self, title: str, total: int | None) -> None:
        self._total = total
        self._rates = _Rates()
        self._next_s = LINE_EVERY_S
        self._score: tuple[int, float] | None = None
        say(title)

    def update(self, status: Status) -> None:
        rates = self._rates.add(status)
        if status.at_s < self._next_s and status.score == self._score:
            return
        self._next_s = status.at_s + LINE_EVERY_S
        self._score = status.score
        done = f"{status.num_gradients}" + (f"/{self._total}" if self._total else "")
        line = ", ".join([f"gradient {done}", *figures(status, rates)])
        say(f"{status.at_s:7.1f} s: {line}")

    def notice(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        pass


class _Bar(Display):
    """Two lines that are redrawn in place: the bar, and the figures under it."""

    def __init__(self, title: str, total: int | None) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        self._rates = _Rates()
        self._next_s = 0.0
        console = Console(highlight=False)
        console.print(title, markup=False)
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total)
        self._text = Text("starting")
        group = Group(self._progress, self._text)
        self._live = Live(group, console=console, auto_refresh=False)
        self._live.start()

    def update(self, status: Status) -> None:
        rates = self._rates.add(status)
        self._progress.update(self._task, completed=status.num_gradients)
        self._text.plain = " · ".join(figures(status, rates, brief=True)) or "starting"
        if status.at_s >= self._next_s:
            self._next_s = status.at_s + REDRAW_EVERY_S
            self._live.refresh()

    def notice(self, text: str) -> None:
        self._live.console.print(text, markup=False)

    def close(self) -> None:
        self._live.refresh()
        self._live.stop()


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
