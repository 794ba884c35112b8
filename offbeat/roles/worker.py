"""A worker: it computes gradients of its share of the data, and exchanges each for new parameters.

    welcome -> [ loss, gradient -> push to every shard -> prepare the next batch -> await every
    reply ]* -> tell the servers that all is done -> wait for the end of the run

With --overlap the reply to one gradient is awaited when the next one is computed, on the parameters
of the reply before.

A GPU is only told of a step, and while it computes the worker prepares the next batch and writes
down what became of the step before.

What goes to the servers and comes from them, and what to do when one goes away, is the exchange's
(roles/exchange.py; where there are no servers, roles/peers.py). In the midst of training the worker
goes on with its next step then; one that was through does again what a server does not have any
more, which is why it stays until the run is over. Rank 0 is the master's worker, and does nothing
else than the others here. Started by an engine, as `offbeat role worker --index 1 --run-dir RUN` or
as a thread.
"""

import functools
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from offbeat.data.batches import Batch, StepBatch, batch_length, not_finite
from offbeat.errors import ConnectionClosedError, NonFiniteLossError
from offbeat.pace import Pace
from offbeat.place import at
from offbeat.pushes import number
from offbeat.randomness import make_seed
from offbeat.recipes.base import StepLog
from offbeat.roles.coding import parted
from offbeat.roles.exchange import CONNECT_TIMEOUT_S, Exchange
from offbeat.roles.faults import make_faults
from offbeat.roles.keeping import Keeper
from offbeat.roles.peers import Peers
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.run.orders import Standing
from offbeat.run.tensorboard import StepSummaries
from offbeat.towers import Towers
from offbeat.transport.base import Network

IDENTITY_CHECK_EVERY = 100
CUT = "cut"


@dataclass(slots=True)
class WorkerStats:
    """How far a worker is; written by it alone, read by whoever shows progress."""

    num_steps: int = 0
    num_examples: int = 0
    loss: float = math.nan


@dataclass(slots=True)
class _Step:
    """What there is to write down of one."""

    number: int
    epoch: int
    start_s: float
    num_examples: int = 0
    loss: float = math.nan
    norm: float | None = None
    """Of the gradient before it was clipped, where that had to be known."""
    outcome: str = ""
    compute_s: float = 0.0
    prepare_s: float = 0.0
    """For the next batch, and for all but the first of the step."""
    exchange_s: float = 0.0
    """That the worker waited for."""
    waited_s: float = 0.0
    """For the exchange of the step before, in the midst of this one."""
    traffic: str = ""
    """What its event says of bytes."""
    pushed_s: float = 0.0
    """From when on it had nothing to do but to wait."""
    num_batches: int = 0
    local_steps: int | None = None
    """Where workers take different numbers of them."""


