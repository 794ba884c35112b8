"""The master keeps the run's books: it gives the servers their shards, asks them for snapshots, and
commits checkpoints.

A thread of its own beside rank 0's training, so that nobody waits for the disk. A snapshot is asked
for at a version that lies ahead, the same of every shard; in sync that is the same round
everywhere. It is the master who sees that everybody is done, and who ends a run: the last
checkpoint, then the servers may go.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from offbeat.accounts import accounts_to_json
from offbeat.decline import Plateau
from offbeat.errors import CheckpointError, ConnectionClosedError, in_a_line
from offbeat.flat import FlatModel
from offbeat.roles.calls import (
    AskRound,
    AskStatus,
    Call,
    Cover,
    Drain,
    EndRound,
    Fall,
    Finish,
    LeaveOut,
    Load,
    RoundPart,
    Show,
    Status,
    Take,
    Want,
    state_from,
)
from offbeat.roles.falling import Falls
from offbeat.run.checkpoint import (
    Checkpoint,
    list_checkpoints,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    shard_digests,
)
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.run.orders import Standing
from offbeat.run.rundir import RunFolder
from offbeat.shard import ShardState
from offbeat.transport.base import CallEnd, Layout, Message, Network, keep_trying

POLL_S = 0.1
CALL_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
"""How long a server may take to go through its journal."""
CONNECT_TIMEOUT_S = 120.0
LET_GO_TIMEOUT_S = 1.0
"""How long a server that the run needs no more is looked for, to be told so."""
STOP_TIMEOUT_S = 2.0
"""How long a run that is being stopped waits for its workers to end their step."""


class RemoteServer:
    """A server, as the master sees it, or a script: calls over a connection that is made when
    needed. What they mean is said in calls.py."""

    def __init__(self, network: Network, index: int, agreement: Message, layout: Layout) -> None:
        self.index = index
        self._network = network
        self._hello = {"worker": 0, "incarnation": 0, "shard": index, **agreement}
        self._layout = layout
        self._end: CallEnd | None = None
        self.was_reached = False

    def status(self) -> Status:
        return Status.read(self._call(AskStatus())[0])

    def load(self, state: ShardState, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._call(Load(state), timeout_s)

    def want(self, version: int) -> None:
        self._call(Want(version))

    def take(self) -> ShardState:
        return state_from(*self._call(Take()))

    def show(self) -> ShardState:
        return state_from(*self._call(Show()))

    def cover(self, entry: int) -> None:
        self._call(Cover(entry))

    def drain(self) -> None:
        self._call(Drain())

    def leave_out(self, workers: Sequence[int]) -> None:
        self._call(LeaveOut(list(workers)))

    def finish(self, reason: str) -> None:
        self._call(Finish(reason))

    def fall(self, versions: Sequence[int]) -> None:
        self._call(Fall(list(versions)))

    def round(self, wait_s: float) -> RoundPart:
        return RoundPart.read(*self._call(AskRound(wait_s)))

    def end_round(self, number: int, norm: float) -> None:
        self._call(EndRound(number, norm))

    def close(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def _call(
        self, call: Call, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[Message, dict[str, Tensor]]:
        try:
            if self._end is None:
                self._end = self._network.connect_for_calls(
                    self.index, self._hello, self._layout, CALL_TIMEOUT_S
                )
            answer = self._end.call(call.message(), call.tensors(), timeout_s)
        except ConnectionClosedError:
            self.close()
            raise
        self.was_reached = True
        return answer


class Patience:
    """How long to wait for workers that nobody starts again: `start_s` for one to come at first,
    `absent_s` for one to come back when all the others are through. `say` tells the user."""

    def __init__(
        self,
        num_workers: int,
        *,
        start_s: float,
        absent_s: float,
        say: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._ranks = range(num_workers)
        self._start_s = start_s
        self._absent_s = absent_s
        self._say = say
        self._now = now
        self._begun_s = now()
        self._has_looked = False
        self._come: set[int] = set()
        self._finished: set[int] = set()
        self._gone_s: dict[int, float] = {}
        """Since when each of those that came is away."""
        self._late: set[int] = set()

    def begin(self) -> None:
        """The servers are there: from now on workers can come."""
        self._begun_s = self._now()

    def look(self, present: Collection[int], finished: Collection[int]) -> None:
        now_s = self._now()
        self._finished = set(finished)
        here = {*present, *finished, 0}
        if not self._has_looked and not here.issuperset(self._ranks):
            missing = [f"worker {rank}" for rank in self._ranks if rank not in here]
            self._say(f"waiting for {', '.join(missing)}")
        for rank in self._ranks:
            if rank in present or rank in finished:
                if rank in self._gone_s and rank in present:
                    self._say(f"worker {rank} is back")
                elif self._has_looked and rank and rank not in self._come:
                    self._say(f"worker {rank} is here")
                self._come.add(rank)
                self._late.discard(rank)
                self._gone_s.pop(rank, None)
            elif rank in self._come and rank not in self._gone_s:
                self._gone_s[rank] = now_s
                self._say(f"worker {rank} is gone; the others go on")
        self._has_looked = True

    def given_up(self) -> set[int]:
        """Those that did not come in time, or did not come back."""
        now_s = self._now()
        if now_s - self._begun_s >= self._start_s:
            for rank in set(self._ranks) - self._come - self._late:
                self._late.add(rank)
                line = f"worker {rank} did not come within {self._start_s:g} s: going on without it"
                self._say(line)
        gone = {r for r, since_s in self._gone_s.items() if now_s - since_s > self._absent_s}
        return (self._late | gone) - {0}

    def is_done(self) -> bool:
        """Whether everybody is through, but for those who are given up. Rank 0, which is the
        master's own, is never."""
        return 0 in self._finished and (self._finished | self.given_up()).issuperset(self._ranks)


