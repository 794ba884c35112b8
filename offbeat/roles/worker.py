"""A worker: it computes gradients of its share of the data, and exchanges each for new parameters.

    welcome -> [ loss, gradient -> push to every shard -> prepare the next batch -> await every
    reply ]* -> tell the servers that all is done -> wait for the end of the run

A server that goes away is looked for again, for a while: it may have been started anew. In the
midst of training the worker goes on with its next step then; one that was through does again what
the server does not have any more, which is why it stays until the run is over. Rank 0 is
the master's worker, and does nothing else than the others here. Started by an engine, as
`offbeat role worker --index 1 --run-dir RUN` or as a thread.
"""

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offbeat.data.batches import Batch, batch_length, not_finite
from offbeat.errors import ConnectionClosedError, NonFiniteLossError
from offbeat.events import EventLog
from offbeat.job import Job
from offbeat.ledger import APPLIED, DROPPED, LOST, REJECTED
from offbeat.randomness import make_seed
from offbeat.recipes.base import StepLog
from offbeat.shard import usable
from offbeat.summaries import StepSummaries
from offbeat.towers import Towers
from offbeat.transport.base import (
    Network,
    PushHeader,
    ReplyHeader,
    WelcomeHeader,
    WorkerEnd,
    keep_trying,
)

POLL_S = 0.2
"""How often a worker that waits for a reply looks whether the run is being stopped."""
CONNECT_TIMEOUT_S = 120.0
"""How long a server may take to come, or to come back."""
IDENTITY_CHECK_EVERY = 100


@dataclass(slots=True)
class WorkerStats:
    """How far a worker is; written by it alone, read by whoever shows progress."""

    num_steps: int = 0
    num_examples: int = 0
    loss: float = math.nan