class Worker:
    """Owns its model replica and its exchange; `run` returns when its steps are done, when it is
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
        keeper: Keeper | None = None,
        say: Callable[[str], None] | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        orders: Standing | None = None,
    ) -> None:
        """`seeds_torch`: the process is this worker's alone, so that what the forward pass draws
        from torch's own generator can be made to depend on nothing but seed, rank and step; what a
        captured step draws always does. `keeper`: where it keeps what no server has; None: nowhere.
        `say` shows the user the lines that --log-every asks for; `orders` are those of somebody who
        looks on."""
        self.job = job
        self.rank = rank
        self.towers = towers
        self.log = log
        self.step = 1
        """The step that is being prepared or computed, counted from 1."""
        self.reason = ""
        """Why it has left, as a server put it, or whoever stopped it."""
        self.stats = WorkerStats()
        self._overlaps = job.config.overlap
        self._pace = Pace(job.config.most_local_steps) if job.config.paces else None
        self._batches = 0
        """Where every worker says itself when a step ends: how many it had gone through with the
        last one."""
        self._unwritten: _Step | None = None
        self._under_way: _Step | None = None
        """One that was pushed, and is not answered yet."""
        self._prepared_s = 0.0
        """What its batch took, where that was made during an exchange."""
        kind = Exchange if job.config.chosen.kind.served else Peers
        self._exchange: Exchange | Peers = kind(
            job,
            rank,
            towers,
            network,
            events=events,
            log=log,
            clock=clock,
            stop=stop,
            incarnation=incarnation,
            connect_timeout_s=connect_timeout_s,
        )
        self._seeds_torch = seeds_torch
        self._forward_seed = functools.lru_cache(maxsize=2)(
            lambda number: make_seed(job.config.seed, "forward", rank, number + 1)
        )
        """Of a batch; the next one's is worked out while there is time."""
        self._summaries = summaries
        self._keeper = keeper or Keeper(None, False, log)
        self._say = say if job.config.log_every else None
        self._said = (0.0, 0, 0)
        """When a line was shown last, after how many steps and examples."""
        self._orders = orders or Standing()
        self._faults = make_faults(
            job.config, rank, incarnation, clock=clock, stop=stop, orders=self._orders
        )
        self._events = events
        self._clock = clock
        self._stop = stop

    @property
    def has_joined(self) -> bool:
        """Whether every server has taken this worker in, or it has met the others."""
        return self._exchange.has_joined

    def run(self) -> None:
        torch.set_num_threads(self.job.config.threads or 1)
        here = self.job.share(self.rank).place()
        try:
            with at(here), self.towers.in_stream(), closing(self.towers), self._exchange:
                self._go_on_after(self._exchange.join())
                while self._train():
                    self._go_back_to(self._exchange.finish(self.step - 1))
        except ConnectionClosedError as error:
            if not error.over and not self._stop.is_set():
                raise
            self.reason = str(error)
            self.log.info("%s", error)
        self.log.info("left after %d steps", self.step - 1)

    def _go_on_after(self, done: int) -> None:
        """With what this worker had for itself then, in its former life."""
        self.step = done + 1
        if self._pace is not None and done:
            self._batches = self._exchange.batches
            self.towers.skip(self._batches)
            self.log.info("going on after batch %d", self._batches)
        is_asked = self.towers.keeps or self._exchange.codecs.may_keep
        if not is_asked or (kept := self._keeper.load(done)) is None:
            return
        tensors, numbers = kept
        of_codecs, tensors = parted(tensors)
        cut = numbers.pop(CUT, None)
        if cut != self.job.cut_mark:
            why = "it was kept where the data was shared out in another way"
        elif self._exchange.codecs.may_keep and not self._exchange.codecs.restore(of_codecs):
            why = "it is another codec's"
        elif self.towers.keeps and not self.towers.restore(tensors, numbers):
            why = "it is of another model, or another optimizer"
        else:
            return
        self.log.warning("what this worker keeps begins anew after step %d: %s", done, why)

    def _go_back_to(self, done: int) -> None:
        """A server has lost what came after that step, which is to be done again for it."""
        self.step = done + 1
        if self._pace is not None:  # those of another life it was told of when it came
            found = self._pace.batches(done)
            self._batches = self._exchange.batches if found is None else found
        if self._exchange.codecs.may_keep:
            kept, _ = self._keeper.load(done) or ({}, {})
            self._exchange.go_back(parted(kept)[0], done)

    def _made(self) -> None:
        """The push is made, and nothing of it has left."""
        self._keep()
        if self._overlaps:  # what the last exchange brought, before the next one's may come
            self._take_in()

    def _keep(self) -> None:
        """What belongs to the push that is about to be sent. It waits for the disk: what a server
        has must not be newer than what is kept here."""
        if self.towers.keeps or self._exchange.codecs.keep:
            tensors, numbers = self.towers.state()
            tensors |= self._exchange.codecs.state()
            self._keeper.save(self.step, tensors, {**numbers, CUT: self.job.cut_mark})

    def _train(self) -> bool:
        """Returns whether all steps are done; else this worker was told to stop."""
        self.towers.train()
        device = self.towers.first_device
        start = self.step - 1 if self._pace is None else self._batches
        batches = self.job.step_batches(self.rank, start, device, self.log.warning)
        with closing(batches):
            return self._train_on(batches)

    def _train_on(self, batches: Iterator[StepBatch]) -> bool:
        self._take_in()
        upcoming = next(batches, None)
        try:
            while upcoming is not None:
                if self._is_to_leave:
                    return False
                self._faults.begin(self.step)
                step = _Step(self.step, upcoming.epoch, self._clock())
                versions = self._exchange.versions
                last, count = self._compute_step(upcoming, batches, step)
                if self._overlaps and not self._await_meanwhile(step):
                    return False
                upcoming = self._push(last, count, versions, batches, step)
                if not self._overlaps:
                    self._await(step)
                self.step += 1
            if self._under_way is not None:
                self._await(self._under_way)
        finally:
            self._write_down()
        return True

    @property
    def _is_to_leave(self) -> bool:
        if self.rank in self._orders.stopped:
            self.log.info("asked to stop")
            return True
        return self._stop.is_set() or self._exchange.is_last

    def _push(
        self,
        last: StepBatch,
        count: int,
        versions: Sequence[int],
        batches: Iterator[StepBatch],
        step: _Step,
    ) -> StepBatch | None:
        """Send what was computed on parameters of these `versions`; returns the next batch."""
        is_told, upcoming = self.towers.is_told, None
        present = self._take_gradient(count)
        self._write_down()
        if is_told:  # prepared while a device computes
            upcoming = self._prepare(batches, step)
            self._forward_seed(last.number + 1)
        step.loss, is_usable = self.towers.wait()
        step.norm = self.towers.norm
        self._check_loss(step, last, versions)
        if is_told or not self._overlaps:
            self._hold_up(step)
        computed_s = self._clock()
        step.compute_s = computed_s - step.start_s - step.prepare_s - step.waited_s
        self._note_pace(step, last, computed_s)
        self._faults.pushing(slot.values for slot in self._exchange.gradient_slots)
        self._exchange.push(
            self.step,
            present,
            versions,
            batch=last.number,
            void=not is_usable,
            speed=0.0 if self._pace is None else self._pace.speed,
            made=self._made,
        )
        self._under_way, step.pushed_s = step, computed_s
        if not is_told:  # prepared while the exchange is under way
            within_s = step.prepare_s
            upcoming = self._prepare(batches, step)
            self._prepared_s = step.prepare_s - within_s
            step.pushed_s += self._prepared_s
        return upcoming

    def _await(self, step: _Step) -> None:
        """The reply to what was pushed last."""
        step.outcome = self._exchange.await_all()
        if self._pace is not None:
            self._pace.told(self._exchange.fastest)
        if not self._overlaps:
            self._take_in()
        step.exchange_s = self._clock() - step.pushed_s
        step.traffic = self._exchange.traffic.words()
        self._unwritten, self._under_way = step, None
        if not self.towers.is_told:
            self._write_down()

    def _await_meanwhile(self, step: _Step) -> bool:
        """The reply to the step before, now that this one is computed, or under way; False: there
        is to be no further one."""
        if not self.towers.is_told:
            self._hold_up(step)
        if (before := self._under_way) is None:
            return True
        since_s = before.pushed_s = self._clock()
        self._await(before)
        step.waited_s = self._clock() - since_s
        return not self._is_to_leave

    def _hold_up(self, step: _Step) -> None:
        """As long as somebody asked for."""
        self._faults.computed(step.start_s + step.waited_s, self._prepared_s)

    def _compute_step(
        self, batch: StepBatch, others: Iterator[StepBatch], step: _Step
    ) -> tuple[StepBatch, int]:
        """Compute all batches of a step; returns the last one, whose gradient is not yet with those
        of the others, and how many examples it holds."""
        most = math.inf
        if self._pace is not None:
            most = self._pace.num_steps(self.step) * self.job.config.accumulate
        step.num_batches = 1
        while not batch.ends_step and step.num_batches < most:
            self._compute(batch)
            count = batch_length(batch.batch)
            self.towers.accumulate(count)
            step.num_examples += count
            step.num_batches += 1
            upcoming = self._prepare(others, step)
            assert upcoming is not None, "a step ends with its last batch"
            batch = upcoming
        self._compute_watched(batch)
        count = batch_length(batch.batch)
        step.num_examples += count
        return batch, count

    def _note_pace(self, step: _Step, last: StepBatch, computed_s: float) -> None:
        """How long the worker itself took for its local steps, held up or not."""
        if self._pace is None:
            return
        own_s = computed_s - step.start_s - step.waited_s + self._prepared_s
        step.local_steps = -(-step.num_batches // self.job.config.accumulate)
        self._batches = last.number + 1
        self._pace.measured(step.local_steps, own_s)
        self._pace.pushed(self.step, step.local_steps, self._batches)

    def _prepare(self, batches: Iterator[StepBatch], step: _Step) -> StepBatch | None:
        """The next batch, if there is one; `step` is told how long that took."""
        before_s = self._clock()
        upcoming = next(batches, None)
        step.prepare_s += self._clock() - before_s
        return upcoming

    def _write_down(self) -> None:
        """What became of the last step, unless that is done already."""
        step, self._unwritten = self._unwritten, None
        if step is None:
            return
        self.stats.num_steps += 1
        self.stats.num_examples += step.num_examples
        self.stats.loss = step.loss
        if self._say is not None:
            self._log_step(self._say, step)
        self._events.record_line(_step_line, self.rank, step)

    def _compute_watched(self, batch: StepBatch) -> None:
        if self._summaries is None:
            self._compute(batch)
            return
        version = self._exchange.versions[0]
        with self._summaries.watching(self.towers.model.module, version) as looks_on:
            self._compute(batch, eagerly=looks_on)
        self._summaries.computed(self.towers.model, version, self.towers.loss)

    def _compute(self, batch: StepBatch, *, eagerly: bool = False) -> None:
        """Loss and gradient of one batch, which stay with the towers."""
        if self.step % IDENTITY_CHECK_EVERY == 1:
            self.towers.check_identity()
        if self._seeds_torch or self.towers.is_told:
            seed = self._forward_seed(batch.number)
            self.towers.seed(seed, captured_only=not self._seeds_torch)
        self.towers.compute(self.job.recipe.loss, self.towers.deal(batch.batch), eagerly=eagerly)

    def _check_loss(self, step: _Step, last: StepBatch, versions: Sequence[int]) -> None:
        loss = step.loss
        if not math.isfinite(loss):
            computed = {"step": self.step, "batch": last.number, "base_versions": list(versions)}
            at_s = self._clock()
            self._events.record("diverged", worker=self.rank, **computed, at_s=at_s)
            batches: Iterable[Batch] | None = [last.batch]
            if self.towers.is_told or self.job.config.batches_per_step > 1:
                # it is not the only one, or the next one may have been put into its place
                batches = self._made_again(step.num_batches)
            raise NonFiniteLossError(
                f"the loss became {loss} in worker {self.rank} at step {self.step}; "
                f"{self._likely_reason(batches)}. The state before it is kept in the run's last "
                f"checkpoint."
            )

    def _made_again(self, count: int) -> Iterator[Batch] | None:
        """The `count` batches of this step, where data can be gone through twice."""
        if self.job.facts.num_batches is None:
            return None
        device = self.towers.first_device
        start = self.step - 1 if self._pace is None else self._batches
        batches = self.job.step_batches(self.rank, start, device)
        return (found.batch for found in itertools.islice(batches, count))

    def _likely_reason(self, batches: Iterable[Batch] | None) -> str:
        """Why a loss is not finite, and the remedy. Parameters come first: where they have run
        away, a batch may well hold infinities that do no harm, as masks do."""
        if not bool(self.towers.model.params.isfinite().all()):
            return "the parameters are not finite any more: a lower --lr is the usual remedy"
        if batches is None:
            return "a lower --lr is the usual remedy, or data without NaN and infinities"
        bad, count = map(sum, zip(*map(not_finite, batches), strict=True))
        if bad:
            return (
                f"{bad:,} of the {count:,} numbers in its batch are NaN or infinite: mend the "
                f"data, or the recipe's augment"
            )
        return (
            "a lower --lr is the usual remedy, or another loss function: its batch and the "
            "parameters are finite"
        )

    def _take_gradient(self, count: int) -> list[bool]:
        """Into the slots, with the buffers; which tensors have one. `count`: examples of the last
        batch."""
        slots = self._exchange.gradient_slots
        # before the gradient, for which `wait` waits
        self.towers.write_buffers(slots[0].floats, slots[0].ints)
        if self.job.manifest.is_sparse:
            return self.towers.take_rows(slots, self._exchange.rows, count)
        return self.towers.take_gradient([slot.values for slot in slots], count)

    def _take_in(self) -> None:
        """Let the model show what the servers sent."""
        moved = self.towers.refresh()
        if moved:
            self.log.warning("put back into place: %s", ", ".join(moved))
        self.towers.read_buffers(*self._exchange.buffers)
        self.towers.begin(self._exchange.versions[0])

    def _log_step(self, say: Callable[[str], None], step: _Step) -> None:
        if self.stats.num_steps == 1:
            self._said = (step.start_s, 0, 0)
        if step.number % self.job.config.log_every:
            return
        stats, (since_s, steps, examples) = self.stats, self._said
        now_s = self._clock()
        time_s = max(now_s - since_s, 1e-9)
        num_batches = self.job.steps_per_epoch(self.rank)
        log = StepLog(
            step=step.number,
            version=self._exchange.versions[0],
            epoch=step.epoch + 1,
            batch=(step.number - 1) % num_batches + 1 if num_batches else step.number,
            num_batches=num_batches,
            loss=step.loss,
            examples_per_s=(stats.num_examples - examples) / time_s,
            step_s=time_s / max(1, stats.num_steps - steps),
        )
        say(self.job.recipe.log_line(log))
        self._said = (now_s, stats.num_steps, stats.num_examples)


def _step_line(worker: int, step: _Step) -> str:
    """A step's event. There are many, so that it is not put together by json."""
    norm = "" if step.norm is None else f', "norm": {number(step.norm)}'
    local = "" if step.local_steps is None else f', "local_steps": {step.local_steps}'
    return (
        f'{{"kind": "step", "worker": {worker}, "step": {step.number}, "epoch": {step.epoch}, '
        f'"loss": {step.loss!r}, "examples": {step.num_examples}, "outcome": "{step.outcome}", '
        f'"start_s": {step.start_s:.6f}, "compute_s": {step.compute_s:.6f}, '
        f'"prepare_s": {step.prepare_s:.6f}, "exchange_s": {step.exchange_s:.6f}'
        f"{local}{norm}{step.traffic}}}"
    )
