"""Who starts the roles of a simulated run as processes, and starts those again that die.

What to do is decided by the program's own supervisor, as in engines/supervised.py. One engine is
one life of a run: when it is told to stop, or all processes die at once, the next one goes on from
the newest checkpoint, as `offbeat train --resume` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.engines.supervised import _members_of
from offbeat.engines.supervisor import Blame, GiveUp, Member, StartAgain, Supervisor
from offbeat.roles.context import Context
from offbeat.roles.run import Role, make_role
from offbeat.run.rundir import RunFolder
from simulated.disk import Place
from simulated.network import SimulatedListener, SimulatedNetwork, Wires
from simulated.program import SILENT_S, CountingJob, Silence, Summaries
from simulated.tasks import Event, Process, World

LOOK_S = 0.25
START_S = (0.01, 0.1)
"""What it takes to start a process."""
NOTICE_S = (0.0, 0.03)
"""And to notice that it has ended."""


@dataclass
class Running:
    """Who has a member's role now."""

    stop: Event
    process: Process | None = None
    failure: BaseException | None = None
    has_left: bool = False
    is_starting: bool = False


class SimulatedEngine:
    def __init__(
        self,
        world: World,
        wires: Wires,
        job: CountingJob,
        folder: Place,
        incarnation: int,
        *,
        made: Callable[[Role, str, int, Process], None],
        ended: Callable[["SimulatedEngine"], None],
        records: Callable[[Process], Silence],
    ) -> None:
        """`made` is shown every role before it runs; `ended` is told when all have ended."""
        self.world = world
        self.wires = wires
        self.job = job
        self.folder: Any = RunFolder(folder)  # type: ignore[arg-type]
        self.failures: list[BaseException] = []
        self.processes: list[Process] = []
        """All that ever were."""
        self.is_dead = False
        """It was killed with everybody."""
        self._made = made
        self._end = ended
        self._records = records
        self._supervisor = Supervisor(
            _members_of(job, incarnation), max_restarts=job.config.max_restarts, silence_s=SILENT_S
        )
        self._running = {member: Running(Event(world)) for member in self._supervisor.members}
        self._start_due()
        world.at(LOOK_S, self._look)

    @property
    def is_over(self) -> bool:
        return self.is_dead or not any(
            running.process is not None or running.is_starting for running in self._running.values()
        )

    @property
    def is_finished(self) -> bool:
        """Its last checkpoint is committed."""
        return bool(self.folder.state.exists())

    def members(self, role: str) -> list[Member]:
        return [m for m in self._supervisor.members if m.role == role]

    def process_of(self, member: Member) -> Process | None:
        return self._running[member].process

    def present(self) -> list[Process]:
        found = [running.process for running in self._running.values()]
        return [process for process in found if process is not None]

    # -- what befalls it -----------------------------------------------------------------------

    def stop(self) -> None:
        """As by Ctrl-C."""
        if self.is_over:
            return
        self.world.tell("told to stop")
        ending = self._supervisor.stop(self.world.now_s, has_begun=True)
        for member in ending.told:
            self._tell_to_stop(member)

    def kill_all(self) -> None:
        """With the engine itself."""
        self.is_dead = True
        for process in self.processes:
            process.kill()
        self.world.at(0.0, lambda: self._end(self))

    def replace(self, member: Member) -> None:
        """It is taken for dead, and is not: another one is started beside it."""
        running = self._running[member]
        if running.process is None or self._supervisor.is_stopping:
            return
        self.world.tell(f"{member.name} is taken for dead")
        running.process = None
        self._ended(member, "is out of reach", None)

    # -- the course of a run -------------------------------------------------------------------

    def _look(self) -> None:
        if self.is_over:
            return
        now_s = self.world.now_s
        for member, running in self._running.items():
            if running.process is not None and not running.process.is_paused:
                self._supervisor.heard(member, now_s)
        for member in [*self._supervisor.silent(now_s), *self._supervisor.overdue(now_s)]:
            if (process := self._running[member].process) is not None:
                self.world.tell(f"{member.name} is killed")
                process.kill()
        self.world.at(LOOK_S, self._look)

    def _start_due(self) -> None:
        for member in self._supervisor.due(has_begun=False):
            self._start(member)

    def _start(self, member: Member) -> None:
        self._supervisor.started(member, self.world.now_s)
        running = self._running[member] = Running(Event(self.world), is_starting=True)
        delay_s = self.world.draw.uniform(*START_S)
        self.world.at(delay_s, lambda: self._spawn(member, running))

    def _spawn(self, member: Member, running: Running) -> None:
        if self.is_dead:
            return
        world = self.world
        process = world.process(member.name)
        world.tell(f"{member.name} starts, generation {member.generation}")
        self.processes.append(process)
        running.process, running.is_starting = process, False
        process.at_death.append(lambda: self._died(member, running, process))
        process.spawn(lambda: self._run(member, running, process, member.generation))

    def _run(self, member: Member, running: Running, process: Process, generation: int) -> None:
        try:
            is_server = member.role == "ps"
            listener = SimulatedListener(self.wires, process, member.index) if is_server else None
            context = Context(
                job=self.job,
                records=self._records(process),
                clock=self.world.clock,
                stop=running.stop,  # type: ignore[arg-type]
                network=None if is_server else SimulatedNetwork(self.wires, process),
                folder=self.folder,
                generation=generation,
                listener=listener,
                owns_process=False,
                summaries=Summaries(),  # type: ignore[arg-type]
                begins_at_once=True,
            )
            role = make_role(context, member.role, member.index)
            self._made(role, member.role, member.index, process)
            role.run()
        except Exception as error:
            if process.is_dead:  # of which this is an echo
                return
            running.failure = error
        running.has_left = running.failure is None
        self.world.at(0.0, process.kill)  # its other threads end with it

    def _died(self, member: Member, running: Running, process: Process) -> None:
        self.wires.died(process)
        self.world.tell(f"{member.name} is gone")
        if self.is_dead or self._running[member].process is not process:
            return
        how = None if running.has_left else "was killed"
        delay_s = self.world.draw.uniform(*NOTICE_S)
        running.is_starting, running.process = True, None
        self.world.at(delay_s, lambda: self._ended(member, how, running.failure))

    def _ended(self, member: Member, how: str | None, failure: BaseException | None) -> None:
        if self.is_dead:
            return
        self._running[member].is_starting = False
        supervisor = self._supervisor
        committed = self.is_finished
        decision = supervisor.ended(member, how, has_failed=failure is not None, is_over=committed)
        match decision:
            case StartAgain():
                self._start(member)
            case GiveUp(reason):
                raise AssertionError(f"{member.name} {reason} once too often")
            case Blame():
                assert failure is not None
                self.failures.append(failure)
                self.stop()
        if member.role == "master" and (committed or supervisor.is_stopping):
            for other in supervisor.left_behind(is_over=committed):
                self._tell_to_stop(other)
        if self.is_over:
            self._end(self)

    def _tell_to_stop(self, member: Member) -> None:
        self._running[member].stop.set()
