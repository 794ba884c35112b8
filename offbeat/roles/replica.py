"""What each worker has where there are no servers: the whole of what is trained, and the books.

All workers make the same updates of it, so that all replicas are the same. The master, which is in
rank 0's process, takes rank 0's for the only server there is, and asks it as it asks servers
(calls.py). So checkpoints, the end of a run and whoever looks on need not know of it. Made by
roles/peers.py:

    network.replica = replica = Replica(shard, num_workers=2, incarnation=0, ...)
    replica.load(state)
    replica.end_round(gradient, applied=[0, 1], rejected=[])     # by its worker's thread
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from offbeat.accounts import APPLIED, REJECTED, AccountBook, copied
from offbeat.errors import ConnectionClosedError
from offbeat.pushes import SnapshotRequest
from offbeat.roles.calls import (
    AskStatus,
    Call,
    Drain,
    Fall,
    Finish,
    Load,
    Status,
    Take,
    Want,
    describe_state,
    read_call,
)
from offbeat.rules import Gradient
from offbeat.run.events import EventLog
from offbeat.shard import Shard, ShardState, Updater
from offbeat.transport.base import CallEnd, Layout, Message, Network, WorkerEnd

Answer = tuple[Message, dict[str, Tensor]]


class Replica:
    """`shard` belongs to it from here on. One thread ends rounds; another one, the master's,
    asks."""

    def __init__(
        self,
        shard: Shard,
        *,
        num_workers: int,
        incarnation: int,
        events: EventLog,
        clock: Callable[[], float],
    ) -> None:
        self.shard = shard
        self.loaded = threading.Event()
        """There is a state to begin with."""
        self.over = threading.Event()
        """The master said that the run is."""
        self.reason = "the run is over"
        self.state: ShardState | None = None
        """What it began with, until everybody has it."""
        self.is_draining = False
        """Workers are to take no further step."""
        self.wanted_falls: Sequence[int] = ()
        """From which versions on the learning rate is to be lower; the shard has those that all
        workers know of."""
        self._updater: Updater | None = None
        self._ranks = frozenset(range(num_workers))
        self._present: frozenset[int] = frozenset()
        self._finished: frozenset[int] = frozenset()
        self._incarnation = incarnation
        self._book = AccountBook()
        self._request: SnapshotRequest | None = None
        self._events = events
        self._clock = clock
        self._lock = threading.Lock()
        """Held while a round goes in, and while the state is copied."""

    # -- for its worker ------------------------------------------------------------------------

    def load(self, state: ShardState) -> None:
        """Go on from `state`."""
        with self._lock:
            if self.loaded.is_set():
                return
            self.shard.load(state)
            self._updater = self.shard.make_updater()
            self._book.load(state.accounts)
            self.wanted_falls = list(state.falls)
            self.state = state
            self.loaded.set()

    def begin(self) -> None:
        """All workers have the same state."""
        self.state = None
        self._present = self._ranks

    def last_step(self, rank: int) -> int:
        """The last step of a worker that is in."""
        account = self._book.accounts.get(rank)
        return 0 if account is None else account.sequence

    def end_round(
        self, gradient: Gradient | None, applied: Iterable[int], rejected: Iterable[int]
    ) -> Updater:
        """Make an update out of what all workers together have, if anything, and write down whose
        gradients are in, and whose were unusable. Returns what tells more of it."""
        assert self._updater is not None, "it is loaded"
        with self._lock:
            if gradient is not None:
                self._updater.apply([gradient])
            for outcome, ranks in ((APPLIED, applied), (REJECTED, rejected)):
                for rank in ranks:
                    sequence = self.last_step(rank) + 1
                    self._book.settle(rank, self._incarnation, sequence, outcome)
            self._look_at_request()
        return self._updater

    def fall(self, version: int) -> None:
        """From this version on the learning rate is lower: every worker's, and so this one's."""
        self.shard.falls.append(version)

    def finish(self) -> None:
        """All workers have done all of their steps."""
        self._finished = self._ranks

    def leave(self) -> None:
        """No round will go in any more."""
        self._present = frozenset()

    # -- for the master ------------------------------------------------------------------------

    def answer(self, call: Call) -> Answer:
        """What a call comes to."""
        match call:
            case AskStatus():
                return self._status().message(), {}
            case Load(state):
                self.load(state)
                self._events.record(
                    "run", phase="load", shard=0, epoch=self._incarnation, version=state.version
                )
            case Want(version):
                with self._lock:
                    self._request = SnapshotRequest(version)
                    self._look_at_request()
            case Take() if (request := self._request) is not None and request.snapshot is not None:
                self._request = None
                return describe_state(request.snapshot), request.snapshot.tensors
            case Drain():
                self.is_draining = True
            case Fall(versions):
                self.wanted_falls = versions
            case Finish(reason):
                self.reason = reason
                self.over.set()
            case _:
                raise ConnectionClosedError(f"worker 0 cannot answer this now: {call.ask}")
        return {}, {}

    def _status(self) -> Status:
        shard, request = self.shard, self._request
        return Status(
            version=shard.version,
            epoch=self._incarnation,
            loaded=self.loaded.is_set(),
            finished=self._finished,
            present=self._present,
            awaited=frozenset(),
            ready=request is not None and request.snapshot is not None,
            staleness=[0] if shard.version else [],
            lr=shard.lr,
            falls=list(shard.falls),
        )

    def _look_at_request(self) -> None:
        """Keep a copy of the state, where it is that of the version that is wanted."""
        request = self._request
        if request is None or request.snapshot is not None:
            return
        if self.shard.version >= request.at_version:
            for updater in self.shard.updaters:  # the master's thread has another stream
                updater.mark.wait()
            request.snapshot = self.shard.state(copied(self._book.accounts))


class PeerNetwork(Network):
    """In place of servers: where all workers meet, and the replica that the master, in the same
    process, takes for the only one."""

    def __init__(self, meeting: str) -> None:
        """`meeting`: as transport/group.py has it; another one each time that they are started."""
        self.meeting = meeting
        self.replica: Replica | None = None
        """That of the worker in this process."""

    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> WorkerEnd:
        raise ConnectionClosedError("there are no servers", refused=True)

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> CallEnd:
        if self.replica is None:
            raise ConnectionClosedError("worker 0 is not there yet")
        return _Calls(self.replica)


class _Calls(CallEnd):
    """The master's, of the replica beside it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def call(self, message: Message, tensors: Mapping[str, Tensor], timeout_s: float) -> Answer:
        return self._replica.answer(read_call(message, tensors))

    def close(self) -> None:
        """There is nothing to close."""
