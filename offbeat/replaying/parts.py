"""What a replay consists of: shards that are given gradients, and workers who compute them, one at
a time. course.py says in which order.
"""

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.data.batches import StepBatch, batch_length
from offbeat.errors import RunError
from offbeat.place import at
from offbeat.randomness import make_seed
from offbeat.replaying.looking import largest, told, watching
from offbeat.replaying.recorded import Computed, Life
from offbeat.roles.faults import make_faults
from offbeat.rules import Gradient
from offbeat.run.checkpoint import digest_of
from offbeat.run.job import Job
from offbeat.shard import ShardState
from offbeat.transport.codec import Codec


@dataclass(frozen=True, slots=True)
class Kept:
    """A version that gradients are still to be computed on."""

    params: Tensor
    floats: Tensor
    ints: Tensor


@dataclass(frozen=True, slots=True)
class Made:
    """A gradient, as its worker pushed it."""

    values: Sequence[Tensor]
    """A slice for each shard."""
    present: Sequence[bool]
    floats: Tensor
    ints: Tensor
    bases: Sequence[Tensor]
    """The parameters that it was computed on, of each shard."""


class Revival:
    """A server's life, as far as that is done again: its shard."""

    def __init__(
        self, job: Job, life: Life, to: int, wanted: Counter[int], states: set[int], told: set[int]
    ) -> None:
        """`wanted`: how many gradients are to be computed on each version; `states`: the versions
        that another life began with; `told`: those whose digests are known."""
        self.life = life
        self.at = life.begins
        """The recorded version that it is at."""
        self.to = to
        self.shard = job.make_shard(life.shard)
        self.states: dict[int, ShardState] = {}
        self.digests: dict[int, set[str]] = defaultdict(set)
        """Of versions that were told; of the first one also that of what it was given, which has
        no moving average yet when training begins."""
        self._wanted = wanted
        self._wanted_states = states
        self._wanted_digests = told
        self._kept: dict[int, Kept] = {}
        self._is_begun = False

    @property
    def is_begun(self) -> bool:
        return self._is_begun

    @property
    def is_done(self) -> bool:
        return self._is_begun and self.at >= self.to

    def begin(self, state: ShardState) -> None:
        self.shard.load(state)
        self.shard.falls[:] = [*state.falls, *(v for v in self.life.falls if v not in state.falls)]
        self._updater = self.shard.make_updater()
        self._is_begun = True
        if self.at in self._wanted_digests:
            self.digests[self.at].add(digest_of(state))
        self._keep()

    def has(self, version: int) -> bool:
        return version in self._kept

    def kept(self, version: int) -> Kept:
        return self._kept[version]

    def used(self, version: int) -> None:
        """A gradient was computed on it."""
        self._wanted[version] -= 1
        if not self._wanted[version]:
            del self._kept[version]

    def next(self) -> list[Computed]:
        return self.life.updates[self.at + 1]

    def apply(self, gradients: Sequence[Gradient]) -> float | None:
        """The next update; returns the learning rate. With no gradients: nothing is changed."""
        lr = None
        if gradients:
            begun = self._updater.begin(gradients)
            self._updater.end(begun, self.life.norms.get(self.at + 1))
            lr = self._updater.lr
        self.at += 1
        self._keep()
        return lr

    def _keep(self) -> None:
        shard = self.shard
        if self._wanted[self.at]:
            copies = (t.clone() for t in (shard.params, shard.floats, shard.ints))
            self._kept[self.at] = Kept(*copies)
        if self.at in self._wanted_states | self._wanted_digests:
            state = shard.state({})
            if self.at in self._wanted_digests:
                self.digests[self.at].add(digest_of(state))
            if self.at in self._wanted_states:
                self.states[self.at] = state


