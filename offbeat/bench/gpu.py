"""`offbeat bench gpu`: what is left of one GPU's gradients per second.

In one process and in turn: loops without any of this project's roles, which have the recipe's own
batches, step and update, eager and captured as one graph; as many threads of them as there are
workers, on one vector of parameters, each waiting for every step of its own; and workers. All of
them train on made-up images.
"""

import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from offbeat.api import train_config
from offbeat.bench.rig import rate, step_times, window
from offbeat.bench.tables import Row, short
from offbeat.capture import Recorder, make_recorder
from offbeat.config import make_config
from offbeat.data.batches import Source
from offbeat.errors import ConfigError
from offbeat.recipes.base import load_recipe
from offbeat.run.job import Job
from offbeat.run.making import make_job
from offbeat.streams import make_mark, make_streams
from offbeat.towers import find_devices

RECIPE = "offbeat.bench.recipes:alexnet"
CALIBRATION_STEPS = 300
"""By which it is found out how many steps fill the time that was asked for."""
LOOK_EVERY_S = 0.01
Step = Callable[[], None]


def gpu(
    *, workers: Sequence[int], disciplines: Sequence[str], seconds: float, rounds: int
) -> list[Row]:
    """Gradients per second of the bare loops and of workers, in rounds that go through all of
    them."""
    device = find_gpu()
    job = make_job(make_config({"recipe": RECIPE, "steps": 1}), load_recipe(RECIPE))
    contenders: dict[str, Callable[[], tuple[float, float]]] = {
        "bare, eager": _Bare(job, device, None).timed(seconds),
        "bare, captured": _Bare(job, device, make_recorder(device)).timed(seconds),
    }
    for count in workers:
        contenders[bare_name(count)] = _BareThreads(job, device, count).timed(seconds)
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        for count, discipline in itertools.product(workers, disciplines):
            name = f"{count} {'worker' if count == 1 else 'workers'}, {discipline}"
            contenders[name] = _Workers(Path(folder), count, discipline, seconds).run
        return _rows(workers, contenders, rounds)


def find_gpu() -> torch.device:
    (device,) = find_devices(None, 0)
    if device.type != "cuda":
        raise ConfigError("bench gpu needs a GPU, and torch sees none here")
    return device


def bare_name(count: int) -> str:
    return f"bare, {count} {'thread' if count == 1 else 'threads'}"


def _rows(
    workers: Sequence[int], contenders: dict[str, Callable[[], tuple[float, float]]], rounds: int
) -> list[Row]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(1, 1 + rounds):
        for name, run in contenders.items():
            found[name].append(run())
            line = f"round {number} of {rounds}: {name} {short(found[name][-1][0])}/s"
            print(line, file=sys.stderr, flush=True)
    rates = {name: [rate_s for rate_s, _ in pairs] for name, pairs in found.items()}
    threads = {bare_name(count): rates[bare_name(count)] for count in workers}
    rows: list[Row] = []
    for name, mine in rates.items():
        count = name.removeprefix("bare, ").partition(" ")[0]
        beside = threads.get(bare_name(int(count))) if count.isdecimal() else None
        row: Row = {"": name, "gradients/s": mine}
        row["of the captured loop"] = _ratios(mine, rates["bare, captured"])
        row["of bare threads"] = "" if beside is None else _ratios(mine, beside)
        row["CPU ms per gradient"] = [1000 * cpu_s for _, cpu_s in found[name]]
        rows.append(row)
    return rows


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


