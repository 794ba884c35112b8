"""Who of a run's roles died, is silent or failed, and what is to be done about it.

Pure: there is no process, thread or clock here. It is told what happened, and when, and answers
with decisions, which the engine that has the processes carries out; tests make up both. Used by the
engines whose roles are processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.run.rundir import in_words, role_name

STOP_TIMEOUT_S = 3.5
"""How long a run that is being stopped may take before what is left of it is killed."""
KILL_TIMEOUT_S = 10.0
"""How long what was killed may take to be gone."""


@dataclass(eq=False)
class Member:
    """One process of the run, whoever it is at the moment: a role, or a crew of workers."""

    role: str
    index: int
    generation: int = 0
    """How often it was started before: a server's epoch, a worker's incarnation."""
    num_restarts: int = 0
    """In this run of the engine."""
    has_begun: bool = False
    is_there: bool = False
    is_silent: bool = False
    heard_s: float = 0.0
    ranks: tuple[int, ...] = ()
    """The workers that are in its process: itself, or its crew."""
    falls_with_others: bool = False
    """It cannot go on without any other one of this kind: when one dies all of them are started
    again."""

    @property
    def name(self) -> str:
        return role_name(self.role, self.index)

    @property
    def who(self) -> str:
        """For a person to read: it, and its crew where it has one."""
        others = self.ranks[1:]
        if not others:
            return in_words(self.name)
        names = [in_words(name) for name in (self.name, *(f"worker-{rank}" for rank in others))]
        return f"the process of {', '.join(names[:-1])} and {names[-1]}"

    @property
    def is_needed(self) -> bool:
        """Whether a run comes to nothing without it; nobody depends on the evaluator."""
        return self.role != "evaluator"


@dataclass(frozen=True)
class StartAgain:
    """It died, and is to have a successor, of the generation that it has now. So are `others`, who
    cannot go on without it, and are to be killed, where they are still there."""

    reason: str
    others: tuple[Member, ...] = ()


@dataclass(frozen=True)
class GiveUp:
    """It died once too often. If it is needed the run is to be stopped."""

    reason: str


@dataclass(frozen=True)
class Blame:
    """It said what went wrong: trying again would not help. If it is needed the run is to be
    stopped."""


@dataclass(frozen=True)
class Leave:
    """It ended when it should, or with a run that ends anyway: there is nothing to do."""


Decision = StartAgain | GiveUp | Blame | Leave


@dataclass(frozen=True)
class Ending:
    """How a run is stopped: these are told to end in order, those are killed."""

    told: Sequence[Member] = ()
    killed: Sequence[Member] = ()


class Supervisor:
    """Of one run. `max_restarts`: of each member; `silence_s`: how long one may say nothing."""

    def __init__(self, members: Sequence[Member], *, max_restarts: int, silence_s: float) -> None:
        self.members = list(members)
        self.max_restarts = max_restarts
        self.silence_s = silence_s
        self._deadline_s: float | None = None

    @property
    def is_stopping(self) -> bool:
        return self._deadline_s is not None

    def find(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    def incarnations(self) -> tuple[int, ...]:
        """How often each worker was started before, by its rank."""
        found = {rank: member.generation for member in self.members for rank in member.ranks}
        return tuple(found[rank] for rank in sorted(found))

    def present(self) -> list[Member]:
        return [member for member in self.members if member.is_there]

    # -- what happened -------------------------------------------------------------------------

    def started(self, member: Member, now_s: float) -> None:
        member.has_begun = member.is_there = True
        member.is_silent = False
        member.heard_s = now_s

    def heard(self, member: Member, now_s: float) -> None:
        member.heard_s = now_s

    def ended(
        self, member: Member, how: str | None, *, has_failed: bool = False, is_over: bool = False
    ) -> Decision:
        """`how` it died; None: it left in order. `has_failed`: it said what went wrong before.
        `is_over`: the last checkpoint is committed, and the evaluator alone has work to do."""
        member.is_there = False
        if has_failed:  # the books alone matter to a run that is being stopped
            is_late = self.is_stopping and member.role != "master"
            return Leave() if is_late else Blame()
        if how is None or self.is_stopping or (is_over and member.is_needed):
            return Leave()
        if member.is_silent:
            how = f"was silent for {self.silence_s:g} s"
        if member.num_restarts >= self.max_restarts:
            return GiveUp(how)
        others = self._fellows(member)
        for each in (member, *others):
            each.num_restarts += 1
            each.generation += 1
            each.is_there = False
        return StartAgain(how, others)

    def _fellows(self, member: Member) -> tuple[Member, ...]:
        """Who falls when it does."""
        if not member.falls_with_others:
            return ()
        return tuple(m for m in self.members if m.falls_with_others and m is not member)

    def stop(self, now_s: float, *, has_begun: bool) -> Ending:
        """The run is to be stopped. The master commits a checkpoint and lets the servers go, who
        tell the workers that the run is over. Without a master there is nothing to wait for, and
        before the first step (`has_begun`) there is nothing to keep."""
        if self.is_stopping:
            return Ending()
        self._deadline_s = now_s + (STOP_TIMEOUT_S if has_begun else KILL_TIMEOUT_S)
        if not has_begun:
            return Ending(killed=self.present())
        masters = [member for member in self.find("master") if member.is_there]
        return Ending(told=masters or self.present())

    # -- what is to be done --------------------------------------------------------------------

    def due(self, *, has_begun: bool) -> list[Member]:
        """Who is to be started for the first time: the evaluator once there is something to score
        (`has_begun`), since until then the others have the cores to themselves."""
        return [
            member
            for member in self.members
            if not member.has_begun and (member.is_needed or (has_begun and not self.is_stopping))
        ]

    def silent(self, now_s: float) -> list[Member]:
        """Who reports nothing any more, and so is hung, whatever the reason: to be killed, so that
        another one can take its place. Each is named once."""
        found = [
            member
            for member in self.present()
            if now_s - member.heard_s > self.silence_s and not member.is_silent
        ]
        for member in found:
            member.is_silent = True
        return found

    def overdue(self, now_s: float) -> list[Member]:
        """Who is still there although the run was to be stopped: to be killed."""
        if self._deadline_s is None or now_s <= self._deadline_s:
            return []
        self._deadline_s = now_s + KILL_TIMEOUT_S
        return self.present()

    def left_behind(self, *, is_over: bool) -> list[Member]:
        """Whom to tell to end when the master has left for good: a server that died in the last
        moment has told nobody. Where there is a last checkpoint (`is_over`) the evaluator scores
        it first."""
        return [member for member in self.present() if member.is_needed or not is_over]
