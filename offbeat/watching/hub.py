"""The runs of a folder, followed for as many as look on: one thread reads, whoever looks on shares
what it finds.

Used by serving.py and text.py.

    hub = Hub(Path("runs/20261119-fashion-cnn"))
    for text in hub.stream(hub.setup()["single"], is_over):
        ...
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError, RunDirError
from offbeat.run.orders import SLOW, STOP_WORKER, Order, OrderBox
from offbeat.watching.following import FollowedRun
from offbeat.watching.gathering import RUNNING
from offbeat.watching.overview import Overview
from offbeat.watching.source import BEAT_S, Source

TICK_S, TICK_OF_MANY_S = 0.5, 1.0
LEAST_OF_TICK = 0.9
"""Nobody is told anything sooner after the last time, in ticks."""
MANY_WORKERS = 16
BUSY_S = 0.01
"""Between two ticks, while there is more to read."""
OVER_S = 2.0
"""Between two looks at a run that is over, and may go on."""
IDLE_S = 5.0
"""Between two ticks, while nobody looks on: what is new is read as it comes."""
FORGET_S = 60.0
"""After so long a run that nobody looks at is not followed any more."""


class Hub(Source):
    """`path` is a run's folder, also one that is about to be made (`is_run`), or one with runs."""

    def __init__(self, path: Path, *, is_run: bool = False) -> None:
        self.path = path
        self._is_single = is_run or (path / "config.json").exists()
        self._overview = Overview(path)
        self._runs: dict[str, FollowedRun] = {}
        self._wanted_s: dict[str, float] = {}
        self._texts: dict[tuple[str, int, int], str] = {}
        self._failed: dict[str, str] = {}
        self._overview_wanted_s = 0.0
        self._is_hurried = False
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def setup(self) -> dict[str, Any]:
        return {"single": self.path.name if self._is_single else None}

    def close(self) -> None:
        self._over.set()
        self._wake.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    # -- for those who look on -----------------------------------------------------------------

    def stream(self, name: str | None, is_over: Callable[[], bool]) -> Iterator[str]:
        return self._stream_all(is_over) if name is None else self._stream(name, is_over)

    def _stream(self, name: str, is_over: Callable[[], bool]) -> Iterator[str]:
        shown, said_s, beat_s = 0, 0.0, time.monotonic()
        self._follow(name)
        while not (self._over.is_set() or is_over()):
            with self._changed:
                now_s = self._wanted_s[name] = time.monotonic()
                if name in self._failed:
                    raise RunDirError(self._failed[name])
                early_s = said_s + LEAST_OF_TICK * self._tick_s(self._runs.get(name)) - now_s
                if early_s > 0 and not self._is_hurried:  # while much is read there are many ticks
                    self._changed.wait(early_s)
                    continue
                text, tick = self._text(name, shown)
                if tick <= shown:
                    self._changed.wait(BEAT_S)
            if tick > shown or time.monotonic() > beat_s + BEAT_S:
                shown, said_s = max(shown, tick), time.monotonic()
                beat_s = said_s
                yield text

    def _text(self, name: str, shown: int) -> tuple[str, int]:
        """What is new since a tick, and the tick that it is; the same for all who know as much."""
        run = self._runs.get(name) or self._find(name)
        tick = 0 if run.gathered is None else run.gathered.ticks
        if tick <= shown:
            return "", tick
        key = (name, tick, shown)
        if key not in self._texts:
            self._texts = {k: v for k, v in self._texts.items() if k[0] != name or k[1] == tick}
            self._texts[key] = json.dumps(run.view(shown), separators=(",", ":"))
        return self._texts[key], tick

    def _follow(self, name: str) -> None:
        with self._changed:
            self._find(name)
            self._wanted_s[name] = time.monotonic()
        self._wake.set()

    def _find(self, name: str) -> FollowedRun:
        """A run that there is; no name leads out of the folder."""
        if name in self._runs:
            return self._runs[name]
        if self._is_single:
            path = self.path if name == self.path.name else None
        else:
            path = self._overview.find(name)
        if path is None:
            raise RunDirError(f"there is no run {name[:80]!r} in {self.path}")
        self._runs[name] = FollowedRun(path)
        return self._runs[name]

    def _stream_all(self, is_over: Callable[[], bool]) -> Iterator[str]:
        shown, beat_s = "", 0.0
        with self._changed:
            self._overview.look(self._live_runs)
        while not (self._over.is_set() or is_over()):
            with self._changed:
                self._overview_wanted_s = time.monotonic()
                text = json.dumps(self._overview.view(self._runs), separators=(",", ":"))
            if text != shown or time.monotonic() > beat_s + BEAT_S:
                yield "" if text == shown else text
                shown, beat_s = text, time.monotonic()
            self._wake.set()
            self._over.wait(TICK_OF_MANY_S)

    def lines_of(self, name: str, role: str) -> list[str]:
        with self._changed:
            return self._find(name).lines_of(role)

    def order(self, name: str, order: Order) -> None:
        with self._changed:
            run = self._find(name)
            if run.gathered is None:  # nobody has looked at it yet
                run.tick()
            gathered = run.gathered
        if gathered is None or gathered.status != RUNNING or not run.folder.is_locked():
            raise ConfigError("the run is not under way: there is nobody who could do that")
        if order.what in (SLOW, STOP_WORKER) and order.worker not in gathered.workers:
            raise ConfigError(f"the run has no worker {order.worker}")
        OrderBox(run.folder.orders).give(order)

    def catch_up(self) -> None:
        """Have everybody who looks on see what there is by now, since there will be no more."""
        with self._changed:
            self._is_hurried = True
            for name, run in self._runs.items():
                for _ in range(2):  # the second one is for what the first has put aside
                    self._tick(name, run)
            self._changed.notify_all()

    # -- the thread that reads -----------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.is_set():
            began_s = time.monotonic()
            with self._changed:
                pause_s = self._look(began_s)
                self._changed.notify_all()
            self._wake.clear()
            if pause_s <= BUSY_S:
                self._over.wait(BUSY_S)  # others want to get at what was read
            else:
                self._wake.wait(max(BUSY_S, pause_s - (time.monotonic() - began_s)))

    def _look(self, now_s: float) -> float:
        """Everything that somebody wants to see; returns how long to wait until the next time."""
        pause_s = IDLE_S
        if now_s < self._overview_wanted_s + BEAT_S and not self._is_single:
            self._overview.look(self._live_runs)
            pause_s = TICK_OF_MANY_S
        for name, run in list(self._runs.items()):
            if now_s > self._wanted_s.get(name, now_s) + FORGET_S:
                del self._runs[name]
                continue
            pause_s = min(pause_s, self._tick(name, run))
        return pause_s

    def _live_runs(self, names: list[str]) -> dict[str, FollowedRun]:
        """Those of an overview that are under way: they are followed, too."""
        for name in names:
            self._find(name)
            self._wanted_s[name] = time.monotonic()
        return self._runs

    def _tick(self, name: str, run: FollowedRun) -> float:
        try:
            run.tick()
        except (RunDirError, OSError) as error:
            self._failed[name] = str(error)
            return IDLE_S
        if run.share_read < 1:
            return BUSY_S
        if run.gathered is not None and run.gathered.is_over:
            return OVER_S
        return self._tick_s(run)

    def _tick_s(self, run: FollowedRun | None) -> float:
        gathered = None if run is None else run.gathered
        is_large = gathered is not None and gathered.num_workers > MANY_WORKERS
        return TICK_OF_MANY_S if is_large else TICK_S
