"""The program on top of what is simulated: a model that counts gradients, and its roles.

The flat vector has an element for each gradient of the run in each server's slice, and a gradient
is one there and zero everywhere else. With a learning rate of one the parameters are the books: an
element is -1 where that gradient is in, 0 where it is not, and anything else is a crime.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from rig import manifest_of
from torch import Tensor, nn

from offbeat import SGD, Recipe
from offbeat.config import TrainConfig, make_config
from offbeat.data.batches import StepBatch
from offbeat.disciplines import Discipline
from offbeat.plugins import Choice
from offbeat.roles import (
    acceptor,
    exchange,
    loop,
    master,
    norms,
    rounds,
    run,
    server,
    session,
    sessions,
    worker,
)
from offbeat.roles.context import Records
from offbeat.run import checkpoint
from offbeat.run.events import EventLog
from offbeat.run.job import Facts, Job
from offbeat.shard import partition
from offbeat.transport.base import CPU, Message
from simulated.disk import Disk, os_of, shutil_of
from simulated.network import Descriptors
from simulated.tasks import World, threading_of

SILENT_S = 2.0
"""After which a worker that says nothing is taken for gone."""
PATIENT: dict[types.ModuleType, dict[str, float]] = {
    acceptor: {"POLL_S": 0.2},
    exchange: {"POLL_S": 0.2},
    loop: {"POLL_S": 0.2, "TICK_S": 0.05},
    master: {"POLL_S": 0.1},
    rounds: {"POLL_S": 0.2},
    run: {"REPORT_EVERY_S": 0.25},
    server: {"POLL_S": 0.2},
    sessions: {"POLL_S": 0.2, "TICK_S": 0.05},
}
"""How often the program looks up, said here since tests make it quicker elsewhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a run is."""

    discipline: str
    options: Mapping[str, float]
    servers: int
    workers: int
    steps: int
    checkpoint_every: int
    clips: bool = False
    """By the norm of the whole gradient, which servers then tell each other in sync."""
    overlap: bool = False
    void: float = 0.0
    """How likely it is that a gradient is no usable number."""

    @property
    def num_gradients(self) -> int:
        return self.workers * self.steps

    def place(self, rank: int, step: int) -> int:
        """Where a gradient is in each slice."""
        return rank * self.steps + step - 1

    def inside(self, params: Tensor) -> list[int]:
        """How often each gradient is in a slice."""
        return [-int(value) for value in params.tolist()]

    def config(self) -> TrainConfig:
        base = _base_config(self.discipline, tuple(self.options.items()), self.clips, self.overlap)
        own = {
            "servers": self.servers,
            "workers": self.workers,
            "steps": self.steps,
            "checkpoint_every": self.checkpoint_every,
        }
        return _Config(**{**vars(base), **own})


class _Config(TrainConfig):
    """Which is read as often as in a run of hours, in a run of milliseconds."""

    @functools.cached_property
    def chosen(self) -> Choice[Discipline]:  # type: ignore[override]
        return super().chosen


@functools.cache
def _base_config(
    discipline: str, given: tuple[tuple[str, float], ...], clips: bool, overlap: bool
) -> TrainConfig:
    options: dict[str, Any] = {
        "discipline": discipline,
        **dict(given),
        "workers": 2,
        "overlap": overlap,
        "eval_every": 0,
        "max_restarts": 1000,
        "worker_timeout": SILENT_S,
        "threads": 1,
        "batch_size": 1,
        "device": "cpu",
    }
    if clips:
        options["clip_norm"] = 1e6  # which no gradient has, but all have to know that
    config = make_config(options)
    return make_config({**options, "rule": "sum"}) if config.chosen.kind.merges else config


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingJob(Job):
    """Its workers' towers make up what a model would compute."""

    towers: Callable[[int], "CountingTowers"]

    @functools.cached_property
    def agreement(self) -> Message:  # type: ignore[override]
        return super().agreement

    def make_towers(self, rank: int, model: Any, tell: Any = None) -> Any:
        return self.towers(rank)

    def make_model(self) -> Any:
        return _Model(torch.zeros(self.manifest.num_elements))

    def step_batches(
        self,
        rank: int,
        start: int = 0,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda line: None,
    ) -> Generator[StepBatch, None, None]:
        for number in range(start, self.config.steps or 0):
            yield StepBatch(0, torch.tensor([number]), number, True)


def make_job(shape: Shape, towers: Callable[[int], "CountingTowers"]) -> CountingJob:
    config = shape.config()
    manifest = manifest_of([shape.servers * shape.num_gradients])
    return CountingJob(
        towers=towers,
        config=config,
        recipe=RECIPE,
        optimizer=SGD(lr=1.0),
        manifest=manifest,
        slices=tuple(partition(manifest.num_elements, shape.servers)),
        facts=Facts(
            num_examples=None,
            num_batches=[shape.steps] * shape.workers,
            has_test=False,
            total_updates=None,
            in_rounds=config.chosen.kind.in_rounds,
            engine="local",
        ),
    )


def discipline_of(job: Job) -> type[Discipline]:
    return job.config.chosen.kind