class Master:
    """`run` opens the servers, commits a checkpoint at the start, at every multiple of
    `checkpoint_every` and at the end, and returns what the run came to: finished or interrupted.

    `stop` ends the run early, with a checkpoint; so does the evaluator (judging.py).
    """

    def __init__(
        self,
        job: Job,
        network: Network,
        folder: RunFolder,
        model: FlatModel,
        *,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
        stop: threading.Event,
        watch: Callable[[Sequence[Status]], None] = lambda statuses: None,
        patience: "Patience | None" = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        orders: Standing | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`model` has the initial weights; they are copied here, before anybody trains it. `watch`
        is shown the servers when they are opened, and several times a second from then on. Without
        `patience` every worker is waited for: somebody else starts those again that die. `orders`
        are those of somebody who looks on. `say` shows a person a line; None: nobody looks."""
        self.job = job
        self.log = log
        self._say = say or log.info
        self._cannot_keep = False
        """The last checkpoint could not be written, and a person was told so."""
        self.opened = threading.Event()
        """Every server has its shard, and the first checkpoint is committed."""
        self._folder = folder
        self._initial = [job.initial_state(k, model) for k in range(len(job.slices))]
        self._frozen = model.frozen()
        self._servers = [
            RemoteServer(network, k, job.agreement, job.layout(k)) for k in range(len(job.slices))
        ]
        self._events = events
        self._clock = clock
        self._stop = stop
        self._watch = watch
        self._patience = patience
        self._connect_timeout_s = connect_timeout_s
        self._orders = orders or Standing()
        self._wants_now = False
        """A checkpoint was asked for, and is not there yet."""
        is_locked = job.config.chosen.kind.locked
        self._falls = Falls(folder, 1 if is_locked else job.config.workers)
        self._last_versions: list[int] = []
        self._kept_entries: list[int] = [0 for _ in job.slices]
        """Of the journals, which the newest checkpoint has."""
        self._wanted: int | None = None
        self._ahead = 1

    def run(self) -> str:
        try:
            self._open()
            outcome = self._keep_books()
            while not self._commit_last(outcome):  # its workers do again what it lost
                outcome = self._keep_books()
            self._folder.write_state(outcome, self._newest_name())
            self._tell_covered(self._kept_entries)
            for server in self._servers:
                self._let_go(server, f"the run is {outcome}")
            return outcome
        except Exception as error:
            for server in self._servers:  # nobody is to train on where no books are kept
                self._let_go(server, f"the master failed: {in_a_line(error)}")
            if not (self._stop.is_set() and isinstance(error, ConnectionClosedError)):
                raise
            self.log.warning("stopped without a last checkpoint: %s", error)
            self._folder.write_state("interrupted", self._newest_name())
            return "interrupted"
        finally:
            for server in self._servers:
                server.close()

    # -- the course of a run -------------------------------------------------------------------

    def _open(self) -> None:
        statuses = [self._status_of(server) for server in self._servers]
        if not list_checkpoints(self._folder.checkpoints):
            # workers may be at work already, and servers may die
            snapshots = keep_trying(
                self._first_snapshots, self._connect_timeout_s, self._stop, self._clock
            )
            self._commit_if_new(snapshots if self._may_commit(snapshots) else self._initial)
        else:  # servers that lived on may be ahead of it
            checkpoint = newest_checkpoint(self._folder.checkpoints)
            self._falls.know([checkpoint.falls])
            recut = checkpoint.recut(self.job.slices)
            self._last_versions = [s.version for s in recut]
            self._kept_entries = [s.entry for s in recut]
        if self._patience is not None:
            self._patience.begin()
        self._watch(statuses)
        self._initial = []  # there is a checkpoint from now on
        self.opened.set()

    def _first_snapshots(self) -> list[ShardState]:
        for server in self._servers:
            self._status_of(server)
        return self._snapshots_now()

    def _keep_books(self) -> str:
        """Commit at every multiple of `checkpoint_every` until all are done, or told to stop.

        A shard that is past the version asked for answers with the one it is at. Where the shards
        then disagree they were asked too late: ask further ahead, instead of keeping a mixture.
        """
        while not self._stop.wait(POLL_S):
            statuses = [self._status_of(server) for server in self._servers]
            self._watch(statuses)
            if self._is_done(statuses) or self._folder.enough.exists():
                return "finished"
            try:
                self._tell_falls(statuses)
                self._look_for_snapshots(statuses)
            except ConnectionClosedError:  # the next look at its status brings that server back
                self._wanted = None
        return "interrupted"

    def _is_done(self, statuses: Sequence[Status]) -> bool:
        present = frozenset.union(*(status.present for status in statuses))
        budget = self.job.budget
        reached = [budget is not None and status.version >= budget for status in statuses]
        if any(reached):  # the others follow, unless nobody is left who could push
            return all(reached) or not present
        finished = frozenset.intersection(*(status.finished for status in statuses))
        if self._patience is None:
            gone = self._orders.stopped - present
            self._leave_out(statuses, gone)
            return (finished | gone).issuperset(range(self.job.config.workers))
        self._patience.look(present, finished)
        self._leave_out(statuses, self._patience.given_up())
        return budget is None and self._patience.is_done()

    def _leave_out(self, statuses: Sequence[Status], workers: Collection[int]) -> None:
        """Nobody is to wait for these, as far as they are away."""
        for server, status in zip(self._servers, statuses, strict=True):
            if away := status.awaited.intersection(workers):
                try:
                    server.leave_out(sorted(away))
                except ConnectionClosedError as error:  # the next look brings that server back
                    self.log.warning("server %d: %s", server.index, error)

    def _tell_falls(self, statuses: Sequence[Status]) -> None:
        """Have the learning rate fall, where scores say so, at one version everywhere; not in a run
        that goes on with a schedule of another kind."""
        if not isinstance(self.job.recipe.schedule, Plateau):
            return
        self._falls.know(status.falls for status in statuses)  # they may know of more than we do
        version = self._falls.look(max(status.version for status in statuses))
        if version is not None:
            self._events.record("run", phase="fall", version=version, at_s=self._clock())
            self.log.info("the learning rate falls at version %d", version)
        for server, status in zip(self._servers, statuses, strict=True):
            if len(status.falls) < len(self._falls.versions):
                server.fall(self._falls.versions)

    def _look_for_snapshots(self, statuses: Sequence[Status]) -> None:
        if self._orders.checkpoint.is_set():
            self._orders.checkpoint.clear()
            self._wants_now, self._wanted = True, None
        if self._wanted is None:
            soon = max(status.version for status in statuses) + self._ahead
            self._wanted = soon if self._wants_now else self._next_due(soon)
            if self._wanted is not None:
                for server in self._servers:
                    server.want(self._wanted)
        elif all(status.ready for status in statuses):
            snapshots = [server.take() for server in self._servers]
            self._wanted = None
            if self._may_commit(snapshots):
                self._ahead, self._wants_now = 1, False
                self._try_to_commit(snapshots)
            else:
                self._ahead *= 2

    def _next_due(self, version: int) -> int | None:
        """The first version from this one on at which a checkpoint is due."""
        config = self.job.config
        due = [-(-version // n) * n for n in (config.checkpoint_every, config.eval_every) if n]
        return min(due, default=None)

    def _commit_last(self, outcome: str) -> bool:
        """Keep the shards as they stand in the end. False: a server died at the last moment, and
        the next look at its status brings it back."""
        try:
            if outcome == "interrupted" or self._folder.enough.exists():
                self._drain()
            self._commit_if_new(self._snapshots_now())
        except ConnectionClosedError as error:
            if outcome == "interrupted":
                raise
            self.log.warning("%s; looking for the servers again", error)
            return False
        return True

    def _drain(self) -> None:
        """Have every worker leave after the step that it is at: then all shards have the same
        gradients, in sync whole rounds, and nothing is done that is not kept. Whoever takes too
        long for its step has not done it; a person who stops a run does not wait long."""
        for server in self._servers:
            server.drain()
        began_s, patience_s = self._clock(), self.job.config.worker_timeout
        while self._clock() < began_s + (STOP_TIMEOUT_S if self._stop.is_set() else patience_s):
            statuses = [server.status() for server in self._servers]
            if not any(status.present - status.finished for status in statuses):
                return
            threading.Event().wait(POLL_S / 10)
        self.log.warning("some workers take long for their last step: going without it")

    def _let_go(self, server: RemoteServer, reason: str) -> None:
        """Tell a server that the run is over; also one that was just started again, or those who
        look for it would wait for a shard that nobody gives it any more."""
        if not server.was_reached:
            return  # it may be somebody else's
        try:
            keep_trying(
                lambda: server.finish(reason), LET_GO_TIMEOUT_S, threading.Event(), self._clock
            )
        except ConnectionClosedError as error:
            self.log.info("server %d went by itself: %s", server.index, error)

    # -- servers -------------------------------------------------------------------------------

    def _status_of(self, server: RemoteServer) -> Status:
        """A server's status; one that was started anew gets its shard back first."""

        def ask() -> Status:
            status = server.status()
            if not status.loaded:
                waits_s = LOAD_TIMEOUT_S if self.job.config.is_durable else CALL_TIMEOUT_S
                server.load(self._state_for(server.index), waits_s)
                self._wanted = None
                status = server.status()
            if not status.founded and list_checkpoints(self._folder.checkpoints):
                server.cover(0)  # or whom it has answered would wait for ever
            return status

        return keep_trying(ask, self._connect_timeout_s, self._stop, self._clock)

    def _state_for(self, index: int) -> ShardState:
        """What a server that comes empty is given: its part of the newest checkpoint."""
        if not list_checkpoints(self._folder.checkpoints):
            return self._initial[index]
        checkpoint = newest_checkpoint(self._folder.checkpoints)
        state = self.job.states_after(checkpoint)[index]
        self._falls.know([checkpoint.falls])
        self.log.info("server %d gets version %d back", index, state.version)
        return dataclasses.replace(state, falls=tuple(self._falls.versions))

    def _snapshots_now(self) -> list[ShardState]:
        for server in self._servers:
            server.want(0)
        deadline_s = self._clock() + CALL_TIMEOUT_S
        while not all(server.status().ready for server in self._servers):  # lock-free: in a moment
            if self._clock() > deadline_s:
                raise ConnectionClosedError("a server does not come to take its snapshot")
            threading.Event().wait(POLL_S / 10)
        return [server.take() for server in self._servers]

    # -- checkpoints ---------------------------------------------------------------------------

    def _may_commit(self, snapshots: Sequence[ShardState]) -> bool:
        """Whether these are of one version, where that can be had."""
        agree = len({snapshot.version for snapshot in snapshots}) == 1
        return agree or not self.job.config.chosen.kind.exact

    def _commit_if_new(self, snapshots: Sequence[ShardState]) -> None:
        if [s.version for s in snapshots] != self._last_versions:
            self._commit(snapshots)
        books = [
            {"version": s.version, "accounts": accounts_to_json(s.accounts)} for s in snapshots
        ]
        self._events.record("run", phase="books", shards=books, at_s=self._clock())
        self._events.flush()  # before anything says that the run is over: see write_state

    def _try_to_commit(self, snapshots: Sequence[ShardState]) -> None:
        try:
            self._commit_if_new(snapshots)
        except CheckpointError as error:  # training goes on; the next one may succeed
            self.log.error("%s", error)
            if not self._cannot_keep:
                self._say(f"warning: {error}; training goes on, and the next one is tried")
            self._cannot_keep = True
            return
        if self._cannot_keep:
            self._say(f"checkpoints are kept again, at version {snapshots[0].version}")
        self._cannot_keep = False

    def _commit(self, snapshots: Sequence[ShardState]) -> None:
        for index, snapshot in enumerate(snapshots):
            if not bool(snapshot.tensors["params"].isfinite().all()):
                raise CheckpointError(
                    f"server {index} holds parameters that are not finite at version "
                    f"{snapshot.version}; the checkpoints before it are kept"
                )
        checkpoint = Checkpoint(
            version=snapshots[0].version,
            manifest=self.job.manifest,
            shards=tuple(snapshots),
            frozen=self._frozen,
            plan=self.job.plan,
            optimizer=self.job.optimizer.classes,
        )
        path = save_checkpoint(self._folder.checkpoints, checkpoint)
        digests = shard_digests(path)
        self._prune()
        self._last_versions = [s.version for s in snapshots]
        shards = list(zip(self._last_versions, digests, strict=True))
        more = {"shards": shards, "at_s": self._clock()}
        self._events.record("run", phase="checkpoint", version=checkpoint.version, **more)
        self.log.info("committed %s", path.name)
        entries = [s.entry for s in snapshots]
        # should the newest be damaged, the one before it and the journal have everything
        self._tell_covered(self._kept_entries if self.job.config.keep > 1 else entries)
        self._kept_entries = entries

    def _prune(self) -> None:
        try:
            prune_checkpoints(self._folder.checkpoints, self.job.config.keep)
        except CheckpointError as error:  # it takes room, and does no harm
            self.log.warning("%s", error)

    def _tell_covered(self, entries: Sequence[int]) -> None:
        """What servers need no longer of their journals."""
        if not self.job.config.is_durable:
            return
        for server, entry in zip(self._servers, entries, strict=True):
            try:
                server.cover(entry)
            except ConnectionClosedError as error:  # the next look brings that server back
                self.log.info("server %d: %s", server.index, error)

    def _newest_name(self) -> str | None:
        found = list_checkpoints(self._folder.checkpoints)
        return found[-1].name if found else None
