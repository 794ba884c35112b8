"""`offbeat bench watch`: what it costs a run that people look on.

The same recipe on the same made-up data, alone and with a page beside it (--watch) that several
look at, in turn; which of the two comes first changes from round to round.
"""

import contextlib
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offbeat.api import train_config
from offbeat.bench.rig import CALIBRATION_STEPS, FEWEST_STEPS, options_for, rate, step_times
from offbeat.bench.tables import Row, short
from offbeat.config import make_config
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.recipes.callbacks import Callback, End, Start
from offbeat.run.places import read_stat
from offbeat.watching.beside import Beside, Watch

ALONE, WATCHED = "alone", "looked at"
TIMEOUT_S = 30.0
READ_BYTES = 1 << 16


class Looker:
    """Somebody who looks on, and counts what comes."""

    def __init__(self, url: str) -> None:
        self.num_bytes = 0
        self._url = url
        self._thread = threading.Thread(target=self._read, name="looker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)

    def _read(self) -> None:
        with (
            contextlib.suppress(OSError),  # the page ends with its run
            urllib.request.urlopen(self._url, timeout=TIMEOUT_S) as answer,
        ):
            while found := answer.read1(READ_BYTES):
                self.num_bytes += len(found)


class Looking(Watch):
    """A page, and as many as are to look at it."""

    def __init__(self, beside: Beside, count: int) -> None:
        super().__init__(beside)
        self.busy = 0.0
        """How many processors the page's server took meanwhile."""
        self._before_s = 0.0
        self.lookers: list[Looker] = []
        self._count = count

    def on_start(self, run: Start) -> None:
        super().on_start(run)
        self._before_s = self._used_s()
        url = f"{self._beside.url}events?run={run.run_dir.name}"
        self.lookers = [Looker(url) for _ in range(self._count)]
        for looker in self.lookers:
            looker.start()

    def on_end(self, end: End) -> None:
        self.busy = (self._used_s() - self._before_s) / end.summary["total_time_s"]
        super().on_end(end)

    def _used_s(self) -> float:
        found = None if self._beside.pid is None else read_stat(self._beside.pid)
        return found[1] if found else 0.0


def watch(
    *,
    recipe: str,
    disciplines: Sequence[str],
    watchers: int,
    seconds: float,
    rounds: int,
    **options: Any,
) -> list[Row]:
    """Gradients per second alone and looked at, in rounds; `options` are train's."""
    options = options_for(recipe, options)
    cases = [(discipline, way) for discipline in disciplines for way in (ALONE, WATCHED)]
    rates: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    carried: dict[str, list[tuple[float, float]]] = {d: [] for d in disciplines}
    with _rig(options, watchers) as rig:
        steps = {d: rig.steps_for(d, seconds, CALIBRATION_STEPS[recipe]) for d in disciplines}
        for number in range(1, 1 + rounds):
            for discipline, way in cases if number % 2 else reversed(cases):
                found, cost = rig.run(discipline, way, steps[discipline])
                rates[discipline, way].append(found)
                carried[discipline] += [] if cost is None else [cost]
                line = f"round {number} of {rounds}: {discipline}, {way} {short(found)}/s"
                print(line, file=sys.stderr, flush=True)
    rows: list[Row] = []
    for discipline, way in cases:
        mine, beside = rates[discipline, way], rates[discipline, ALONE]
        row: Row = {"discipline": discipline, "": way, "gradients/s": mine}
        row["of alone"] = [a / b for a, b in zip(mine, beside, strict=True)]
        costs = carried[discipline] if way == WATCHED else []
        row["kB/s each"] = [kilobytes for kilobytes, _ in costs] or "-"
        row["processors"] = [busy for _, busy in costs] or "-"
        rows.append(row)
    return rows


@contextlib.contextmanager
def _rig(options: dict[str, Any], watchers: int) -> Iterator["_Rig"]:
    with (
        fork_server("local") as forks,
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder,
    ):
        yield _Rig(Path(folder), options, watchers, forks)


class _Rig:
    def __init__(
        self, folder: Path, options: dict[str, Any], watchers: int, forks: ForkServer | None
    ) -> None:
        self._folder = folder
        self._options = options
        self._watchers = watchers
        self._forks = forks
        self._num_runs = 0

    def steps_for(self, discipline: str, seconds: float, tried: int) -> int:
        """How many of each worker's fill the time."""
        times = self._train(discipline, tried, [])
        slowest = min((len(done) - 1) / (done[-1] - done[0]) for done in times)
        return max(FEWEST_STEPS, round(slowest * seconds))

    def run(
        self, discipline: str, way: str, steps: int
    ) -> tuple[float, tuple[float, float] | None]:
        """Gradients per second; and of the page, kB/s of each who looks on, and processors."""
        if way == ALONE:
            return rate(self._train(discipline, steps, [])), None
        with Beside("127.0.0.1:0", []) as beside:
            looking = Looking(beside, self._watchers)
            times = self._train(discipline, steps, [looking])
        for looker in looking.lookers:
            looker.join()
        time_s = max(done[-1] for done in times) - min(done[0] for done in times)
        each = [looker.num_bytes / 1000 / time_s for looker in looking.lookers]
        return rate(times), (sum(each) / len(each), looking.busy)

    def _train(
        self, discipline: str, steps: int, callbacks: Sequence[Callback]
    ) -> list[list[float]]:
        self._num_runs += 1
        run_dir = self._folder / str(self._num_runs)
        more = {"discipline": discipline, "steps": steps, "run_dir": str(run_dir)}
        config = make_config({**self._options, **more})
        if train_config(config, forks=self._forks, callbacks=callbacks).interrupted:
            raise KeyboardInterrupt  # the engine took it for a wish to end that run well
        return step_times(run_dir)
