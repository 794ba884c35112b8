"""What a person sees while something is under way: a live bar in a terminal, plain lines
elsewhere."""

import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

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
    scores: Mapping[str, float] = field(default_factory=dict)
    """All that it got, by name."""
    version: int = 0
    """Of the furthest shard, as the master saw it last."""
    lr: float | None = None
    """What the last update was made with; None: there was none."""
    waits_for: str = ""
    """Before the first gradient: what it takes."""


def say(line: str, *, aside: bool = False) -> None:
    """Print a line; `aside`: to the errors. When nobody can read it any more (`| head`, a full
    disk, a terminal that was closed), go on without."""
    stream = sys.stderr if aside else sys.stdout
    try:
        print(line, file=stream, flush=True)
    except OSError:
        _go_on_without(stream)


def _go_on_without(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Terminal:
    """Standard output, for whoever draws on it; when it is gone, that is all the same to them."""

    def __init__(self) -> None:
        self._stream = sys.stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _go_on_without(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _go_on_without(self._stream)


def _make_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, file=cast(TextIO, _Terminal()))


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


MakeDisplay = Callable[[str, int | None], Display]
"""Given a run's title and how many gradients are expected, if that is known."""


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

    def __init__(self, total: int | None = None) -> None:
        """`total` gradients are expected: then they are 0 when none comes though some are to."""
        self._history: deque[Status] = deque()
        self._total = total or 0

    def add(self, status: Status) -> tuple[float, float] | None:
        history = self._history
        if not history or status.num_gradients > history[-1].num_gradients:
            history.append(status)
        while history[-1].at_s - history[0].at_s > WINDOW_S and len(history) > 2:
            history.popleft()
        first, last = history[0], history[-1]
        if status.at_s - last.at_s > WINDOW_S and last.num_gradients < self._total:
            return 0.0, 0.0
        time_s = last.at_s - first.at_s
        if not time_s:
            return None
        return (
            (last.num_gradients - first.num_gradients) / time_s,
            (last.num_examples - first.num_examples) / time_s,
        )


def figures(status: Status, rates: tuple[float, float] | None, *, brief: bool = False) -> list[str]:
    """The numbers worth showing, each with its name; `brief` fits them into 80 columns."""
    if not status.num_gradients and status.waits_for:
        return [f"waiting for {status.waits_for}"]
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
        if not brief:
            others = {k: v for k, v in status.scores.items() if k != status.metric_name}
            shown += [f"test {name} {value:.4f}" for name, value in others.items()]
    return shown


class _Lines(Display):
    """A line every few seconds, and one whenever the evaluator found something new."""

    def __init__(self, title: str, total: int | None) -> None:
        self._total = total
        self._rates = _Rates(total)
        self._next_s = LINE_EVERY_S
        self._scored: int | None = None
        """Which version was scored last, when a line was shown."""
        say(title)

    def update(self, status: Status) -> None:
        rates = self._rates.add(status)
        scored = status.score[0] if status.score else None
        if status.at_s < self._next_s and scored == self._scored:
            return
        self._next_s = status.at_s + LINE_EVERY_S
        self._scored = scored
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
        from rich.console import Group
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        self._rates = _Rates(total)
        self._next_s = 0.0
        console = _make_console()
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


# -- many runs, one after the other ----------------------------------------------------------------


class Overview(ABC):
    """How far a series of runs is. For each: `begin`, its `display` while it goes on, `end`."""

    @abstractmethod
    def begin(self, number: int, words: str, left_s: float | None) -> None:
        """`left_s`: how long this run and those after it will take, if there is an idea."""

    @abstractmethod
    def display(self, title: str, total: int | None) -> Display: ...

    @abstractmethod
    def end(self, line: str) -> None: ...

    @abstractmethod
    def notice(self, text: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def make_overview(title: str, num_runs: int, *, quiet: bool, in_lines: bool = False) -> Overview:
    """`in_lines`: several of them may go on at a time, for which there is no bar."""
    if not quiet and not in_lines and sys.stdout is not None and sys.stdout.isatty():
        return _BarOverview(title, num_runs)
    return _LineOverview(title, num_runs, quiet=quiet or sys.stdout is None)


class _Relayed(Display):
    """A run's display within an overview."""

    def __init__(self, show: Callable[[Status], None], notice: Callable[[str], None]) -> None:
        self._show = show
        self._notice = notice

    def update(self, status: Status) -> None:
        self._show(status)

    def notice(self, text: str) -> None:
        self._notice(text)

    def close(self) -> None:
        pass


class _LineOverview(Overview):
    """A line for each run that is over."""

    def __init__(self, title: str, num_runs: int, *, quiet: bool) -> None:
        self._num_runs = num_runs
        self._number = 0
        self._say: Callable[[str], None] = (lambda line: None) if quiet else say
        self._say(f"{title}: {num_runs} run{'s' * (num_runs > 1)}")

    def begin(self, number: int, words: str, left_s: float | None) -> None:
        self._number = number
        left_words = f"; about {minutes(left_s)} left" if left_s is not None else ""
        self._say(f"[{number}/{self._num_runs}] {words}{left_words}")

    def display(self, title: str, total: int | None) -> Display:
        return _Relayed(lambda status: None, self._say)

    def end(self, line: str) -> None:
        self._say(f"[{self._number}/{self._num_runs}] {line}")

    def notice(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        pass


class _BarOverview(Overview):
    """The bar of the series, and under it what the run that is under way does."""

    def __init__(self, title: str, num_runs: int) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.text import Text

        self._num_runs = num_runs
        self._before = 0
        self._rates = _Rates()
        self._next_s = 0.0
        self._began_s = time.monotonic()
        self._left_s: float | None = None
        self._words = ""
        console = _make_console()
        console.print(f"{title}: {num_runs} run{'s' * (num_runs > 1)}", markup=False)
        columns = (BarColumn(bar_width=None), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, expand=True)
        self._task = self._progress.add_task("", total=num_runs)
        self._text = Text("", no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._progress, self._text), console=console, auto_refresh=False)
        self._live.start()

    def begin(self, number: int, words: str, left_s: float | None) -> None:
        self._before = number - 1
        self._words = words
        self._rates = _Rates()
        self._next_s = 0.0
        self._began_s = time.monotonic()
        self._left_s = left_s
        self._text.plain = f"{words}: starting"
        self._redraw(0.0)

    def display(self, title: str, total: int | None) -> Display:
        def show(status: Status) -> None:
            rates = self._rates.add(status)
            if status.at_s < self._next_s:
                return
            self._next_s = status.at_s + REDRAW_EVERY_S
            shown = figures(status, rates, brief=True)
            self._text.plain = f"{self._words}: {' · '.join(shown) or 'starting'}"
            self._redraw(status.num_gradients / total if total else 0.0)

        return _Relayed(show, self.notice)

    def end(self, line: str) -> None:
        self.notice(f"[{self._before + 1}/{self._num_runs}] {line}")
        self._before += 1
        self._redraw(0.0)

    def notice(self, text: str) -> None:
        self._live.console.print(text, markup=False)

    def close(self) -> None:
        self._text.plain = ""
        self._live.refresh()
        self._live.stop()

    def _redraw(self, share: float) -> None:
        done = f"{self._before}/{self._num_runs}"
        if self._left_s is not None:
            left_s = max(0.0, self._left_s - (time.monotonic() - self._began_s))
            done += f", about {minutes(left_s)} left"
        self._progress.update(
            self._task, completed=self._before + min(1.0, share), description=done
        )
        self._live.refresh()


def minutes(time_s: float) -> str:
    """As one would say it: 45 s, 12 min, 3 h 20 min."""
    if time_s < 90:
        return f"{time_s:.0f} s"
    whole = round(time_s / 60)
    return f"{whole} min" if whole < 60 else f"{whole // 60} h {whole % 60} min"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
