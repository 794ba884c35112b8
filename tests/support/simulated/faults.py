"""One seed: a run, what befalls it, and how it ends.

    outcome = simulate(17)
    outcome.complaints       # what did not hold; none: all is well
    outcome.trace            # with trace=True, every event as a line
    outcome.digest           # the same for the same seed, everywhere

Faults strike during the first second or so of virtual time; from then on nothing goes wrong any
more, and everything has to come to its end within `PATIENCE_S`.
"""

import contextlib
import dataclasses
import hashlib
import random
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.errors import CheckpointError, ConnectionClosedError
from offbeat.roles import master
from offbeat.roles.run import Role, ServerRole
from offbeat.run.checkpoint import Checkpoint, list_checkpoints, newest_checkpoint
from simulated.disk import Disk, Folder, Place
from simulated.engine import SimulatedEngine
from simulated.network import Wires
from simulated.program import (
    SILENT_S,
    CountingTowers,
    Shape,
    Silence,
    installed,
    make_job,
)
from simulated.tasks import Process, Task, World
from simulated.watching import Watch, WatchedLedger

PATIENCE_S = 300.0
"""How long a run may take after the last fault: longer than any timeout of the program."""
DISCIPLINES: list[tuple[str, dict[str, float]]] = [
    ("sync", {}),
    ("sync", {}),
    ("sync", {"backup_workers": 1}),
    ("sync", {"round_timeout": 0.2}),
    ("apply-reply", {}),
    ("reply-apply", {}),
    ("lock-free", {}),
    ("bounded", {"staleness": 0}),
    ("bounded", {"staleness": 2}),
    ("ringmaster", {"max_delay": 2}),
    ("rennala", {"collect": 3}),
    ("buffer", {"buffer_size": 3}),
    ("buffer", {"buffer_size": 9}),
]


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    """A method of `Run`."""
    who: float = 0.0
    """Between 0 and 1: which of those that there are."""
    length_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} at {self.at_s:.3f} s for {self.length_s:.3f} s"


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    shape: Shape
    inline: bool
    """Payloads travel with their headers."""
    polls: bool
    """One thread of a server serves all workers."""
    yields: float
    latency_s: float
    step_s: Sequence[float]
    """Of each worker."""
    faults: Sequence[Fault]

    def __str__(self) -> str:
        shape = self.shape
        options = "".join(f" {name}={value:g}" for name, value in shape.options.items())
        how = "".join(f", {word}" for word in ("clips", "overlap") if getattr(shape, word))
        return (
            f"seed {self.seed}: {shape.discipline}{options}, {shape.servers} servers, "
            f"{shape.workers} workers, {shape.steps} steps, checkpoint every "
            f"{shape.checkpoint_every}{how}; " + "; ".join(map(str, self.faults))
        )


KINDS = {
    "kill_worker": 5,
    "kill_server": 5,
    "kill_master": 3,
    "halt": 3,
    "cut": 5,
    "part": 3,
    "twin": 2,
    "double": 2,
    "kill_all": 1,
    "power": 2,
    "stop": 1,
    "full_disk": 1,
    "slow": 1,
}
"""And how often each is drawn."""
HARMLESS = {"kill_server", "slow", "double"}
"""Those after which workers still have the same rounds everywhere, if one server dies at most."""


SLOW = 0.06
"""How likely it is that a run with several servers has a worker that is very slow."""