class _Bare:
    """One loop, as somebody would write it who has this model and no other: what it draws its
    batches from, and the update with the recipe's rate and moving average, are in the graph too.
    `shared`: the parameters, which then are read and changed in every step."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        recorder: Recorder | None,
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        assert job.train is not None
        self._device = device
        self._source: Source = job.train.on(device)
        self._drafts = _endless(job, self._source)
        self._still = next(self._drafts).clone()
        self._generator = torch.Generator(device).manual_seed(1)
        self._job = job
        self._model = job.make_model()
        self._model.move(device)
        self._gradient = torch.empty_like(self._model.params)
        self._params, self._average = shared or (self._model.params, self._model.params.clone())
        self._lr = float(job.optimizer.options["lr"])
        self._replay: Step = self._compute
        if recorder is not None:
            with recorder.drawing_from(self._generator):
                self._replay, _ = recorder.record(self._compute)

    def _compute(self) -> None:
        job, model = self._job, self._model
        if self._params is not model.params:
            model.params.copy_(self._params)
        batch = self._source.finished(self._still)
        if job.recipe.augment is not None:
            with self._device:
                batch = job.recipe.augment(batch, self._generator)
        job.recipe.loss(model.module, batch).backward()  # type: ignore[no-untyped-call]
        model.take_gradient([self._gradient])
        self._params.add_(self._gradient, alpha=-self._lr)
        if job.recipe.ema is not None:
            self._average.lerp_(self._params, 1 - job.recipe.ema)

    def step(self) -> None:
        self._still.copy_(next(self._drafts))
        self._replay()

    def timed(self, seconds: float) -> Callable[[], tuple[float, float]]:
        """What has it run for about so long, and returns its rate, and the CPU's seconds for each
        step. The GPU is waited for in the end."""

        def run() -> tuple[float, float]:
            streams = make_streams(self._device)
            streams.wait_for_all()
            start_s, start_cpu_s, count = time.monotonic(), time.process_time(), 0
            while time.monotonic() - start_s < seconds:
                for _ in range(20):
                    self.step()
                count += 20
                streams.wait_for_all()
            time_s = time.monotonic() - start_s
            return count / time_s, (time.process_time() - start_cpu_s) / count

        return run


class _BareThreads:
    """Captured loops in so many threads, on one vector of parameters."""

    def __init__(self, job: Job, device: torch.device, count: int) -> None:
        model = job.make_model()
        model.move(device)
        shared = (model.params, model.params.clone())
        self._device = device
        self._loops = [_Bare(job, device, make_recorder(device), shared) for _ in range(count)]

    def timed(self, seconds: float) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            counts = [0 for _ in self._loops]
            over, barrier = threading.Event(), threading.Barrier(len(self._loops) + 1)

            def loop(number: int) -> None:
                bare, mark = self._loops[number], make_mark(self._device)
                with make_streams(self._device).new()():
                    barrier.wait()
                    while not over.is_set():
                        bare.step()
                        mark.set()
                        mark.wait()
                        counts[number] += 1

            threads = [threading.Thread(target=loop, args=(k,)) for k in range(len(self._loops))]
            for thread in threads:
                thread.start()
            barrier.wait()
            start_s, start_cpu_s = time.monotonic(), time.process_time()
            over.wait(seconds)
            over.set()
            for thread in threads:
                thread.join()
            time_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
            return sum(counts) / time_s, cpu_s / sum(counts)

        return run


class _Workers:
    """A run of this project's, with all that belongs to one."""

    def __init__(self, folder: Path, count: int, discipline: str, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
        self._options: dict[str, Any] = {"recipe": RECIPE, "engine": "inproc", "quiet": True}
        self._options |= {"workers": count, "discipline": discipline, "eval_every": 0}
        self._steps: int | None = None
        """How many fill the time."""

    def run(self) -> tuple[float, float]:
        if self._steps is None:
            times, _ = self._train(CALIBRATION_STEPS)
            filling = round(rate(times) * self._seconds / len(times))
            self._steps = max(CALIBRATION_STEPS, filling)
        times, clock = self._train(self._steps)
        start_s, end_s = window(times)
        per_s = clock.between(start_s, end_s) / (end_s - start_s)
        return rate(times), per_s / rate(times)

    def _train(self, steps: int) -> tuple[list[list[float]], "CpuClock"]:
        run_dir = Path(tempfile.mkdtemp(dir=self._folder)) / "run"
        config = make_config(self._options, {"steps": steps, "run_dir": str(run_dir)})
        with CpuClock() as clock:
            if train_config(config).interrupted:
                raise KeyboardInterrupt
        return step_times(run_dir), clock


class CpuClock:
    """Looks at this process's CPU time over and over, from when it is entered; a run that is
    started then has the same zero."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self._seen.append((time.monotonic() - self._start_s, time.process_time()))

    def between(self, start_s: float, end_s: float) -> float:
        """CPU seconds, to the looks that lie next to these times."""
        found = [cpu_s for at_s, cpu_s in self._seen if start_s <= at_s <= end_s]
        return found[-1] - found[0] if found else 0.0


def _endless(job: Job, source: Source) -> Iterator[Tensor]:
    """Drafts of whole batches, epoch after epoch."""
    for epoch in itertools.count():
        for draft in source.drafts(job.share(0), epoch):
            if len(draft) == job.step_size:
                yield draft
