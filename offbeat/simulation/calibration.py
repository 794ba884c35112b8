"""From a recorded run's events to how long everything takes.

    recording = read_recording(Path("runs/..."))
    recording.timing         # what to simulate others with
    recording.figures       # what was measured, in the same words as what is simulated

What is looked at is the stretch in which all workers were at work. Of a worker, a step's times are
in its event. Of a server, each push has three moments: it was received, applied, replied to; as a
server does one thing after the other, what it does ends at one of them, and began at the one
before, or when the push came. Imports no torch.
"""

import dataclasses
import itertools
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.accounts import APPLIED, DROPPED
from offbeat.config import TrainConfig, make_config, options
from offbeat.errors import ConfigError, RunDirError
from offbeat.run.events import read_events
from offbeat.simulation.timing import ServiceTimes, StepTimes, Timing
from offbeat.simulation.virtual import Figures, Setup, VirtualRun

WARM_UP = 20
"""So many steps of each worker are not looked at, or a tenth of them, if that is less."""
FEWEST_STEPS = 10
"""Of each worker, to draw from."""
MOST_STEPS = 10_000
"""Of each worker; what came later is not looked at."""
LOOK_SHARE = 0.4
"""Of looking at a gradient and applying it, or replying to it, where a run's events have only the
sum; measured, docs/simulation.md."""
MERGE_SHARE = 0.5
"""What each further gradient of an update takes, of what looking at one and applying it does."""
ON_ONE_MACHINE = ("local", "inproc")
"""Engines whose roles share cores, and a clock."""
FITTING_STEPS = 4_000
FITTING_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is known of a run."""

    config: TrainConfig
    timing: Timing
    figures: Figures
    """Of the stretch in which all were at work."""


class _Step(NamedTuple):
    start_s: float
    compute_s: float
    prepare_s: float
    exchange_s: float

    @property
    def pushed_s(self) -> float:
        return self.start_s + self.compute_s

    @property
    def ready_s(self) -> float:
        return self.pushed_s + self.prepare_s

    @property
    def end_s(self) -> float:
        return self.ready_s + self.exchange_s


class _Push(NamedTuple):
    worker: int
    sequence: int
    received_s: float
    applied_s: float | None
    replied_s: float | None
    version: int | None
    staleness: int | None
    outcome: str


@dataclass
class _Events:
    steps: dict[int, dict[int, _Step]] = field(default_factory=lambda: defaultdict(dict))
    """By worker and number."""
    pushes: dict[int, list[_Push]] = field(default_factory=lambda: defaultdict(list))
    """By shard."""
    bytes: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """By worker: whole, up and down, of the last step that says so."""

    def add(self, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "step" if event["step"] <= MOST_STEPS:
                times = (event[k] for k in ("start_s", "compute_s", "prepare_s", "exchange_s"))
                self.steps[event["worker"]][event["step"]] = _Step(*map(float, times))
                if "up" in event:
                    names = ("whole", "up", "down")
                    self.bytes[event["worker"]] = tuple(float(event[name]) for name in names)
            case "push" if event["sequence"] <= MOST_STEPS:
                made = (event[name] for name in _Push._fields)
                self.pushes[event["shard"]].append(_Push(*made))


def read_recording(path: Path, cores: float | None = None) -> Recording:
    """`cores`: that its roles had, if it is not as the run says."""
    config, machine = _read_config(path)
    if cores is not None:
        machine = dataclasses.replace(machine, cores=cores)
    events = _Events()
    try:
        for event in read_events(path / "events"):
            events.add(event)
    except (LookupError, TypeError, ValueError) as error:
        raise RunDirError(
            f"{path} has an event that is none of this version's: {error!r}"
        ) from error
    window = _window(path, config, events)
    timing, figures = _Reading(config, events, window).timing(machine), _figures(events, window)
    return Recording(config=config, timing=_alone(config, timing, figures), figures=figures)


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """What all of a run's roles shared."""

    cores: float
    """inf: each had its own."""
    threads: int
    """Of each worker."""


def _read_config(path: Path) -> tuple[TrainConfig, _Machine]:
    """The options of a run that can be simulated, and where it was."""
    file = path / "config.json"
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        given = {k: v for k, v in described["config"].items() if k in options() and v is not None}
        config = make_config(given)
        machine = _machine_of(described)
    except OSError as error:
        raise RunDirError(f"cannot read {file}: {error.strerror}; is that a run?") from error
    except (ValueError, TypeError, LookupError) as error:
        raise RunDirError(f"{file} does not describe a run: {error!r}") from error
    _check(config)
    return config, machine


