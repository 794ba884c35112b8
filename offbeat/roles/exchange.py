"""A worker's exchange with all of its servers: a link to each, and what to do when one breaks.

    join -> [ fill the gradient slots -> push -> await all ]* -> finish -> (go back, or the end)

Pushing waits for nobody; awaiting ends when every shard has answered, and then its parameters are
in the landing. A server that goes away is looked for again, for a while: it may have been started
anew, or only the connection broke. Nothing is known here of batches, losses and devices. A worker
(roles/worker.py) has one:

    with Exchange(job, rank, towers, network, ...) as exchange:
        step = exchange.join()
        exchange.push(step + 1, present, exchange.versions)     # after filling its gradient_slots
        outcome = exchange.await_all()
        step = exchange.finish(step + 1)     # raises ConnectionClosedError when the run is over
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from offbeat.accounts import ACCEPTED, APPLIED, DROPPED, LOST, REJECTED
from offbeat.errors import ConnectionClosedError
from offbeat.roles.coding import Codecs
from offbeat.roles.elsewhere import Elsewhere
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.transport.base import (
    Network,
    PushHeader,
    ReplyHeader,
    Result,
    Slot,
    WelcomeHeader,
    WorkerEnd,
    keep_trying,
)
from offbeat.transport.codec import encoding
from offbeat.transport.traffic import Traffic

POLL_S = 0.2
"""How often a worker that waits for a reply looks whether the run is being stopped."""
CONNECT_TIMEOUT_S = 120.0
"""How long a server may take to come, or to come back."""


class Landing(Protocol):
    """Where the servers' parameters are to arrive: a worker's towers."""

    landing: Tensor
    """The whole flat vector, where slots are: in the CPU's memory, or on a GPU."""
    gradient: Tensor | None
    """The whole flat gradient of the last step, where slots are; None: it is elsewhere, or in the
    slots themselves."""

    def adopt(self, landing: Tensor) -> None:
        """From now on they arrive there."""

    def forget(self) -> None:
        """The memory of a link is about to go away: let go of all that links have."""