def draw_plan(seed: int) -> Plan:
    draw = random.Random(f"plan {seed}")
    name, options = draw.choice(DISCIPLINES)
    workers = draw.choice([1, 2, 2, 3, 3, 4, 5])
    if options.get("backup_workers") and workers == 1:
        workers = 2
    servers = draw.choice([1, 1, 2, 2, 3])
    shape = Shape(
        discipline=name,
        options=options,
        servers=servers,
        workers=workers,
        steps=draw.randint(2, 6),
        checkpoint_every=draw.choice([1, 2, 5, 1000]),
        clips=name == "sync" and servers > 1 and workers > 1 and draw.random() < 0.2,
        overlap=draw.random() < 0.15,
        void=draw.choice([0.0, 0.0, 0.1]),
    )
    within_s = draw.choice([0.3, 0.6, 1.0])
    faults = [_draw_fault(draw, within_s) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4, 6]))]
    faults.sort(key=lambda fault: fault.at_s)
    plan = Plan(
        seed=seed,
        shape=shape,
        inline=(inline := draw.random() < 0.5),
        polls=not inline and random.Random(f"polls {seed}").random() < 0.5,
        yields=draw.choice([0.0, 0.0, 0.05, 0.3]),
        latency_s=draw.choice([0.0002, 0.001, 0.01]),
        step_s=[draw.choice([0.01, 0.03, 0.03, 0.08]) for _ in range(workers)],
        faults=faults,
    )
    return _doubled(_slowed(plan)) if servers > 1 else plan


def _slowed(plan: Plan) -> Plan:
    """Now and then a worker takes longer for a step than the others' patience lasts, and what goes
    wrong does so meanwhile; often that is one server's death, and nothing else."""
    draw = random.Random(f"slow {plan.seed}")
    if draw.random() > SLOW:
        return plan
    slow, late = draw.randrange(plan.shape.workers), draw.choice([1.0, 5.0, 10.0])
    step_s = list(plan.step_s)
    step_s[slow] = draw.choice([0.6, 1.2, 1.8]) * SILENT_S
    faults = [dataclasses.replace(fault, at_s=late * fault.at_s) for fault in plan.faults]
    if draw.random() < 0.5:
        faults = [Fault(draw.uniform(0.1, 2 * step_s[slow]), "kill_server", draw.random())]
    return dataclasses.replace(plan, step_s=step_s, faults=faults)


def _doubled(plan: Plan) -> Plan:
    """Where servers share the norm of a gradient, pushes come twice more often."""
    draw = random.Random(f"double {plan.seed}")
    if not plan.shape.clips or draw.random() > 0.3:
        return plan
    fault = Fault(0.0, "double", draw.random(), 1.0)
    return dataclasses.replace(plan, inline=True, polls=False, faults=[fault, *plan.faults])


def _draw_fault(draw: random.Random, within_s: float) -> Fault:
    kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
    length_s = draw.choice([0.02, 0.1, 0.3, 0.3, 1.5 * SILENT_S])
    return Fault(draw.uniform(0.0, within_s), kind, draw.random(), length_s * draw.random())


@dataclass
class Outcome:
    plan: Plan
    complaints: list[str]
    num_events: int
    num_pushes: int
    digest: str
    trace: list[str] = field(default_factory=list)


