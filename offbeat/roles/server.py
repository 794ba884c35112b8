"""A parameter server: it holds one shard, and does to it what its discipline says.

One thread takes whoever comes in. A worker gets a session (sessions.py, where its gradients go);
the master and evaluators ask for this and that, which is answered here (calls.py says what there
is). A server begins empty, and takes workers in as soon as the master has given it its shard's
state. Started by an engine:

    server = Server(shard, Ledger(Sync(range(2))), listener, index=0, ...)
    server.start(); server.over.wait(); server.close()
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from offbeat.errors import ConnectionClosedError, in_a_line
from offbeat.ledger import Ledger
from offbeat.roles.acceptor import Acceptor
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
    Newest,
    Show,
    Status,
    Take,
    Want,
    describe_state,
    read_call,
)
from offbeat.roles.journalling import Journalling, again
from offbeat.roles.session import POLL_S
from offbeat.roles.sessions import WORKER_TIMEOUT_S, Sessions
from offbeat.run.events import EventLog
from offbeat.run.job import disagreement
from offbeat.run.journal import Journal
from offbeat.shard import Shard, ShardState
from offbeat.transport.base import Listener, Message, ServerEnd
from offbeat.transport.codec import Codec, decoding

DISK_TIMEOUT_S = 30.0
"""How long the master waits until what a snapshot has is on the server's disk."""
MAX_NUMBERS = 1 << 32
"""Ranks and incarnations that a header has room for."""
Answer = tuple[Message, Mapping[str, Tensor]]
MakeJournal = Callable[[Callable[[int], None], Callable[[BaseException], None]], Journal]
"""Is given whom to tell how far the disk is, and whom that it has failed."""