class Seat:
    """A worker, who computes what it is told to."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._place = job.share(rank).place()
        self._towers = job.make_towers(rank, job.make_model())
        self._towers.train()
        never = threading.Event()
        self._faults = make_faults(job.config, rank, 1, clock=time.monotonic, stop=never)
        self._codecs = [job.make_codec() if codes(job) else None for _ in job.slices]
        self._batches: Generator[StepBatch, None, None] | None = None
        self._next = 0
        """With which step, or batch, they go on."""

    def compute(self, gradient: Computed, bases: Sequence[Kept]) -> tuple[Made, float]:
        """The gradient, and its loss."""
        towers, job = self._towers, self._job
        self._take_in(gradient, bases)
        whole = torch.empty(job.manifest.num_elements)
        slices = [whole[lo:hi] for lo, hi in job.slices]
        floats, ints = torch.empty_like(bases[0].floats), torch.empty_like(bases[0].ints)
        with at(self._place), _threads(job.config.threads or 1):
            count = self._compute_batches(gradient)
            towers.write_buffers(floats, ints)
            present = towers.take_gradient(slices, count)
            loss, is_usable = towers.wait()
        self._faults.pushing(slices)
        if is_usable:
            self._code(slices)
        return Made(slices, present, floats, ints, [base.params for base in bases]), loss

    def look(self, gradient: Computed, bases: Sequence[Kept]) -> list[str]:
        """Compute it, and say where something is no number first."""
        towers = self._towers
        self._take_in(gradient, bases)
        module = towers.model.module
        found = [largest(module)]
        with at(self._place), _threads(self._job.config.threads or 1):
            for batch in self._batches_of(gradient):
                self._seed(batch)
                with watching(module) as seen:
                    towers.compute(self._job.recipe.loss, towers.deal(batch.batch), eagerly=True)
                found += told(batch, seen, towers.loss(), module)
                if len(found) > 1 or batch.number == gradient.batch:
                    break
                towers.accumulate(batch_length(batch.batch))
        return found

    def _take_in(self, gradient: Computed, bases: Sequence[Kept]) -> None:
        towers = self._towers
        for (lo, hi), base in zip(self._job.slices, bases, strict=True):
            towers.landing[lo:hi].copy_(self._replied(base.params))
        towers.refresh()
        towers.read_buffers(bases[0].floats, bases[0].ints)
        first = gradient.bases[0]
        towers.begin(0 if first is None else first.version)

    def _seed(self, batch: StepBatch) -> None:
        seed = make_seed(self._job.config.seed, "forward", self._rank, batch.number + 1)
        self._towers.seed(seed)

    def _replied(self, params: Tensor) -> Tensor:
        """As they came."""
        codec = self._job.make_reply_codec() if codes(self._job) else None
        return params if codec is None else _carried(codec, params.clone())

    def _code(self, slices: Sequence[Tensor]) -> None:
        """As servers get them; what that leaves out goes with the next ones."""
        for codec, values in zip(self._codecs, slices, strict=True):
            if codec is not None:
                values.copy_(_carried(codec, values))

    def _compute_batches(self, gradient: Computed) -> int:
        """All batches of the step; returns how many examples the last one has."""
        batch, paces = None, self._job.config.paces
        for batch in self._batches_of(gradient):
            self._seed(batch)
            self._towers.compute(self._job.recipe.loss, self._towers.deal(batch.batch))
            count = batch_length(batch.batch)
            if batch.number == gradient.batch or (batch.ends_step and not paces):
                break
            self._towers.accumulate(count)
        if batch is None or batch.number != gradient.batch:
            raise RunError(
                f"{gradient} ended with batch {gradient.batch} in the run, and does not now: "
                f"shares or batches were cut in another way then"
            )
        return count

    def _batches_of(self, gradient: Computed) -> Iterator[StepBatch]:
        """From its first one on. Steps of one length are known by their number; where they are
        not, each begins where the one before it ended."""
        start = gradient.sequence - 1
        if self._job.config.paces:
            start = 0 if gradient.before is None else gradient.before.batch + 1
        if self._batches is None or start != self._next:
            self.close()
            self._batches = self._job.step_batches(self._rank, start)
        self._next = gradient.batch + 1 if self._job.config.paces else start + 1
        return self._batches

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


def codes(job: Job) -> bool:
    """Whether gradients and parameters travelled as codecs have them."""
    return job.is_coded and (job.config.compress_always or job.facts.engine == "cluster")


def _carried(codec: Codec, values: Tensor) -> Tensor:
    """What comes of values, which may be used up, at the other end."""
    said = torch.empty_like(values)
    wire = torch.empty(codec.capacity(values.numel()), dtype=torch.uint8)
    codec.decode(wire[: codec.encode(values, wire)], said)
    return said


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """As a worker has them."""
    if count > 1:
        torch.set_num_threads(count)
    yield
    if count > 1:
        torch.set_num_threads(1)
