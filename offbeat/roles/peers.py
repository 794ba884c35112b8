"""A worker's exchange where there are no servers: all workers add up their gradients, and each
makes the same update of a replica of its own (replica.py).

In place of roles/exchange.py, and used by roles/worker.py in the same way:

    join -> [ fill the gradient slot -> push -> await all ]* -> finish

A round is one sum over all workers (transport/group.py): of gradients, float buffers, and a few
numbers that say who has one, and whether this is to be the last. So nobody has to agree on anything
beside it. Where replicas lie on GPUs these numbers are a sum of their own, in the CPU's memory,
which no gradient comes to. Who is through adds zeros until everybody is: shares may differ by a
batch. When one of them dies the others cannot go on; whoever started them starts all of them again.
"""

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from offbeat.accounts import APPLIED, REJECTED
from offbeat.errors import ConnectionClosedError
from offbeat.pushes import PushRecord
from offbeat.roles.calls import describe_state, state_from
from offbeat.roles.coding import Codecs
from offbeat.roles.exchange import CONNECT_TIMEOUT_S, POLL_S, Landing
from offbeat.roles.replica import PeerNetwork, Replica
from offbeat.rules import Gradient, Sum
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.run.sums import NCCL
from offbeat.streams import make_streams
from offbeat.transport.base import Layout, Network, Slot
from offbeat.transport.group import Group
from offbeat.transport.traffic import Traffic

NUM_SIGNS = 2
NUM_EACH = 4
"""Numbers that say something of everybody, and of each worker."""


@dataclass(slots=True)
class Said:
    """What workers say beside their gradients, or all of them together."""

    last: bool = False
    """Rank 0: the run is being stopped, and nobody is to take a further step."""
    fall: int = 0
    """Rank 0: in so many versions the learning rate is to be lower; 0: it is not."""
    applied: dict[int, float] = field(default_factory=dict)
    """The ranks whose gradients are in, and when they came."""
    rejected: list[int] = field(default_factory=list)
    """And whose were unusable."""
    present: Sequence[bool] = ()
    """Which tensors have a gradient."""

    @property
    def is_any(self) -> bool:
        """Whether somebody has had a gradient."""
        return bool(self.applied or self.rejected)

    def numbers(self, num_workers: int, num_tensors: int) -> list[float]:
        """As they are added up: single precision, so that seconds and what is behind the point are
        two of them."""
        found = [0.0] * (NUM_SIGNS + NUM_EACH * num_workers + num_tensors)
        found[:NUM_SIGNS] = float(self.last), float(self.fall)
        for rank, at_s in self.applied.items():
            place = NUM_SIGNS + NUM_EACH * rank
            found[place : place + 3] = 1.0, math.floor(at_s), at_s % 1
        for rank in self.rejected:
            found[NUM_SIGNS + NUM_EACH * rank + 3] = 1.0
        if self.present:
            found[-num_tensors:] = map(float, self.present)
        return found

    @classmethod
    def read(cls, numbers: Sequence[float], num_workers: int) -> "Said":
        end = NUM_SIGNS + NUM_EACH * num_workers
        found = cls(
            last=numbers[0] > 0,
            fall=round(numbers[1]),
            present=[number > 0 for number in numbers[end:]],
        )
        for rank, place in enumerate(range(NUM_SIGNS, end, NUM_EACH)):
            has_one, whole, part, is_bad = numbers[place : place + NUM_EACH]
            if has_one:
                found.applied[rank] = whole + part
            if is_bad:
                found.rejected.append(rank)
        return found