class Server:
    """`ledger` and `shard` belong to the server from here on."""

    def __init__(
        self,
        shard: Shard,
        ledger: Ledger,
        listener: Listener | None,
        *,
        index: int,
        agreement: Message,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
        worker_timeout_s: float = WORKER_TIMEOUT_S,
        make_codec: Callable[[], Codec | None] = lambda: None,
        make_reply_codec: Callable[[], Codec | None] = lambda: None,
        make_journal: MakeJournal | None = None,
    ) -> None:
        """`agreement`: what whoever comes has to agree with. `make_journal`: for a ledger that
        promises; what it makes belongs to the server."""
        self.shard = shard
        self.ledger = ledger
        self.index = index
        self.failure: BaseException | None = None
        self.over = threading.Event()
        """The master said that the run is over, or this server failed."""
        self.reason = "the server was stopped"
        self._journal = make_journal(self._durable, self._fail) if make_journal else None
        self.sessions = Sessions(
            shard,
            ledger,
            index=index,
            events=events,
            log=log,
            clock=clock,
            worker_timeout_s=worker_timeout_s,
            journalling=None if self._journal is None else Journalling(self._journal),
        )
        self._agreement = agreement
        self._make_codec = make_codec
        self._make_reply_codec = make_reply_codec
        self._events = events
        self._clock = clock
        self._log = log
        self._ends_run = True
        self._taken: ShardState | None = None
        """What the master took last: this server's part of the newest checkpoint."""
        self._acceptor = Acceptor(listener, self.serve, f"ps-{index}", log) if listener else None

    # -- for the engine ------------------------------------------------------------------------

    def start(self) -> None:
        """Take in whoever comes to the listener; without one, somebody else calls `serve`."""
        if self._acceptor is not None:
            self._acceptor.start()

    def close(self, *, over: bool = True) -> None:
        """Take nobody in, and end all sessions. `over`: so is the run; otherwise the workers look
        for this server again."""
        self._stop(over=over)
        self.join()

    def join(self) -> None:
        """Wait until every session has ended, which `close` or their workers see to."""
        if self._acceptor is not None:
            self._acceptor.join()
        self.sessions.loop.join()
        if self._journal is not None:
            self._journal.close()

    @property
    def is_stopping(self) -> bool:
        return self.ledger.is_closing

    def _stop(self, *, over: bool = True) -> None:
        """Have every thread of this server come to its end, and tell the workers why."""
        self._ends_run = over
        self.ledger.is_closing = True
        if self._acceptor is not None:
            self._acceptor.close()
        self.sessions.close(self.reason, over=over)

    def _durable(self, entry: int) -> None:
        self.sessions.on_durable(entry)

    def _fail(self, error: BaseException) -> None:
        self._log.error("failed", exc_info=error)
        self.failure = self.failure or error
        self.reason = f"server {self.index} failed: {in_a_line(error)}"
        self._stop()
        self.over.set()

    # -- connections ---------------------------------------------------------------------------

    def serve(self, end: ServerEnd, hello: Message) -> None:
        """Deal with somebody who said hello, from there to the leaving: a thread for each."""
        try:
            if not self._is_welcome(end, hello):
                return
            with self.sessions.in_stream():
                if hello.get("calls"):
                    while not self.is_stopping:
                        end.answer_calls(self.answer, POLL_S)
                else:
                    codec, replies = self._make_codec(), self._make_reply_codec()
                    end = decoding(end, codec, self._log.warning, replies)
                    last = dict(hello["last_round"]) if "last_round" in hello else None
                    self.sessions.serve(end, hello["worker"], hello["incarnation"], last)
            end.close(self.reason, over=self.is_stopping and self._ends_run)
        except ConnectionClosedError as error:
            end.close(str(error), over=error.over)
        except BaseException as error:  # a user's sys.exit() in a rule is no way to end either
            self._fail(error)
            end.close(self.reason, over=True)

    def _is_welcome(self, end: ServerEnd, hello: Message) -> bool:
        """Whether the two sides mean the same; if not, the other one is told why and sent away."""
        match hello:
            case {"fingerprint": str(theirs), "worker": int(w), "incarnation": int(i)} if (
                0 <= w < MAX_NUMBERS
                and 0 <= i < MAX_NUMBERS
                and _are_pairs(hello.get("last_round", []))
            ):
                shards = self._agreement.get("num_shards")
                same_shards = hello.get("num_shards", shards) == shards
                if hello.get("shard", self.index) != self.index:
                    reason = f"this is server {self.index}, not {hello['shard']}"
                elif theirs == self._agreement["fingerprint"] and same_shards:
                    return True
                else:  # told as the other side sees it
                    difference = disagreement(self._agreement, hello)
                    reason = f"server {self.index} has another run: {difference}"
            case _:
                reason = "that is no hello"
        end.refuse(reason)
        who = f"worker {hello['worker']}" if isinstance(hello.get("worker"), int) else "somebody"
        self._log.warning("refused %s: %.500s", who, reason)
        return False

    # -- for the master, evaluators and scripts ------------------------------------------------

    def answer(self, message: Message, tensors: Mapping[str, Tensor]) -> Answer:
        return self.answer_call(read_call(message, tensors))

    def answer_call(self, call: Call) -> Answer:
        """What a call comes to."""
        match call:
            case AskStatus():
                return self._status().message(), {}
            case Load(state):
                self.load(state)
            case Want(version):
                self.sessions.tell(lambda: self.ledger.want(version, self.shard.version))
            case Take() if (taken := self.ledger.take()) is not None:
                if not self.sessions.wait_for_disk(taken.entry, DISK_TIMEOUT_S):
                    raise ConnectionClosedError("the journal is behind the snapshot")
                self._taken = taken
                return describe_state(taken), taken.tensors
            case Cover(entry):
                self.sessions.cover(entry)
            case Drain():
                self.ledger.is_draining = True
            case LeaveOut(workers):
                self.sessions.tell(lambda: self.ledger.leave_out(workers))
            case Fall(versions):
                self._fall(versions)
            case AskRound(wait_s):
                part = self.sessions.rounds.ask(min(POLL_S, wait_s))  # so that NaN is no time
                return part.message(), part.tensors()
            case EndRound(number, norm):
                self.sessions.end_round(number, norm)
            case Newest(after):
                return self._newest(after)
            case Show() if self.sessions.loaded.is_set():
                shown = self.sessions.show()
                return describe_state(shown), shown.tensors
            case Finish(reason):
                self.reason = reason
                self.over.set()
            case _:
                raise ConnectionClosedError(f"the server cannot answer this now: {call.ask}")
        return {}, {}

    def load(self, state: ShardState) -> None:
        """Go on from `state`. Workers that were through come again, and say so."""
        if not self.sessions.load(state):
            return
        epoch = self.ledger.epoch
        self._events.record(
            "run", phase="load", shard=self.index, epoch=epoch, version=state.version
        )
        self._tell_recovered(state.version)
        self._log.info("serving from version %d, epoch %d", self.shard.version, epoch)

    def _tell_recovered(self, version: int) -> None:
        """What was in the journal."""
        found = self.sessions.recovered
        if found is None or not found.records:
            return
        for record in found.records:
            self._events.record("push", **again(record, self.index))
        self._log.warning(
            "%d updates beyond the checkpoint of version %d were in the journal: made again",
            found.num_updates,
            version,
        )
        if found.complaint:
            self._log.warning("%s: the options were others", found.complaint)

    def _fall(self, versions: Sequence[int]) -> None:
        shard, begun = self.shard, self.shard.version_begun  # what has begun has its rate
        self._events.record(
            "run",
            phase="fall",
            shard=self.index,
            version=max(versions[-1], begun),
            at_s=self._clock(),
        )
        if versions[-1] < begun:
            late = "the learning rate was to fall at version %d, and does so at %d"
            self._log.warning(late, versions[-1], begun)
        shard.falls[:] = versions

    def _status(self) -> Status:
        ledger = self.ledger
        return Status(
            version=self.shard.version,
            epoch=ledger.epoch,
            loaded=self.sessions.loaded.is_set(),
            finished=frozenset(ledger.finished),
            present=frozenset(ledger.members),
            awaited=ledger.awaited,
            ready=ledger.is_request_met,
            staleness=list(ledger.recent_staleness),
            lr=self.shard.lr,
            falls=list(self.shard.falls),
            founded=ledger.is_founded or not ledger.promises,
        )

    def _newest(self, after: int) -> Answer:
        """For an evaluator: what the newest checkpoint has of this shard to score, where it is
        newer than `after`, and whether there will be no other."""
        taken = self._taken
        over = self.over.is_set()
        if taken is None or taken.version <= after:
            return {"over": over}, {}
        values = taken.tensors.get("ema", taken.tensors["params"])
        buffers = {k: v for k, v in taken.tensors.items() if k in ("floats", "ints")}
        return {"over": over, "version": taken.version}, {"values": values, **buffers}


def _are_pairs(said: object) -> bool:
    """Of whole numbers."""
    return isinstance(said, list) and all(
        isinstance(pair, list) and [type(number) for number in pair] == [int, int] for pair in said
    )