def _machine_of(described: Mapping[str, Any]) -> _Machine:
    """On GPUs, as on machines of their own, nothing is known of what another worker would find."""
    job, resolved = described.get("job") or {}, described.get("resolved") or {}
    cores = float((described.get("environment") or {}).get("cores") or math.inf)
    on_cores = all(device == "cpu" for device in resolved.get("devices") or ())
    is_shared = on_cores and job.get("engine") in ON_ONE_MACHINE
    threads = int(resolved.get("threads") or 1)
    return _Machine(cores=cores if is_shared else math.inf, threads=threads)


def _check(config: TrainConfig) -> None:
    """A ConfigError where what the run did differs from what is simulated."""
    if not config.chosen.kind.served:
        name = config.chosen.label
        raise ConfigError(f"the run has no servers ({name}): record one under another discipline")
    if config.overlap:
        raise ConfigError("the run overlaps exchanges with computing: record one without --overlap")
    if config.paces:
        raise ConfigError(
            "the run's local steps differ from push to push: record one without :auto"
        )


Window = tuple[float, float]


def _window(path: Path, config: TrainConfig, events: _Events) -> Window:
    """In which all workers were at work, and warm."""
    every = [sorted(steps.items()) for steps in events.steps.values()]
    if len(every) < config.workers:
        raise RunDirError(f"{path} has no steps of {config.workers - len(every)} of its workers")
    begins_s = max(steps[min(WARM_UP, len(steps) // 10)][1].start_s for steps in every)
    ends_s = min(steps[-1][1].end_s for steps in every)
    for steps in every:
        if (
            sum(begins_s <= step.start_s and step.end_s <= ends_s for _, step in steps)
            < FEWEST_STEPS
        ):
            raise RunDirError(
                f"{path} is too short: of each worker it takes {FEWEST_STEPS} steps, in the time "
                f"in which all were at work"
            )
    return begins_s, ends_s


def _figures(events: _Events, window: Window) -> Figures:
    begins_s, ends_s = window
    found = Figures(time_s=ends_s - begins_s)
    for step in itertools.chain.from_iterable(s.values() for s in events.steps.values()):
        if begins_s < step.end_s <= ends_s:
            found.gradients += 1
            found.steps_s += step.end_s - step.start_s
            found.computed_s += step.compute_s
            found.waited_s += step.exchange_s
    for shard, pushes in events.pushes.items():
        inside = [p for p in pushes if begins_s < p.received_s <= ends_s]
        found.answered += sum(p.replied_s is not None for p in inside)
        found.dropped += sum(p.outcome == DROPPED for p in inside)
        applied = [p for p in inside if p.outcome == APPLIED]
        found.staleness += Counter(p.staleness for p in applied if p.staleness is not None)
        found.updates += len({p.version for p in applied}) if shard == 0 else 0
    return found


def _alone(config: TrainConfig, timing: Timing, figures: Figures) -> Timing:
    """What everything would take on a core of its own: such that the same run, on the cores that it
    had, comes out computing for as long as it did."""
    if math.isinf(timing.cores):
        return timing
    setup = setup_of(config, timing.cores)
    measured_s, factor = figures.computed_s / figures.gradients, 1.0
    for _ in range(FITTING_ROUNDS):
        found = VirtualRun(setup, timing.scaled(factor)).go(FITTING_STEPS, FITTING_STEPS // 10)
        factor *= measured_s / (found.computed_s / found.gradients)
    return timing.scaled(factor)


def setup_of(config: TrainConfig, cores: float) -> Setup:
    """The run itself."""
    chosen = config.chosen
    return Setup(
        discipline=lambda ranks: chosen.kind(ranks, **chosen.values),
        workers=config.workers,
        servers=config.servers,
        cores=cores,
        slowdowns=config.slowdowns,
    )


class _Served(NamedTuple):
    """Something that a server did, when it ended."""

    at_s: float
    of: str
    received_s: float
    """The push that it was done for."""
    num_gradients: int
    """That it was made of."""


class _Reading:
    """What events say of the time that things take."""

    def __init__(self, config: TrainConfig, events: _Events, window: Window) -> None:
        self._config = config
        self._events = events
        self._window = window
        self._served = {shard: sorted(_served(p)) for shard, p in events.pushes.items()}

    def timing(self, machine: _Machine) -> Timing:
        services, merge_s = self._services()
        whole, up, down = self._bytes()
        return Timing(
            steps=[self._steps_of(worker) for worker in sorted(self._events.steps)],
            services=services,
            merge_s=merge_s,
            servers=self._config.servers,
            whole_bytes=whole or 0.0,
            up_bytes=up,
            down_bytes=down,
            cores=machine.cores,
            threads=machine.threads,
        )

    def _bytes(self) -> Sequence[float | None]:
        """Of a gradient, in memory; that are sent; and of a reply."""
        found = list(self._events.bytes.values())
        if not found:
            return None, None, None
        return [_mean(column) for column in zip(*found, strict=True)]

    # -- workers -------------------------------------------------------------------------------

    def _steps_of(self, worker: int) -> list[StepTimes]:
        begins_s, ends_s = self._window
        steps = self._events.steps[worker]
        within = {n: s for n, s in steps.items() if begins_s <= s.start_s and s.end_s <= ends_s}
        received, replied = self._exchanges_of(worker)
        ups = {n: received[n] - s.pushed_s for n, s in within.items() if n in received}
        typical_s = _median(list(ups.values()))  # of a server that was busy nothing is known
        factor = self._config.slowdowns.get(worker, 1.0)
        found = []
        for number, step in sorted(within.items()):
            before = steps.get(number - 1)
            held_s = (factor - 1) * (before.prepare_s if before else 0.0)
            compute_s = max(0.0, step.compute_s - held_s) / factor
            last_s = max(step.ready_s, replied.get(number, 0.0))
            up_s, down_s = ups.get(number, typical_s), step.end_s - last_s
            found.append(StepTimes(compute_s, step.prepare_s, max(0.0, up_s), max(0.0, down_s)))
        return found

    def _exchanges_of(self, worker: int) -> tuple[dict[int, float], dict[int, float]]:
        """When the gradients of this worker's steps were received last, where the server had
        nothing else to do, and when they were replied to last."""
        received: dict[int, float] = {}
        replied: dict[int, float] = {}
        for shard, pushes in self._events.pushes.items():
            ends = [served.at_s for served in self._served[shard]]
            for push in pushes:
                step = self._events.steps[worker].get(push.sequence)
                if push.worker != worker or step is None:
                    continue
                place = bisect_right(ends, push.received_s)
                if not place or ends[place - 1] <= step.pushed_s:
                    received[push.sequence] = push.received_s
                if push.replied_s is not None:
                    replied[push.sequence] = max(replied.get(push.sequence, 0.0), push.replied_s)
        return received, replied

    # -- servers -------------------------------------------------------------------------------

    def _services(self) -> tuple[list[ServiceTimes], float]:
        """And what each further gradient of an update takes."""
        takes, applies, replies, answers = self._durations()
        if takes:  # looked at and applied, then replied to
            pairs = _paired(takes, replies or [0.0])
            services = [
                ServiceTimes(LOOK_SHARE * take_s, (1 - LOOK_SHARE) * take_s, reply_s)
                for take_s, reply_s in pairs
            ]
        elif applies and answers:  # replied to first
            pairs = _paired(answers, applies)
            services = [
                ServiceTimes(LOOK_SHARE * answer, apply_s, (1 - LOOK_SHARE) * answer)
                for answer, apply_s in pairs
            ]
        else:
            raise RunDirError(
                "the run's events do not say how long its servers take for a gradient"
            )
        return services, MERGE_SHARE * _mean([s.look_s + s.apply_s for s in services])

    def _durations(self) -> tuple[list[float], ...]:
        """Of looking at a gradient and applying it; of applying alone; of replying alone; of
        looking at it and replying."""
        found: tuple[list[float], ...] = ([], [], [], [])
        takes, applies, replies, answers = found
        for served, since_s, is_first in self._work():
            took_s = served.at_s - since_s
            if served.of == "apply":
                took_s /= 1 + MERGE_SHARE * (served.num_gradients - 1)
                (takes if is_first else applies).append(took_s)
            else:
                (answers if is_first else replies).append(took_s)
        return found

    def _work(self) -> Iterator[tuple[_Served, float, bool]]:
        """All that servers did meanwhile: when it began, and whether that was with a push that had
        just come."""
        begins_s, ends_s = self._window
        for each in self._served.values():
            before_s = 0.0
            for served in each:
                if begins_s < served.received_s and served.at_s <= ends_s:
                    is_first = served.received_s >= before_s
                    yield served, served.received_s if is_first else before_s, is_first
                before_s = served.at_s


def _served(pushes: Sequence[_Push]) -> Iterator[_Served]:
    """An update was made for the push that came last of those in it."""
    updates: dict[int, list[_Push]] = defaultdict(list)
    for push in pushes:
        if push.version is not None and push.applied_s is not None:
            updates[push.version].append(push)
        if push.replied_s is not None:
            yield _Served(push.replied_s, "reply", push.received_s, 1)
    for made in updates.values():
        applied_s = max(p.applied_s for p in made if p.applied_s is not None)
        yield _Served(applied_s, "apply", max(p.received_s for p in made), len(made))


def _paired(one: Sequence[float], other: Sequence[float]) -> list[tuple[float, float]]:
    """As many as there are of the longer one; the other begins anew."""
    count = max(len(one), len(other))
    return list(itertools.islice(zip(itertools.cycle(one), itertools.cycle(other)), count))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