class Peers:
    """Owns the group and the memory that is added up; the replica is the master's too. One thread
    uses it."""

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
        assert isinstance(network, PeerNetwork), "workers without servers meet somewhere"
        self.versions = [0]
        self.rows = [None]
        self.codecs = Codecs(job)  # none
        self.traffic = Traffic()
        self.has_joined = False
        self.is_last = False
        """The worker is to take no further step."""
        self.batches, self.fastest = 0, 0.0
        """Nobody asks: all take steps of the same length here."""
        self._job = job
        self._rank = rank
        self._num_workers = job.config.workers
        self._towers = towers
        self._events = events
        self._log = log
        self._clock = clock
        self._stop = stop
        self._connect_timeout_s = connect_timeout_s
        self._device = job.slot_device(rank)
        """Of the replica, and of what is added up but for what is said."""
        self._replica = network.replica = Replica(
            job.make_shard(0, self._device),
            num_workers=job.config.workers,
            incarnation=incarnation,
            events=events,
            clock=clock,
        )
        self._group = Group(
            network.meeting,
            rank=rank,
            size=job.config.workers,
            check=self._check_stop,
            gpu=self._device if job.sums.backend == NCCL else None,
        )
        rule = job.make_rule()
        assert isinstance(rule, Sum), "others are refused"
        self._rule = rule
        self._incarnation = incarnation
        self._lay_out()

    def _lay_out(self) -> None:
        """One vector for all that is added up, of which the slot is a part; on a GPU, for all but
        what is said, for which nobody has to wait there."""
        layout = self._job.layout(0, self._device)
        self._num_tensors = layout.num_tensors
        num_said = NUM_SIGNS + NUM_EACH * self._num_workers + layout.num_tensors
        sizes = [layout.num_elements, layout.num_floats]
        if not is_apart(layout):
            sizes.append(num_said)
        total = torch.zeros(sum(sizes), device=layout.device)
        values, floats, *said = torch.split(total, sizes)
        self._said = said[0] if said else torch.zeros(num_said)
        self._sums = [total] if said else [total, self._said]
        rest = dataclasses.replace(layout, num_elements=0, num_floats=0)
        self._slot = dataclasses.replace(Slot.allocate(rest), values=values, floats=floats)
        self._record = PushRecord(self._rank, self._incarnation, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._replica.leave()
        self._group.close()

    # -- coming in -----------------------------------------------------------------------------

    def join(self) -> int:
        """Meet the others, and have what rank 0 has been given by the master; returns this worker's
        last step that is in."""
        replica = self._replica
        if self._num_workers > 1:
            self._log.info("%s", self._job.sums.line)
            self._group.meet(self._connect_timeout_s)
        if self._rank == 0:
            while not replica.loaded.wait(POLL_S):
                self._check_stop()
        if self._num_workers > 1:
            self._share_state()
        replica.begin()
        make_streams(self._device).wait_for_all()  # what other threads have put there so far
        self.has_joined = True
        self._towers.adopt(replica.shard.params)
        self.versions = [replica.shard.version]
        done = replica.last_step(self._rank)
        if done:
            self._log.info("going on after step %d", done)
        return done

    def _share_state(self) -> None:
        replica = self._replica
        if self._rank == 0:
            assert replica.state is not None, "it is loaded"
            self._group.hand_out(describe_state(replica.state), replica.state.tensors)
        else:
            replica.load(state_from(*self._group.take_over()))

    def go_back(self, tensors: Mapping[str, Tensor], done: int) -> None:
        """There is nothing that codecs could have kept."""

    # -- one round -----------------------------------------------------------------------------

    @property
    def gradient_slots(self) -> list[Slot]:
        """Where the next gradient is to be written, with the buffers; the worker's until `push`."""
        return [self._slot]

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """The float and integer ones that all have; the worker's until `push`."""
        return self._replica.shard.floats, self._replica.shard.ints

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
        """Begin to add up everybody's gradient of this step; `present`: which tensors have one;
        `versions`: of what it was computed on.
        `batch`: its last one, where steps are not of one each.
        `void`: it is unusable, and nothing of it is added. `made` is called before anything is.
        Nobody asks for a `speed` here."""
        made()
        batch = step - 1 if batch is None else batch
        self._record = PushRecord(
            self._rank,
            self._incarnation,
            step,
            batch=batch,
            base_version=versions[0],
            received_s=self._clock(),
        )
        if void:
            self._log.warning("a gradient (batch %d) is not finite, or too large", batch)
            self._begin_round(Said(rejected=[self._rank]))
        else:
            applied = {self._rank: self._record.received_s}
            self._begin_round(Said(applied=applied, present=present))

    def _begin_round(self, said: Said) -> None:
        """With zeros, unless there is a gradient."""
        replica = self._replica
        if not said.applied:
            self._sums[0].zero_()
            self._slot.ints.copy_(replica.shard.ints)
        if self._rank == 0:
            said.last, said.fall = replica.is_draining, self._next_fall()
        self._said.copy_(torch.tensor(said.numbers(self._num_workers, self._num_tensors)))
        if self._num_workers > 1:
            ints = self._slot.ints
            num_bytes = sum(tensor.nbytes for tensor in (*self._sums, ints))
            self.traffic.added_up(num_bytes, self._num_workers)
            self._group.begin(self._sums, ints if ints.numel() else None)

    def _next_fall(self) -> int:
        """In how many versions the learning rate is to fall, if the master wants it to and the
        others do not know yet; 0: it is not."""
        wanted, shard = self._replica.wanted_falls, self._replica.shard
        is_news = len(wanted) > len(shard.falls)
        return max(1, wanted[len(shard.falls)] - shard.version) if is_news else 0

    def await_all(self) -> str:
        """Until all gradients are added up; makes the update, and returns what became of this
        worker's."""
        said = self._end_round()
        outcome = APPLIED if self._rank in said.applied else REJECTED
        self._write_down(outcome, said)
        return outcome

    def _end_round(self) -> Said:
        self._wait()
        said = Said.read(self._said.tolist(), self._num_workers)
        replica = self._replica
        if said.fall:
            replica.fall(replica.shard.version + said.fall)
        updater = replica.end_round(self._gradient(said), said.applied, said.rejected)
        self._record.lr = updater.lr
        self._record.norm = None if updater.norm is None else updater.norm.value
        self.versions = [replica.shard.version]
        if said.last:
            self.is_last = True
            replica.leave()
        if said.last or not said.is_any:  # that was everybody's last round
            self._part()
        return said

    def _gradient(self, said: Said) -> Gradient | None:
        """What everybody's come to; None: nobody has one."""
        count = len(said.applied)
        if not count:
            return None
        slot = self._slot
        return Gradient(
            self._rule.of_sum(slot.values, count),
            None if all(said.present) else said.present,
            slot.floats.div_(count) if count > 1 else slot.floats,
            slot.ints,
            base_version=self.versions[0],
        )

    def _write_down(self, outcome: str, said: Said) -> None:
        """Everybody's gradients of a round went in when the last one had come."""
        record = self._record
        record.outcome = outcome
        record.replied_s = self._clock()
        if outcome == APPLIED:
            record.version = self.versions[0]
            record.staleness = record.version - 1 - record.base_version
            record.applied_s = max(said.applied.values())
        self._events.record_line(record.event_line, 0)

    def _wait(self) -> None:
        """Where another worker is gone, whoever started this one starts all of them again."""
        try:
            self._group.wait()
        except ConnectionClosedError as error:
            if error.over:
                raise
            self._replica.leave()
            self._log.warning("%s; waiting to be started again", error)
            self._stop.wait(self._job.config.worker_timeout)
            self._check_stop()
            raise

    def _part(self) -> None:
        """Before anybody leaves."""
        if self._num_workers > 1:
            self._group.begin_to_part()
            self._wait()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise ConnectionClosedError("told to stop", over=True)

    # -- the end -------------------------------------------------------------------------------

    def finish(self, num_steps: int) -> int:
        """All steps are done: take part in the others' rounds until theirs are. Rank 0 stays until
        the master lets it go; a ConnectionClosedError says that the run is over."""
        self._events.flush()
        said = None
        while said is None or said.is_any:
            if self.is_last:
                raise ConnectionClosedError("told to stop", over=True)
            self._begin_round(Said())
            said = self._end_round()
        self._replica.finish()
        while self._rank == 0 and not self._replica.over.wait(POLL_S):
            self._check_stop()
        raise ConnectionClosedError(self._replica.reason, over=True)


def is_apart(layout: Layout) -> bool:
    """Whether what workers say is not added up where their gradients are."""
    return layout.device.type != "cpu"