class Run:
    """A run under a plan, through all of its lives."""

    def __init__(self, plan: Plan, *, traced: bool) -> None:
        self.plan = plan
        self.world = World(random.Random(f"world {plan.seed}"), yields=plan.yields)
        self.world.trace = [] if traced else None
        self.disk = Disk(self.world)
        self.wires = Wires(self.world, inline=plan.inline, patience_s=SILENT_S)
        self.wires.conditions.latency_s = plan.latency_s
        self.wires.are_polled = plan.polls
        self.job = make_job(plan.shape, self._make_towers)
        self.folder = Place(self.disk, "run")
        self.watch = Watch(self.world, plan.shape, self.job)
        self.watch.meets = self._meets
        self.wires.watch = self.watch.heard
        self.engine: SimulatedEngine | None = None
        self.engines: list[SimulatedEngine] = []
        self._void = random.Random(f"void {plan.seed}")
        self._voids = {
            (rank, step): self._void.random() < plan.shape.void
            for rank in range(plan.shape.workers)
            for step in range(1, plan.shape.steps + 1)
        }

    def go(self) -> Outcome:
        plan, world, watch = self.plan, self.world, self.watch
        last_s = max((fault.at_s + fault.length_s for fault in plan.faults), default=0.0)
        with self._standing():
            self._make_folder()
            world.at(0.0, lambda: self._live(0))
            for fault in plan.faults:
                world.at(fault.at_s, lambda fault=fault: self._strike(fault))
            if not world.run(last_s + PATIENCE_S):
                watch.complain(f"it does not end: {self._who_waits()}")
            if not watch.complaints:
                watch.finished(newest_checkpoint(self.folder / "checkpoints"))
            for engine in self.engines:
                world.unwind(engine.processes)
        self._note_errors()
        trace = world.trace or []
        counts = world.num_events, watch.num_pushes
        all_told = f"{world.now_s!r} {counts} {watch.complaints} {trace}"
        digest = hashlib.sha256(all_told.encode()).hexdigest()
        return Outcome(plan, watch.complaints, *counts, digest, trace)

    @property
    def _meets(self) -> bool:
        """Whether no worker ever misses a round, or is a step behind, at a single server."""
        shape, kinds = self.plan.shape, [fault.kind for fault in self.plan.faults]
        is_plain = shape.discipline == "sync" and not (shape.options or shape.overlap)
        is_calm = kinds.count("kill_server") <= 1 and not set(kinds) - HARMLESS
        return is_plain and shape.servers > 1 and is_calm

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        WatchedLedger.watch = self.watch
        before = master.save_checkpoint
        with installed(self.world, self.disk, self.wires.descriptors, Ledger=WatchedLedger):
            master.save_checkpoint = self.watch.save  # type: ignore[assignment]
            try:
                yield
            finally:
                master.save_checkpoint = before

    def _make_towers(self, rank: int) -> CountingTowers:
        plan = self.plan
        voids = self._voids
        return CountingTowers(
            plan.shape, rank, self.world, plan.step_s[rank], lambda step: voids[rank, step]
        )

    def _make_folder(self) -> None:
        """It is older than the run."""
        self.disk.root = Folder()
        checkpoints = self.folder / "checkpoints"
        checkpoints.mkdir(parents=True)
        for folder in (self.folder, checkpoints):
            self.disk.folder(folder.parts).sync()
        self.disk.root.sync()

    # -- lives ---------------------------------------------------------------------------------

    def _after(self, engine: SimulatedEngine) -> None:
        """An engine has come to its end."""
        if self.engine is not engine:
            return
        self.engine = None
        self.world.unwind(engine.processes)
        self.world.tell("the engine ends")
        for error in engine.failures:
            if not self._may_fail(error):
                self.watch.complain(f"it failed: {_in_words(error)}")
        state = engine.folder.state
        if state.exists() and b"finished" in state.read_bytes():
            self.world.is_over = True
            self.world.tell("finished")
            return
        self.world.at(0.05, self._resume)

    def _may_fail(self, error: BaseException) -> bool:
        return self.disk.has_failed and isinstance(
            error, CheckpointError | ConnectionClosedError | OSError
        )

    def _resume(self) -> None:
        """As `offbeat train --resume` does; or, where there is nothing to go on from, anew."""
        checkpoint = self._newest()
        self.watch.found(checkpoint)
        (self.folder / "state.json").unlink(missing_ok=True)
        self._live(0 if checkpoint is None else checkpoint.next_incarnation)

    def _newest(self) -> Checkpoint | None:
        folder: Any = self.folder / "checkpoints"
        try:
            return newest_checkpoint(folder)
        except CheckpointError:
            for path in list_checkpoints(folder):
                self.watch.complain(f"{path} is damaged, and there is no other")
            return None

    def _live(self, incarnation: int) -> None:
        self.world.tell(f"an engine begins, incarnation {incarnation}")
        self.engine = SimulatedEngine(
            self.world,
            self.wires,
            self.job,
            self.folder,
            incarnation,
            made=self._made,
            ended=self._after,
            records=lambda process: Silence(self.world, self.watch.wrote),
        )
        self.engines.append(self.engine)

    def _made(self, role: Role, kind: str, index: int, process: Process) -> None:
        if isinstance(role, ServerRole):
            self.watch.begin(role.server, process)

    # -- faults --------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        if self.engine is None or self.engine.is_over:
            return
        self.world.tell(f"*** {fault}")
        getattr(self, f"_{fault.kind}")(self.engine, fault)

    def _pick(self, engine: SimulatedEngine, fault: Fault, *roles: str) -> Process | None:
        found = [
            process
            for role in roles
            for member in engine.members(role)
            if (process := engine.process_of(member)) is not None
        ]
        return found[int(fault.who * len(found))] if found else None

    def _kill(self, process: Process | None) -> None:
        if process is not None:
            process.kill()

    def _kill_worker(self, engine: SimulatedEngine, fault: Fault) -> None:
        self._kill(self._pick(engine, fault, "worker"))

    def _kill_server(self, engine: SimulatedEngine, fault: Fault) -> None:
        self._kill(self._pick(engine, fault, "ps"))

    def _kill_master(self, engine: SimulatedEngine, fault: Fault) -> None:
        self._kill(self._pick(engine, fault, "master"))

    def _halt(self, engine: SimulatedEngine, fault: Fault) -> None:
        process = self._pick(engine, fault, "ps", "worker", "master")
        if process is not None:
            process.pause()
            self.world.at(fault.length_s, process.go_on)

    def _cut(self, engine: SimulatedEngine, fault: Fault) -> None:
        lines = [line for line in self.wires.lines if not line.is_cut]
        if lines:
            lines[int(fault.who * len(lines))].cut()

    def _part(self, engine: SimulatedEngine, fault: Fault) -> None:
        one = self._pick(engine, fault, "worker", "master")
        other = self._pick(engine, dataclasses.replace(fault, who=fault.who * 7 % 1), "ps")
        if one is not None and other is not None:
            self.wires.part(one.name, other.name, fault.length_s)

    def _twin(self, engine: SimulatedEngine, fault: Fault) -> None:
        workers = engine.members("worker")
        if workers:
            self.watch.is_disturbed = self.watch.is_twofold = True
            engine.replace(workers[int(fault.who * len(workers))])

    def _double(self, engine: SimulatedEngine, fault: Fault) -> None:
        if self.plan.inline:  # in memory that is shared nothing is sent twice
            self.wires.conditions.doubles = fault.who
            self.world.at(fault.length_s, lambda: self._undo(doubles=0.0))

    def _slow(self, engine: SimulatedEngine, fault: Fault) -> None:
        self._undo(latency_s=0.1)
        self.world.at(fault.length_s, lambda: self._undo(latency_s=self.plan.latency_s))

    def _undo(self, **conditions: float) -> None:
        for name, value in conditions.items():
            setattr(self.wires.conditions, name, value)

    def _kill_all(self, engine: SimulatedEngine, fault: Fault) -> None:
        engine.kill_all()

    def _power(self, engine: SimulatedEngine, fault: Fault) -> None:
        engine.kill_all()
        self.disk.lose_power()

    def _stop(self, engine: SimulatedEngine, fault: Fault) -> None:
        engine.stop()

    def _full_disk(self, engine: SimulatedEngine, fault: Fault) -> None:
        self.disk.fails = 0.3 * fault.who
        self.world.at(fault.length_s, self._mend_disk)

    def _mend_disk(self) -> None:
        self.disk.fails = 0.0

    # -- what it came to -----------------------------------------------------------------------

    def _who_waits(self) -> str:
        left = [process for engine in self.engines for process in engine.processes]
        return ", ".join(process.name for process in left if process.tasks) + " are still there"

    def _note_errors(self) -> None:
        for task, error in self.world.errors:
            self.watch.complain(f"{_of(task)} failed: {_in_words(error)}")


def _of(task: Task) -> str:
    return f"{task.process.name}, {task.name},"


def _in_words(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).strip()


def simulate(seed: int, *, traced: bool = False) -> Outcome:
    return Run(draw_plan(seed), traced=traced).go()