def _no_data(config: TrainConfig) -> Any:
    raise AssertionError("nobody asks for it")


RECIPE = Recipe(
    model=lambda: nn.Linear(1, 1), data=_no_data, loss=lambda model, batch: torch.zeros(())
)


@dataclasses.dataclass
class _Model:
    params: Tensor
    module: None = None

    def frozen(self) -> dict[str, Tensor]:
        return {}

    def write_buffers(self, floats: Tensor, ints: Tensor) -> None:
        return


class CountingTowers:
    """What a worker computes with."""

    is_told = False
    keeps = False
    norm = None
    gradient = None
    first_device = CPU

    def __init__(
        self, shape: Shape, rank: int, world: World, step_s: float, voids: Callable[[int], bool]
    ) -> None:
        """`step_s`: what a step takes, more or less."""
        self.landing = torch.zeros(shape.servers * shape.num_gradients)
        self.model = _Model(self.landing)
        self._shape = shape
        self._rank = rank
        self._world = world
        self._step_s = step_s
        self._voids = voids
        self._step = 0

    def in_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def compute(self, loss: Any, parts: Tensor, *, eagerly: bool = False) -> None:
        self._step = int(parts) + 1
        self._world.pause(self._step_s * (0.5 + self._world.draw.random()))

    def deal(self, batch: Tensor) -> Tensor:
        return batch

    def take_gradient(self, slices: Sequence[Tensor], count: int = 1) -> list[bool]:
        place = self._shape.place(self._rank, self._step)
        for values in slices:
            values.zero_()
            values[place] = 1.0
        return [True]

    def wait(self) -> tuple[float, bool]:
        return 0.0, not self._voids(self._step)

    def adopt(self, landing: Tensor) -> None:
        self.landing = landing

    def refresh(self) -> list[str]:
        return []

    def _nothing(self, *given: Any) -> None:
        return

    train = check_identity = begin = read_buffers = write_buffers = forget = close = _nothing


class Silence(Records):
    """Logs go into the trace; events nowhere."""

    def __init__(self, world: World, watched: Callable[[Any], None]) -> None:
        super().__init__()
        self._world = world
        self._watched = watched

    def log(self, name: str) -> logging.Logger:
        logger = logging.Logger(name)
        logger.disabled = self._world.trace is None
        logger.addHandler(_Handler(self._world))
        return logger

    def _make_events(self, name: str) -> EventLog:
        return _Events(self._watched)


class _Handler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.tell(f"    {record.name}: {record.getMessage()}")


class _Events(EventLog):
    def __init__(self, watched: Callable[[Any], None]) -> None:
        self._watched = watched

    def record(self, kind: str, **fields: Any) -> None:
        if fields.get("phase") == "books":
            self._watched(fields["shards"])

    def record_line(self, write: Callable[..., str], *values: Any) -> None:
        self._watched(write)

    def flush(self) -> None:
        return

    close = flush


class Summaries:
    def of_steps(self) -> None:
        return None

    def watch(self, version: int, staleness: list[int], falls: Sequence[int] = ()) -> None:
        return


@contextlib.contextmanager
def installed(world: World, disk: Disk, descriptors: Descriptors, **more: Any) -> Iterator[None]:
    """The program's modules stand on the simulation; `more`: what is in the place of something in
    the module roles/run.py."""
    waiting = threading_of(world)
    clock = types.SimpleNamespace(monotonic=world.clock)
    places: dict[types.ModuleType, dict[str, Any]] = {
        module: {"threading": waiting, **PATIENT.get(module, {})}
        for module in {**PATIENT, norms: {}, session: {}}
    }
    for module in (norms, loop):
        places[module]["time"] = clock
    places[loop] |= {"select": descriptors.select(), "os": descriptors.os()}
    places[loop]["_Member"] = _with_own_event(world)
    places[checkpoint] = {"os": os_of(disk), "shutil": shutil_of(disk)}
    places[run] |= more
    places[sessions]["Session"] = _with_own_locks(world)
    places[worker] = {"make_faults": lambda *given, **named: worker_faults}
    before = {
        module: {name: getattr(module, name) for name in names} for module, names in places.items()
    }
    num_threads = torch.get_num_threads()
    try:
        _set(places)
        yield
    finally:
        _set(before)
        torch.set_num_threads(num_threads)


def _set(places: Mapping[types.ModuleType, Mapping[str, Any]]) -> None:
    for module, names in places.items():
        for name, value in names.items():
            setattr(module, name, value)


def _with_own_event(world: World) -> Callable[..., Any]:
    """As below."""
    kind, make = loop._Member, threading_of(world).Event
    return lambda *given: kind(*given, over=make())


def _with_own_locks(world: World) -> Callable[..., session.Session]:
    """A dataclass has taken the real ones in already."""
    kind, make = session.Session, threading_of(world).Lock

    def made(*given: Any, **named: Any) -> session.Session:
        return kind(*given, **named, attended=make(), applying=make())

    return made


worker_faults = worker.make_faults(make_config({}), 0, 0, clock=lambda: 0.0, stop=threading.Event())
"""None: what befalls workers comes from elsewhere."""