class Exchange:
    """Owns the links. One thread uses it; another one, of its own, tells the servers that the
    worker is alive."""

    def __init__(
        self,
        job: Job,
        rank: int,
        towers: Landing,
        network: Network,
        *,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
        stop: threading.Event,
        incarnation: int = 0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.versions: Sequence[int] = [0 for _ in job.slices]
        """The newest version of each shard that the worker was shown. Never changed in place."""
        self._job = job
        self._rank = rank
        self._towers = towers
        self._network = network
        self._events = events
        self._log = log
        self._clock = clock
        self._stop = stop
        self._incarnation = incarnation
        self._connect_timeout_s = connect_timeout_s
        self.rows = [job.layout(shard).rows for shard in range(len(job.slices))]
        """Where sparse tensors lie in each slice, if any do."""
        self.codecs = Codecs(job)
        self.traffic = Traffic()
        self._links: list[WorkerEnd] = []
        self._pushed: list[PushHeader] = []
        """What went to each shard last."""
        self._computed_on: list[tuple[int, int]] = []
        """Of each shard the epoch and the version that this was computed on."""
        self._replies: list[ReplyHeader] = []
        """What came from each shard last: a reply, or what a welcome stands for."""
        self._answered: set[int] = set()
        """Shards that have said what became of the last push."""
        self._lost: dict[int, WorkerEnd] = {}
        """Shards whose server was started anew and lacks it, and the links that it went over."""
        self._before = [0 for _ in job.slices]
        """The version that each shard's server had shown before what is under way, in its life."""
        self._elsewhere = Elsewhere(job, network, self._keep_trying)
        self._reached: list[int] = []
        """The last step that each shard has."""
        self.batches = 0
        """How many the worker had gone through with the step that `join` returned."""
        self.fastest = 0.0
        """The speed of the fastest worker, as the first server said last; 0: it did not."""
        self._left = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)

    def __enter__(self) -> Self:
        self._beats.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        self._beats.join()
        self._towers.forget()
        for link in self._links:
            link.close()

    def _beat(self) -> None:
        """Tell every server that this worker is alive: a thread of its own, since a step may take
        as long as it likes."""
        while not self._left.wait(min(1.0, self._job.config.worker_timeout / 5)):
            for link in list(self._links):
                link.beat()

    # -- coming in -----------------------------------------------------------------------------

    @property
    def has_joined(self) -> bool:
        """Whether every server has taken this worker in."""
        return len(self._replies) == len(self._job.slices)

    def join(self) -> int:
        """Come in everywhere; returns the last step that any shard knows of. One that had reached
        some shards only when a former incarnation died is not done again: those have it, and the
        others count it as lost."""
        self._links.append(self._join(0))
        first = self._elsewhere.last_round(0) if self._job.joins_norms else {}
        for shard in range(1, len(self._job.slices)):
            self._links.append(self._join(shard, **first))
        self._replies = [_reply_of(link.welcome) for link in self._links]
        self._reached = [reply.sequence for reply in self._replies]
        self.codecs.are_used = any(link.num_coded for link in self._links)
        if self._job.is_coded and not self.codecs.are_used:
            self._log.info("nothing is compressed: all servers' memory is shared with this worker")
        done = max(reply.sequence for reply in self._replies)
        self.batches = max(link.welcome.batches for link in self._links)
        if done:
            self._log.info("going on after step %d", done)
        self._land()
        return done

    def _keep_trying(self, attempt: Callable[[], Result]) -> Result:
        return keep_trying(attempt, self._connect_timeout_s, self._stop, self._clock)

    def _join(self, shard: int, **more: Any) -> WorkerEnd:
        """Come in, as soon as the server lets us."""
        hello = {
            "worker": self._rank,
            "incarnation": self._incarnation,
            "shard": shard,
            **self._job.agreement,
            **more,
        }
        lo, hi = self._job.slices[shard]
        layout = self._job.layout(shard)
        params = self._towers.landing[lo:hi]

        def connect() -> WorkerEnd:
            made = self._network.connect(shard, hello, layout, CONNECT_TIMEOUT_S, params)
            return encoding(made, self.codecs.of_shards[shard], self._job.make_reply_codec())

        link = self._keep_trying(connect)
        self.traffic.joined(link)
        if self._towers.gradient is not None and self._job.lends_gradients:
            link.lend(self._towers.gradient[lo:hi])
        if len(self._job.slices) == 1 and not self._job.config.overlap:
            # the only server's replies need no further copy
            self._towers.adopt(link.reply_slot.values)
        elif layout.rows is not None:  # of which later replies leave out rows
            params.copy_(link.reply_slot.values)
        return link

    # -- one exchange --------------------------------------------------------------------------

    @property
    def gradient_slots(self) -> list[Slot]:
        """Where the next gradient's slices are to be written, with the buffers in the first; the
        worker's until `push`."""
        return [link.gradient_slot for link in self._links]

    @property
    def is_last(self) -> bool:
        """Whether a server has said that the worker is to take no further step."""
        return any(reply.last for reply in self._replies)

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """The float and integer ones that came last; the worker's until `push`."""
        slot = self._links[0].reply_slot
        return slot.floats, slot.ints

    def push(
        self,
        step: int,
        present: Sequence[bool],
        versions: Sequence[int],
        *,
        batch: int | None = None,
        void: bool = False,
        speed: float = 0.0,
        made: Callable[[], None] = lambda: None,
    ) -> None:
        """Send every shard its slice of step `step`'s gradient; `present`: which tensors have one;
        `versions`: of the parameters that it was computed on, which may have been replaced since,
        also by those of a server that was started anew, and has no such version yet;
        `batch`: its last one, where steps are not of one each; `speed`: what the first server is
        told of the worker's.
        `void`: it is unusable, and goes to none of them, or a shard without the bad element would
        take half of it. `made` is called when everything is encoded, and nothing has left yet."""
        self._before = list(self.versions)
        slots = self.gradient_slots
        masked = not all(present)
        if masked:
            for slot in slots:
                slot.mask.copy_(torch.tensor(present, dtype=torch.uint8))
        self._pushed = [
            PushHeader(
                self._rank,
                self._incarnation,
                step,
                min(version, shown),
                batch=step - 1 if batch is None else batch,
                epoch=link.welcome.epoch,
                shard=shard,
                void=void,
                masked=masked,
                speed=0.0 if shard else speed,
            )
            for shard, (link, version, shown) in enumerate(
                zip(self._links, versions, self.versions, strict=True)
            )
        ]
        self._computed_on = [(header.epoch, header.base_version) for header in self._pushed]
        for link, header, rows in zip(self._links, self._pushed, self.rows, strict=True):
            if rows is not None:
                num_values, header.num_rows = rows.extent(link.gradient_slot.rows)
                header.num_bytes = num_values * link.gradient_slot.values.element_size()
        for shard, (link, header) in enumerate(zip(self._links, self._pushed, strict=True)):
            self._prepare(shard, link, header)
        made()
        for link, header in zip(self._links, self._pushed, strict=True):
            link.push(header)
            self.traffic.pushed(link, header)

    def _prepare(self, shard: int, link: WorkerEnd, header: PushHeader) -> None:
        """A gradient that a shard has already, and which is made again for another one, leaves its
        codec as it is."""
        codec = self.codecs.of_shards[shard]
        if codec is None or self._reached[shard] < header.sequence:
            link.prepare(header)
            return
        kept = {name: tensor.clone() for name, tensor in codec.state().items()}
        link.prepare(header)
        codec.load(kept)

    def await_all(self) -> str:
        """Wait until every shard has answered; returns what became of the gradient as a whole. A
        shard whose server was started anew may have lost it: the worker goes on all the same.
        To go back in the midst of training could have two workers wait for each other: one at the
        shard that lost a sync round, for the other one to push that round again, and the other one
        at a shard that has it, for the first to push the next."""
        self._lost.clear()
        self._answered.clear()
        while lacking := set(range(len(self._links))) - self._answered:
            self._take(shard := min(lacking), self._await(shard))
        self.fastest = self._replies[0].fastest or self.fastest
        self._land()
        return _pooled(self._replies)

    def _await(self, shard: int) -> ReplyHeader:
        """The reply of a server, or what the welcome of the one that took its place stands for."""
        while True:
            link = self._links[shard]
            try:
                return self._next_reply(shard, link)
            except ConnectionClosedError as error:
                if (reply := self._come_again(shard, link, error)) is not None:
                    return reply

    def _take(self, shard: int, reply: ReplyHeader) -> None:
        self._answered.add(shard)
        self._replies[shard] = reply
        self._reached[shard] = max(self._reached[shard], reply.sequence)

    def _come_again(
        self, shard: int, link: WorkerEnd, error: ConnectionClosedError
    ) -> ReplyHeader | None:
        """A link broke. Returns what the welcome stands for; None: the push is sent once more."""
        welcome = self._rejoin(shard, error)
        if welcome.settled_sequence >= self._pushed[shard].sequence:
            return _reply_of(welcome, APPLIED)
        if self._is_wanted(shard, link.welcome):
            self._push_again(shard, link)
            return None
        if shard in self._elsewhere.open:
            self._push_anew(shard, link)
            return None
        if welcome.epoch != link.welcome.epoch:
            self._lost[shard] = link
        return _reply_of(welcome, LOST)

    def _next_reply(self, shard: int, link: WorkerEnd) -> ReplyHeader:
        """The reply to the last push; where something on the way doubles what it carries, answers
        to others may come before it."""
        sequence, patience_s = self._pushed[shard].sequence, self._job.config.worker_timeout
        since_s: float | None = None
        while (reply := link.wait_reply(POLL_S)) is None or reply.sequence != sequence:
            self._check_stop()
            now_s = self._clock()
            since_s = now_s if since_s is None else since_s
            if now_s - since_s > patience_s:
                self._look_at_others(shard)
                since_s = None
        self.traffic.replied(link, reply)
        if reply.epoch != link.welcome.epoch:
            raise ConnectionClosedError("a reply of another epoch")
        return reply

    def _look_at_others(self, waiting: int) -> None:
        """No answer for long. It may be that another worker waits for this one elsewhere, and this
        one here for it: where servers gather what several pushed, one that was started anew has not
        what its former self had. So that is pushed once more, and awaited in its turn."""
        if self._job.joins_norms:  # who makes their rounds meet has patience, too
            return
        for shard in range(len(self._links)):
            if shard != waiting and shard not in self._lost:
                self._look_at(shard)
            if shard != waiting and shard in self._lost:
                self._push_anew(shard, self._lost.pop(shard))
                self._answered.discard(shard)

    def _look_at(self, shard: int) -> None:
        """Whether its server is still there; it may have answered meanwhile."""
        link = self._links[shard]
        try:
            reply = link.wait_reply(0.0)
        except ConnectionClosedError as error:
            self._answered.discard(shard)
            reply = self._come_again(shard, link, error)
        else:
            if reply is None or reply.sequence != self._pushed[shard].sequence:
                return
            self.traffic.replied(link, reply)
        if reply is not None and reply.epoch == self._links[shard].welcome.epoch:
            self._take(shard, reply)

    def _push_anew(self, shard: int, former: WorkerEnd) -> None:
        """To the server that is there now, which knows nothing of the versions of the former."""
        welcome, header = self._links[shard].welcome, self._pushed[shard]
        former_epoch, base_version = self._computed_on[shard]
        self._events.record(
            "anew",
            worker=self._rank,
            shard=shard,
            sequence=header.sequence,
            epoch=welcome.epoch,
            former_epoch=former_epoch,
            base_version=base_version,
            at_s=self._clock(),
        )
        header.epoch = welcome.epoch
        header.base_version = min(header.base_version, welcome.version)
        self._push_again(shard, former)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise ConnectionClosedError("told to stop", over=True)

    def _land(self) -> None:
        """Every shard has answered: have its parameters in the landing, and remember which they
        are."""
        for link in self._links:
            link.reply_slot.mark.order()
        landing = self._towers.landing
        if landing is not self._links[0].reply_slot.values:  # not adopted
            for shard, (lo, hi) in enumerate(self._job.slices):
                mine, theirs = landing[lo:hi], self._links[shard].reply_slot.values
                if mine.data_ptr() != theirs.data_ptr():
                    self._copy(shard, theirs, mine)
        self.versions = [reply.version for reply in self._replies]

    def _copy(self, shard: int, theirs: Tensor, mine: Tensor) -> None:
        """What a reply has brought, from its slot."""
        rows, reply = self.rows[shard], self._replies[shard]
        if rows is None or not reply.num_rows:
            mine.copy_(theirs)
            return
        num_values = reply.num_bytes // theirs.element_size()
        said = self._links[shard].reply_slot.rows[: reply.num_rows]
        rows.copy(theirs, mine, rows.read(said, num_values))

    # -- a server that went away ---------------------------------------------------------------

    def _rejoin(self, shard: int, reason: ConnectionClosedError) -> WelcomeHeader:
        """Look for a server that went away, and say what was lost with it."""
        if reason.over or self._stop.is_set():
            raise reason
        self._log.warning("server %d: %s; looking for it", shard, reason)
        self._towers.forget()
        former = self._links[shard].welcome
        self.traffic.left(self._links[shard])
        self._links[shard].close()
        epochs = [link.welcome.epoch for link in self._links]
        told = self._elsewhere.told_to(shard, epochs, self._before)
        self._links[shard] = self._join(shard, **told)
        welcome = self._links[shard].welcome
        self._reached[shard] = welcome.settled_sequence
        is_other = welcome.epoch != former.epoch
        if is_other and not self._goes_on(shard, former):
            self._before[shard] = welcome.version
        if is_other and self._job.config.is_durable and not self._goes_on(shard, former):
            broken = "server %d has answered with version %d, and its disk has no more than %d"
            self._log.error(broken, shard, self.versions[shard], welcome.version)
        self._events.record(
            "rejoin",
            worker=self._rank,
            shard=shard,
            epoch=welcome.epoch,
            former_epoch=former.epoch,
            version=welcome.version,
            seen_version=self.versions[shard],
            **({"whole": True} if is_other and self._goes_on(shard, former) else {}),
            at_s=self._clock(),
        )
        self._log.warning(
            "server %d is back, epoch %d, at version %d", shard, welcome.epoch, welcome.version
        )
        return welcome

    def _is_wanted(self, shard: int, former: WelcomeHeader) -> bool:
        """Whether a gradient that did not arrive may still go to the server that was joined again.
        One that was started anew is another one, which may be older than what the gradient was
        computed on, unless it promises; and a sync round that was closed without it is over, so
        that it is late."""
        welcome = self._links[shard].welcome
        is_late = self._job.facts.in_rounds and welcome.version != self._before[shard]
        return self._goes_on(shard, former) and not is_late

    def _goes_on(self, shard: int, former: WelcomeHeader) -> bool:
        """Whether the server is the one that it was; or has all that it has answered, and so what
        this gradient was computed on."""
        welcome = self._links[shard].welcome
        has_all = self._job.config.is_durable and welcome.version >= self.versions[shard]
        return has_all or welcome.epoch == former.epoch

    def _push_again(self, shard: int, former: WorkerEnd) -> None:
        """Send over the new connection what went over the former one, with the version that it was
        computed on."""
        link = self._links[shard]
        self._pushed[shard].epoch = link.welcome.epoch
        link.push_again(self._pushed[shard], former.pushed_slot)
        self.traffic.pushed(link, self._pushed[shard])

    def go_back(self, tensors: Mapping[str, Tensor], done: int) -> None:
        """What codecs kept after that step is what they go on with, for the shards that have no
        later one, and are to get them again."""
        lacking = [shard for shard, reached in enumerate(self._reached) if reached <= done]
        self.codecs.restore(tensors, lacking)

    # -- the end -------------------------------------------------------------------------------

    def finish(self, num_steps: int) -> int:
        """All steps are done: tell the servers, and wait until the run is over, which a
        ConnectionClosedError says. Returns only when a server that was started anew lacks the last
        steps: after which of them to go on. The other servers answer what they have already.

        Only here is it safe to go back: the servers that have every step were told so, and have
        nobody wait for this worker while it is busy with another shard.
        """
        self._events.flush()  # before anybody is told that this worker is through
        while not (lacking := self._tell_finished(num_steps)):
            while not self._any_came_back():
                self._check_stop()
        self._log.warning("going back to step %d", max(lacking) + 1)
        self._land()
        return max(lacking)

    def finish_for_good(self, num_steps: int) -> None:
        """The same for somebody who cannot do a step again: what a server lacks in the end is lost.
        Never returns: a ConnectionClosedError says that the run is over."""
        self._events.flush()
        while True:
            for link in self._links:
                link.finish(num_steps)
            while not self._any_came_back():
                self._check_stop()

    def _tell_finished(self, num_steps: int) -> list[int]:
        """Tell the servers that have all steps; returns the last step of each one that has not."""
        lacking = []
        for link, reply in zip(self._links, self._replies, strict=True):
            if reply.sequence >= num_steps:
                link.finish(num_steps)
            else:
                lacking.append(reply.sequence)
        return lacking

    def _any_came_back(self) -> bool:
        """Look at every link for a moment; whether another server took the place of one that
        nothing is expected of any more. All are looked at, as several may have gone."""
        came_back = False
        for shard, link in enumerate(self._links):
            try:
                link.wait_reply(POLL_S)
            except ConnectionClosedError as error:
                self._replies[shard] = _reply_of(self._rejoin(shard, error))
                came_back = True
        return came_back


def _reply_of(welcome: WelcomeHeader, status: str = ACCEPTED) -> ReplyHeader:
    """A welcome tells what a reply would: how far the shard is, and how far with this worker."""
    return ReplyHeader(
        welcome.settled_sequence, welcome.version, status, welcome.epoch, welcome.last
    )


def _pooled(replies: Sequence[ReplyHeader]) -> str:
    """What became of a gradient as a whole: a slice that is not in makes it dropped, rejected or
    lost."""
    statuses = {reply.status for reply in replies}
    for bad in (REJECTED, DROPPED, LOST):
        if bad in statuses:
            return bad
    return APPLIED