class Worker:
    """Owns its model replica and its connections; `run` returns when its steps are done, when it is
    told to stop, or when a server says that the run is over."""

    def __init__(
        self,
        job: Job,
        rank: int,
        towers: Towers,
        network: Network,
        *,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
        stop: threading.Event,
        incarnation: int = 0,
        seeds_torch: bool = False,
        summaries: StepSummaries | None = None,
        say: Callable[[str], None] | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`seeds_torch`: the process is this worker's alone, so that what the forward pass draws
        from torch's own generator can be made to depend on nothing but seed, rank and step. `say`
        shows the user the lines that --log-every asks for."""
        self.job = job
        self.rank = rank
        self.towers = towers
        self.log = log
        self.step = 1
        """The step that is being prepared or computed, counted from 1."""
        self.stats = WorkerStats()
        self._network = network
        self._incarnation = incarnation
        self._connect_timeout_s = connect_timeout_s
        self._seeds_torch = seeds_torch
        self._summaries = summaries
        self._say = say if job.config.log_every else None
        self._said = (0.0, 0, 0)
        """When a line was shown last, after how many steps and examples."""
        self._slowdown = job.config.slowdowns.get(rank, 1.0)
        self._dies_at = None if incarnation else job.config.kills.get(rank)
        self._events = events
        self._clock = clock
        self._stop = stop
        self._links: list[WorkerEnd] = []
        self._pushed: list[PushHeader] = []
        """What went to each shard last."""
        self._replies: list[ReplyHeader] = []
        """What came from each shard last: a reply, or what a welcome stands for."""
        self._seen = [0 for _ in job.slices]
        """The newest version of each shard that this worker was shown."""

    @property
    def has_joined(self) -> bool:
        """Whether every server has taken this worker in."""
        return len(self._replies) == len(self.job.slices)

    def run(self) -> None:
        torch.set_num_threads(self.job.config.threads or 1)
        done = threading.Event()
        beats = threading.Thread(target=self._beat, args=(done,), name="beats", daemon=True)
        beats.start()
        try:
            self._join_all()
            while self._train():
                self._wait_for_end()
        except ConnectionClosedError as error:
            if not error.over and not self._stop.is_set():
                raise
            self.log.info("%s", error)
        finally:
            done.set()
            beats.join()
            self.towers.unpin()
            for link in self._links:
                link.close()
        self.log.info("left after %d steps", self.step - 1)

    def _beat(self, done: threading.Event) -> None:
        """Tell every server that this worker is alive: a thread of its own, since a step may take
        as long as it likes."""
        while not done.wait(min(1.0, self.job.config.worker_timeout / 5)):
            for link in list(self._links):
                link.beat()

    # -- connections ---------------------------------------------------------------------------

    def _join_all(self) -> None:
        for shard in range(len(self.job.slices)):
            self._links.append(self._join(shard))
        self._replies = [_reply_of(link.welcome) for link in self._links]
        done = max(reply.sequence for reply in self._replies)
        self.step = done + 1
        if done:
            self.log.info("going on after step %d", done)

    def _join(self, shard: int) -> WorkerEnd:
        """Come in, as soon as the server lets us."""
        hello = {
            "worker": self.rank,
            "incarnation": self._incarnation,
            "shard": shard,
            **self.job.agreement,
        }
        lo, hi = self.job.slices[shard]
        layout = self.job.layout(shard)
        params = self.towers.landing[lo:hi]
        link = keep_trying(
            lambda: self._network.connect(shard, hello, layout, CONNECT_TIMEOUT_S, params),
            self._connect_timeout_s,
            self._stop,
        )
        if len(self.job.slices) == 1:  # the only server's replies need no further copy
            self.towers.adopt(link.reply_slot.values)
        return link

    def _rejoin(self, shard: int, reason: ConnectionClosedError) -> ReplyHeader:
        """A server went away: look for it, and say what was lost with it."""
        if reason.over or self._stop.is_set():
            raise reason
        self.log.warning("server %d: %s; looking for it", shard, reason)
        self.towers.unpin()
        former_epoch = self._links[shard].welcome.epoch
        self._links[shard].close()
        link = self._join(shard)
        self._links[shard] = link
        welcome = link.welcome
        self._events.record(
            "rejoin",
            worker=self.rank,
            shard=shard,
            epoch=welcome.epoch,
            former_epoch=former_epoch,
            version=welcome.version,
            seen_version=self._seen[shard],
            at_s=self._clock(),
        )
        self.log.warning(
            "server %d is back, epoch %d, at version %d",
            shard,
            welcome.epoch,
            welcome.version,
        )
        self._replies[shard] = reply = _reply_of(welcome)
        reply.status = APPLIED if welcome.settled_sequence >= self.step else LOST
        return reply

    # -- the end -------------------------------------------------------------------------------

    def _wait_for_end(self) -> None:
        """All steps are done: say so, and wait until the run is over, which a
        ConnectionClosedError tells. Returns when a server lacks the last steps: it was started
        anew. Then `step` is where to go on; the other servers answer what they have already."""
        num_steps = self.step - 1
        self._events.flush()  # before anybody is told that this worker is through
        while True:
            lacking = []
            for link, reply in zip(self._links, self._replies, strict=True):
                if reply.sequence >= num_steps:
                    link.finish(num_steps)
                else:
                    lacking.append(reply.sequence)
            if lacking:
                self.step = max(lacking) + 1
                self.log.warning("going back to step %d", self.step)
                return
            while not sum(self._came_back(shard) for shard in range(len(self._links))):
                if self._stop.is_set():
                    raise ConnectionClosedError("told to stop", over=True)

    def _came_back(self, shard: int) -> bool:
        """Whether another server took the place of one that nothing is expected of any more."""
        try:
            self._links[shard].wait_reply(POLL_S)
        except ConnectionClosedError as error:
            self._rejoin(shard, error)
            return True
        return False

    # -- training ------------------------------------------------------------------------------

    def _train(self) -> bool:
        """Returns whether all steps are done; else this worker was told to stop."""
        self.towers.train()
        batches = self.job.batches(self.rank, self.step - 1, self.towers.first_device)
        versions = self._take_in(self._replies)
        upcoming = next(batches, None)
        prepare_s = 0.0
        while upcoming is not None:
            if self._stop.is_set() or any(reply.last for reply in self._replies):
                return False
            if self.step == self._dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            epoch, batch = upcoming
            start_s = self._clock()
            loss = self._compute_watched(batch, versions[0])
            if self._slowdown > 1:  # as on a slower machine: with what it does itself, no more
                own_s = self._clock() - start_s + prepare_s
                self._stop.wait((self._slowdown - 1) * own_s)
            computed_s = self._clock()
            self._push(versions)
            upcoming = next(batches, None)  # prepared while the exchange is under way
            prepared_s = self._clock()
            prepare_s = prepared_s - computed_s
            self._replies = [self._await(shard) for shard in range(len(self._links))]
            versions = self._take_in(self._replies)
            self._account(batch, loss)
            if self._say is not None:
                self._log_step(self._say, epoch, loss, start_s)
            self._events.record_line(
                _step_line,
                self.rank,
                self.step,
                epoch,
                loss,
                batch_length(batch),
                _pooled(self._replies),
                start_s,
                computed_s,
                prepared_s,
                self._clock(),
            )
            self.step += 1
        return True

    def _compute_watched(self, batch: Batch, version: int) -> float:
        if self._summaries is None:
            return self._compute(batch)
        with self._summaries.watching(self.towers.model.module, version):
            loss = self._compute(batch)
        self._summaries.computed(self.towers.model, version, loss)
        return loss

    def _compute(self, batch: Batch) -> float:
        """Loss and gradient of one batch; the gradient stays in the parameters."""
        if self.step % IDENTITY_CHECK_EVERY == 1:
            self.towers.check_identity()
        if self._seeds_torch:
            self.towers.seed(make_seed(self.job.config.seed, "forward", self.rank, self.step))
        loss = self.towers.compute(self.job.recipe.loss, self.towers.deal(batch))
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss became {loss} in worker {self.rank} at step {self.step}; "
                f"{self._likely_reason(batch)}. The state before it is kept in the run's last "
                f"checkpoint."
            )
        return loss

    def _likely_reason(self, batch: Batch) -> str:
        """Why a loss is not finite, and the remedy. Parameters come first: where they have run
        away, a batch may well hold infinities that do no harm, as masks do."""
        if not bool(self.towers.model.params.isfinite().all()):
            return "the parameters are not finite any more: a lower --lr is the usual remedy"
        bad, count = not_finite(batch)
        if bad:
            return (
                f"{bad:,} of the {count:,} numbers in its batch are NaN or infinite: mend the "
                f"data, or the recipe's augment"
            )
        return (
            "a lower --lr is the usual remedy, or another loss function: its batch and the "
            "parameters are finite"
        )

    def _push(self, versions: Sequence[int]) -> None:
        """Send every shard its slice. An unusable gradient goes to none of them, or a shard without
        the bad element would take half of it."""
        slots = [link.gradient_slot for link in self._links]
        present = self.towers.take_gradient([slot.values for slot in slots])
        self.towers.write_buffers(slots[0].floats, slots[0].ints)
        masked = not all(present)
        if masked:
            for slot in slots:
                slot.mask.copy_(torch.tensor(present, dtype=torch.uint8))
        void = not all(usable(slot.values) for slot in slots)
        self._pushed = [
            PushHeader(
                self.rank,
                self._incarnation,
                self.step,
                version,
                batch=self.step - 1,
                void=void,
                epoch=link.welcome.epoch,
                shard=shard,
                masked=masked,
            )
            for shard, (link, version) in enumerate(zip(self._links, versions, strict=True))
        ]
        for link, header in zip(self._links, self._pushed, strict=True):
            link.push(header)

    def _await(self, shard: int) -> ReplyHeader:
        """The reply of a server, or the welcome of the one that took its place."""
        while True:
            link = self._links[shard]
            try:
                while (reply := link.wait_reply(POLL_S)) is None:
                    if self._stop.is_set():
                        raise ConnectionClosedError("told to stop", over=True)
                if reply.epoch == link.welcome.epoch:
                    break
                raise ConnectionClosedError("a reply of another epoch")
            except ConnectionClosedError as error:
                welcome = self._rejoin(shard, error)
                if not self._push_again(shard, link, welcome):
                    return welcome
        return reply

    def _push_again(self, shard: int, former: WorkerEnd, welcome: ReplyHeader) -> bool:
        """Only the connection broke, and the gradient is not in: send it over the new one. A sync
        round that was closed without it is over; its gradient is late."""
        is_late = self.job.facts.in_rounds and (welcome.version != self._seen[shard])
        if welcome.status == APPLIED or welcome.epoch != former.welcome.epoch or is_late:
            return False
        link = self._links[shard]
        slot, pushed = link.gradient_slot, former.pushed_slot
        for mine, theirs in zip(
            (slot.values, slot.mask, slot.floats, slot.ints),
            (pushed.values, pushed.mask, pushed.floats, pushed.ints),
            strict=True,
        ):
            mine.copy_(theirs)
        link.push(self._pushed[shard])
        return True

    def _take_in(self, replies: Sequence[ReplyHeader]) -> list[int]:
        """Let the model show what the servers sent; returns the shards' versions."""
        if self.towers.landing is not self._links[0].reply_slot.values:  # not adopted
            for link, (lo, hi) in zip(self._links, self.job.slices, strict=True):
                mine, theirs = self.towers.landing[lo:hi], link.reply_slot.values
                if mine.data_ptr() != theirs.data_ptr():
                    mine.copy_(theirs)
        moved = self.towers.loaded()
        if moved:
            self.log.warning("put back into place: %s", ", ".join(moved))
        slot = self._links[0].reply_slot
        self.towers.read_buffers(slot.floats, slot.ints)
        self._seen = [reply.version for reply in replies]
        return self._seen

    def _account(self, batch: Batch, loss: float) -> None:
        self.stats.num_steps += 1
        self.stats.num_examples += batch_length(batch)
        self.stats.loss = loss

    def _log_step(
        self, say: Callable[[str], None], epoch: int, loss: float, start_s: float
    ) -> None:
        if self.stats.num_steps == 1:
            self._said = (start_s, 0, 0)
        if self.step % self.job.config.log_every:
            return
        stats, (since_s, steps, examples) = self.stats, self._said
        now_s = self._clock()
        time_s = max(now_s - since_s, 1e-9)
        num_batches = self.job.batches_per_epoch(self.rank)
        log = StepLog(
            step=self.step,
            version=self._seen[0],
            epoch=epoch + 1,
            batch=(self.step - 1) % num_batches + 1 if num_batches else self.step,
            num_batches=num_batches,
            loss=loss,
            examples_per_s=(stats.num_examples - examples) / time_s,
            step_s=time_s / max(1, stats.num_steps - steps),
        )
        say(self.job.recipe.log_line(log))
        self._said = (now_s, stats.num_steps, stats.num_examples)


def _step_line(
    worker: int,
    step: int,
    epoch: int,
    loss: float,
    examples: int,
    outcome: str,
    start_s: float,
    computed_s: float,
    prepared_s: float,
    done_s: float,
) -> str:
    """A step's event. There are many, so that it is not put together by json."""
    return (
        f'{{"kind": "step", "worker": {worker}, "step": {step}, "epoch": {epoch}, '
        f'"loss": {loss!r}, "examples": {examples}, "outcome": "{outcome}", '
        f'"start_s": {start_s:.6f}, "compute_s": {computed_s - start_s:.6f}, '
        f'"prepare_s": {prepared_s - computed_s:.6f}, "exchange_s": {done_s - prepared_s:.6f}}}'
    )


def _reply_of(welcome: WelcomeHeader) -> ReplyHeader:
    """A welcome tells what a reply would: how far the shard is, and how far with this worker."""
    return ReplyHeader(
        welcome.settled_sequence, welcome.version, epoch=welcome.epoch, last=welcome.last
    )


def _pooled(replies: Sequence[ReplyHeader]) -> str:
    """What became of a gradient as a whole: a slice that is not in makes it dropped or rejected."""
    statuses = {reply.status for reply in replies}
    for bad in (REJECTED, DROPPED, LOST):
        if bad in statuses:
            return bad
    return "applied"
