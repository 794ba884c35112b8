"""A job: configuration and recipe, resolved against the model and the data. What every role is
given, and makes its parts from: its model, shard, discipline, batches. making.py makes one.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import sys
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from offbeat.accounts import Start, moved
from offbeat.capture import CapturedAugment, make_recorder
from offbeat.clipping import Clip, ClipNorm, ClipValue
from offbeat.compiling import Compiled
from offbeat.config import (
    AUTO,
    BATCHING,
    ELEMENTS,
    OFF,
    TENSORS,
    TrainConfig,
)
from offbeat.data.batches import (
    Batch,
    Share,
    Source,
    StepBatch,
    grouped,
    prepared_ahead,
    to_device,
)
from offbeat.data.sources import make_source
from offbeat.decline import Plateau
from offbeat.disciplines import Discipline
from offbeat.errors import (
    ConfigError,
    DataError,
    OffbeatError,
    RecipeError,
    in_a_line,
)
from offbeat.family import BUILT_IN
from offbeat.flat import PROTOCOL, FlatModel, Manifest
from offbeat.local_steps import Inner, LocalTowers
from offbeat.optim import Length, Optimizer, Schedule, constant, schedule_name
from offbeat.place import Place, at
from offbeat.plugins import Choice
from offbeat.probing import Reach, reach_of
from offbeat.randomness import make_seed
from offbeat.recipes.base import Recipe
from offbeat.rows import rows_of
from offbeat.rules import Rule, make_rule
from offbeat.run.checkpoint import Checkpoint
from offbeat.run.crews import shared_gpu
from offbeat.run.initial import Initial, fill
from offbeat.run.sums import Places, Sums, choose_sums
from offbeat.schedules import Rates, in_run
from offbeat.shard import (
    Shard,
    ShardState,
    segments_of,
)
from offbeat.streams import in_this_stream
from offbeat.towers import CPU, Towers, find_devices
from offbeat.transport.base import Layout, Message
from offbeat.transport.codec import Codec, ErrorFeedback

MAX_MODEL_BYTES = 32_000
"""Of a model's description in a handshake."""
AT_HOME = ("local", "inproc")
"""Engines whose workers share memory with the servers."""
NUM_AHEAD = 2
"""Batches that wait in the queue of --feed batching."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What only the data and the machine can tell, found out once and kept in the run's
    config.json."""

    num_examples: int | None
    """None: not known before the end of the data is reached."""
    num_batches: Sequence[int] | None = None
    """Each worker's in an epoch; None: not known either."""
    by_rank: bool = False
    """The recipe's data function asks for whom it is called: each worker has its own data."""
    has_test: bool
    total_updates: int | None
    """How many updates each shard will have seen if nobody drops out; None: not known."""
    by_loss: bool = False
    """The recipe has no metric, and is judged by its loss on the test data."""
    in_rounds: bool = False
    """An update is a round of all workers' gradients."""
    served: bool = True
    """There are servers."""
    variant: str = ""
    """The discipline and its options, as a report names them."""
    elastic: bool = False
    """Workers may come and go: the run ends with its `total_updates`, whoever made them."""
    engine: str = "local"
    """What starts the roles."""
    higher_is_better: bool | None = None
    """Of the metric; None: nobody says."""
    crews: Sequence[Sequence[int]] = ()
    """Ranks that share a process; who is in none has one alone, where workers are processes."""
    updates_per_epoch: int | None = None
    """How many updates each shard sees while every worker goes through its data once; None: not
    known."""
    epoch_shift: int = 0
    """How many more updates than it has a resumed run would have behind it, had it always been cut
    into shares as it is now."""
    whole_tensors: bool = False
    """Slices are cut between tensors, and the optimizer sees each tensor whole."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """`config` has no None left in it that concerns the length or the pace of training."""

    config: TrainConfig
    recipe: Recipe
    optimizer: Optimizer
    """The servers'."""
    manifest: Manifest
    slices: tuple[tuple[int, int], ...]
    facts: Facts
    train: Source | None = None
    """None in a process that has no use for data."""
    of_rank: dict[int, Source] = field(default_factory=dict)
    """The training data of workers here, where each has its own."""
    test: Source | None = None
    codec: Choice[Codec] | None = None
    """What gradients travel as over a network; None: as they are."""
    reply_codec: Choice[Codec] | None = None
    """And what parameters travel as."""
    num_rates: int = 0
    """Of somebody's own loop: how many numbers its optimizer's options have, which travel with
    every gradient."""
    initial: Initial | None = None
    """What training begins from; None: what the recipe makes."""
    inner: Optimizer | None = None
    """That of steps which workers take by themselves; None: there are none."""

    @property
    def fingerprint(self) -> str:
        coded = "".join(f" {name} {label}" for name, label in self._coding.items())
        return self.manifest.fingerprint(repr(self.optimizer) + coded)

    @property
    def _coding(self) -> Message:
        """Which codecs there are, and whether they are for shared memory too: in any case, since
        some of a run's connections may go over a network."""
        if not self.is_coded:
            return {}
        labels = (None if found is None else found.label for found in self._codecs)
        found = dict(zip(("codec", "reply_codec"), labels, strict=True))
        return {**found, "compress_always": self.config.compress_always}

    @property
    def _codecs(self) -> tuple[Choice[Codec] | None, Choice[Codec] | None]:
        return self.codec, self.reply_codec

    @property
    def is_coded(self) -> bool:
        """Whether anything travels as something else over a network."""
        return self._codecs != (None, None)

    @property
    def idle_codecs(self) -> str | None:
        """What is to be said where no link of the run goes over a network."""
        if not self.is_coded or self.config.compress_always or self.facts.engine not in AT_HOME:
            return None
        given = [
            f"--{name} {choice.label}"
            for name, choice in zip(("compress", "compress-replies"), self._codecs, strict=True)
            if choice is not None
        ]
        return (
            f"{' '.join(given)} does nothing here: all workers share memory with the servers, so "
            f"that nothing has to be sent; --compress-always does it all the same"
        )

    @property
    def agreement(self) -> Message:
        """What two sides must agree on, in a form that shows where they do not; of a model with
        very many tensors, without their names."""
        model = self.manifest.in_short()
        return {
            "protocol": PROTOCOL,
            "num_shards": len(self.slices),
            "optimizer": repr(self.optimizer),
            "model": model if len(json.dumps(model)) < MAX_MODEL_BYTES else None,
            "fingerprint": self.fingerprint,
            **self._coding,
        }

    @property
    def budget(self) -> int | None:
        """How many updates there are to be, whoever makes them; None: each worker has its own
        steps to do."""
        return self.facts.total_updates if self.facts.elastic else None

    @property
    def step_size(self) -> int:
        """How many examples one gradient is computed on, by all towers of a worker; where the data
        comes in batches of its own, how many of those."""
        return self._drawn * self.config.batches_per_step

    @property
    def _drawn(self) -> int:
        """How many examples a worker draws at a time."""
        return (self.config.batch_size or 1) * (self.config.num_towers if self._is_cut else 1)

    @property
    def _is_cut(self) -> bool:
        """Into batches, here."""
        return self.config.batch_size is not None

    def make_model(self) -> FlatModel:
        """A replica with the run's initial weights. Seeds torch's own generator for a moment."""
        module = seeded_model(self.recipe, self.config.seed)
        if self.initial is not None:
            fill(module, self.initial.state)
        return FlatModel(module, self.manifest)

    def make_replicas(self, count: int) -> list[FlatModel]:
        """So many of them, each with parameters of its own."""
        replicas = [self.make_model() for _ in range(count)]
        if len({id(replica.parameters[0]) for replica in replicas}) < count:
            raise RecipeError(
                "the recipe's model() returned the same model twice; it must make a new one each "
                "time, since every worker needs one of its own"
            )
        return replicas

    @property
    def amp(self) -> str | None:
        """The shorter number format that steps are computed in; None: float32."""
        return None if self.config.amp == OFF else self.config.amp

    def devices(self, rank: int) -> list[torch.device]:
        """What worker `rank` computes on, if it is on this machine."""
        return find_devices(self.config.devices or self.config.device, rank)

    def crew(self, rank: int) -> tuple[int, ...]:
        """The workers of the process that has worker `rank`, itself among them."""
        return next((tuple(crew) for crew in self.facts.crews if rank in crew), (rank,))

    def make_towers(
        self, rank: int, model: FlatModel, tell: Callable[[str], None] = lambda line: None
    ) -> Towers:
        """What worker `rank` computes with; `model` becomes the first tower. `tell` is told of what
        is slower than it might be."""
        devices = self.devices(rank)
        more = [self.make_model() for _ in devices[1:]]
        # which rows a sparse gradient has, no recording can know
        captures = self.config.capture == AUTO and not self.manifest.is_sparse
        several = self.config.accumulate
        kind: Callable[..., Towers] = functools.partial(
            Towers, accumulates=several > 1, apart=self.config.overlap
        )
        if self.inner is not None:
            steps = self._make_inner(self.inner, rank)
            kind = functools.partial(LocalTowers, inner=steps, batches_per_step=several)
        return kind(
            [model, *more],
            devices,
            amp=self.amp is not None,
            make_recorder=make_recorder if captures else lambda device: None,
            tell=tell,
            compiled=Compiled(self.config.batch_size, tell) if self.config.compile else None,
            slot_device=self.slot_device(rank),
            clip=None if self._clips_updates else self._make_clip(),
        )

    def _make_inner(self, optimizer: Optimizer, rank: int = 0) -> Inner:
        length = self._length_of(rank) if self.config.paces else self._length_inside
        whole = reach_of(optimizer) > Reach.ELEMENT
        segments = segments_of(self.manifest, optimizer, 0, self.manifest.num_elements, whole=whole)
        return Inner(
            optimizer=optimizer,
            segments=segments,
            schedule=in_run(self.recipe.schedule, length),
            total_steps=length.total,
            steps_per_update=0.0 if self.config.paces else self._steps_per_update,
            fused=self.config.fused,
        )

    @property
    def _steps_per_update(self) -> float:
        """How many local steps of one worker an update of the servers stands for."""
        config = self.config
        num_gradients = self.make_discipline().gradients_per_update
        return config.most_local_steps * num_gradients / config.workers

    @property
    def _clips_updates(self) -> bool:
        """Whether servers clip what an update is made with; else workers their gradients. Where
        updates are no rounds, servers do not have the same gradients in them, and no norm is that
        of the whole."""
        in_rounds = self.config.chosen.kind.in_rounds and self.config.workers > 1
        return in_rounds and self.inner is None

    def _make_clip(self) -> Clip | None:
        """What makes too large a gradient smaller, where it is whole."""
        config = self.config
        if config.clips_by_norm and config.clip_norm is not None:
            return ClipNorm(config.clip_norm, [spec.numel for spec in self.manifest.tensors])
        return None if config.clip_value is None else ClipValue(config.clip_value)

    @functools.cached_property
    def server_device(self) -> torch.device:
        """Where the servers keep parameters and slots: on the GPU that all workers share, if they
        are threads of one process with it."""
        stays = self.config.server_device == "cpu" or self.config.is_durable
        return (None if stays else self._shared_gpu()) or CPU

    def _shared_gpu(self) -> torch.device | None:
        is_coded = self.is_coded and self.config.compress_always
        if self.facts.engine != "inproc" or is_coded or self.manifest.is_sparse:
            return None
        return shared_gpu([self.devices(rank) for rank in range(self.config.workers)])

    @functools.cached_property
    def sums(self) -> Sums:
        """Of a run without servers."""
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        return choose_sums(self.config.server_device, self._places, has_nccl=has_nccl)

    @property
    def _places(self) -> Places:
        """What every worker computes on. Ray gives whole GPUs to one worker only, and shows it no
        others."""
        config, ranks = self.config, range(self.config.workers)
        if config.engine != "ray":
            return [[str(device) for device in self.devices(rank)] for rank in ranks]
        name, has_own = config.device or "cpu", config.gpus_per_worker >= 1
        return [[f"{name} of worker {rank}" if has_own else name] for rank in ranks]

    def slot_device(self, rank: int) -> torch.device:
        """Where the parameters of worker `rank` arrive, and its gradients are handed over."""
        if self.facts.served:
            return self.server_device
        return self.devices(rank)[0] if self.sums.on_gpus else CPU

    @property
    def lends_gradients(self) -> bool:
        """Whether workers let a server have their gradients where they lie, on the device that they
        share. A discipline of the user's may want one when its worker is at the next."""
        return self.server_device != CPU and self.config.chosen.kind in BUILT_IN.values()

    def layout(self, shard: int, device: torch.device | None = None) -> Layout:
        """What travels between a worker and this shard's server; buffers go to shard 0. `device`:
        where it lies, if not with the servers."""
        lo, hi = self.slices[shard]
        first = shard == 0
        codec, replies = self.make_codec(), self.make_reply_codec()
        rows = rows_of(self.manifest, lo, hi)
        if self.is_coded and rows is not None:
            raise ConfigError("no codec can carry sparse gradients: train with sparse=False")
        return Layout(
            num_elements=hi - lo,
            num_tensors=len(self.manifest.tensors),
            num_floats=self.manifest.num_floats if first else 0,
            num_ints=self.manifest.num_ints if first else 0,
            num_rates=self.num_rates,
            coded_bytes=None if codec is None else codec.capacity(hi - lo),
            coded_reply_bytes=None if replies is None else replies.capacity(hi - lo),
            codes_always=self.config.compress_always,
            device=device or self.server_device,
            rows=rows,
        )

    def make_shard(self, index: int, device: torch.device | None = None) -> Shard:
        """Shard `index`, empty: what it starts from is for the master to say; `device` as above."""
        lo, hi = self.slices[index]
        layout = self.layout(index, device)
        return Shard(
            torch.zeros(hi - lo, device=layout.device),
            segments_of(self.manifest, self.optimizer, lo, hi, whole=self.facts.whole_tensors),
            self.optimizer,
            schedule=self.schedule,
            total_updates=self.facts.total_updates,
            ema_decay=self.recipe.ema,
            rule=self.make_rule(),
            fused=self.config.fused,
            floats=torch.zeros(layout.num_floats, device=layout.device),
            ints=torch.zeros(layout.num_ints, dtype=torch.int64, device=layout.device),
            clip=self._make_clip() if self._clips_updates and not self.joins_norms else None,
            joint_clip=self._make_joint_clip(lo, hi) if self.joins_norms else None,
            rows=layout.rows,
        )

    @property
    def joins_norms(self) -> bool:
        """Whether the norm that an update is clipped by is that of several servers' slices."""
        return self._clips_updates and self.config.clips_by_norm and len(self.slices) > 1

    def journal_mark(self, index: int, run: str = "") -> bytes:
        """For the journal of shard `index`: the same where what is in it can be made again, in the
        run of this name."""
        config = self.config
        told = {
            "run": run,
            "model": self.fingerprint,
            "slice": self.slices[index],
            "rule": config.rule,
            "clip": [config.clip_norm, config.clip_value] if self._clips_updates else None,
            "ema": self.recipe.ema,
            "fused": config.fused,
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).digest()

    def _make_joint_clip(self, lo: int, hi: int) -> ClipNorm:
        sizes = [s.hi - s.lo for s in segments_of(self.manifest, self.optimizer, lo, hi)]
        return ClipNorm(self.config.clip_norm or math.inf, sizes)

    @property
    def schedule(self) -> Schedule:
        """The servers': the recipe's, in a run as long as this one. Where workers take steps by
        themselves it is theirs, but for one that goes by scores."""
        if self.inner is not None and not isinstance(self.recipe.schedule, Plateau):
            return constant()
        return in_run(self.recipe.schedule, self._length)

    @property
    def _length(self) -> Length:
        facts = self.facts
        return Length(facts.total_updates, facts.updates_per_epoch, facts.epoch_shift)

    @property
    def _length_inside(self) -> Length:
        """The same in local steps."""
        length, several = self._length, self._steps_per_update
        total, per_epoch = length.total, length.per_epoch
        return Length(
            None if total is None else math.ceil(total * several),
            None if per_epoch is None else math.ceil(per_epoch * several),
            int(length.shift * several),
        )

    def _length_of(self, rank: int) -> Length:
        """In the local steps of one worker, which has its own place in the schedule."""
        several = self.config.accumulate
        total, per_epoch = self.num_batches(rank), self._batches_per_epoch(rank)
        return Length(
            None if total is None else -(-total // several),
            None if per_epoch is None else -(-per_epoch // several),
        )

    def make_rates(self, falls: Sequence[int] = ()) -> Rates:
        """What an update is made with."""
        return Rates(self.optimizer, self.schedule, self.facts.total_updates, falls)

    def rates_of_recipe(self) -> tuple[Optimizer, Schedule, Rates]:
        """The recipe's optimizer and schedule, wherever they are used, and what they come to."""
        if self.inner is None:
            return self.optimizer, self.schedule, self.make_rates()
        inner = self._make_inner(self.inner)
        rates = Rates(inner.optimizer, inner.schedule, inner.total_steps)
        return inner.optimizer, inner.schedule, rates

    def initial_state(self, index: int, model: FlatModel) -> ShardState:
        """Shard `index` as it is before the first update, cut out of `model`."""
        lo, hi = self.slices[index]
        layout = self.layout(index)
        tensors = {"params": model.params[lo:hi].to("cpu", copy=True)}
        floats = torch.zeros(layout.num_floats)
        ints = torch.zeros(layout.num_ints, dtype=torch.int64)
        if index == 0:
            model.write_buffers(floats, ints)
            buffers = {"floats": floats, "ints": ints}
            tensors |= {name: values for name, values in buffers.items() if values.numel()}
        return ShardState(version=0, tensors=tensors, accounts={})

    def make_discipline(self) -> Discipline:
        chosen = self.config.chosen
        return chosen.kind(range(self.config.workers), **chosen.values)

    def make_rule(self) -> Rule:
        return make_rule(self.config.rule, self.config.updates_per_pass)

    def make_codec(self) -> Codec | None:
        """For a link of a worker's, or a session of a server's; None: there is nothing to code."""
        if self.codec is None:
            return None
        made = self.codec.kind(**self.codec.values)
        return ErrorFeedback(made) if made.feeds_back else made

    def make_reply_codec(self) -> Codec | None:
        """For either end of a connection."""
        return (
            None if self.reply_codec is None else self.reply_codec.kind(**self.reply_codec.values)
        )

    def num_steps(self, rank: int) -> int | None:
        """How many gradients worker `rank` will compute, where that is known beforehand."""
        config = self.config
        if config.steps is not None:
            return config.steps
        per_epoch = self.steps_per_epoch(rank)
        if per_epoch is None:
            return None
        assert config.epochs is not None
        return config.epochs * per_epoch

    def num_batches(self, rank: int) -> int | None:
        """How many these steps go through, where that is known."""
        per_epoch = self._batches_per_epoch(rank)
        if self.config.steps is not None:
            return self._batches_after(per_epoch, self.config.steps)
        return None if per_epoch is None else (self.config.epochs or 0) * per_epoch

    def steps_per_epoch(self, rank: int) -> int | None:
        """How many steps worker `rank` takes to go through its share, where that is known."""
        per_epoch = self._batches_per_epoch(rank)
        return None if per_epoch is None else -(-per_epoch // self.config.batches_per_step)

    def _batches_per_epoch(self, rank: int) -> int | None:
        counts = self.facts.num_batches
        return None if counts is None else counts[min(rank, len(counts) - 1)]

    def batches(
        self,
        rank: int,
        start: int = 0,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda line: None,
    ) -> Generator[tuple[int, Batch], None, None]:
        """Worker `rank`'s training batches with their epochs."""
        with contextlib.closing(self.step_batches(rank, start, device, tell)) as batches:
            for found in batches:
                yield found.epoch, found.batch

    def step_batches(
        self,
        rank: int,
        start: int = 0,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda line: None,
    ) -> Generator[StepBatch, None, None]:
        """Worker `rank`'s training batches, from step `start` on (0: the first), until its work is
        done; on `device`, which is also where they are augmented. `tell` is told of what is slower
        than it might be. To be closed, since processes may be reading for it. Where slower workers
        take fewer local steps each says itself when a step ends, at the end of an epoch at the
        latest, and `start` counts batches."""
        made = self._make_batches(rank, start, device, tell)
        if self.recipe.feed != BATCHING:
            return made
        return prepared_ahead(in_this_stream(made, device), NUM_AHEAD)

    def _make_finish(
        self, rank: int, source: Source, device: torch.device, tell: Callable[[str], None]
    ) -> Callable[[Any, int], Batch]:
        """What makes the batch of a step on `device` out of a source's draft; in one go, where the
        source is there as well and that can be captured. Batches that are prepared ahead are
        several at a time, and have memory of their own."""
        captures = self.config.capture == AUTO and self.recipe.feed != BATCHING
        recorder = make_recorder(device) if captures else None
        augment = self.recipe.augment
        seed = functools.partial(make_seed, self.config.seed, "augment", rank)
        if recorder is not None and source.device == device:
            change = augment or _unchanged

            def make(draft: Any, generator: torch.Generator) -> Batch:
                return change(source.finished(draft), generator)

            at_once = CapturedAugment(make, device, recorder, tell)
            return lambda draft, step: at_once(draft, seed(step))
        if augment is None:
            return lambda draft, step: to_device(source.finished(draft), device)
        captured = CapturedAugment(augment, device, recorder, tell)
        return lambda draft, step: captured(to_device(source.finished(draft), device), seed(step))

    def _make_batches(
        self, rank: int, start: int, device: torch.device, tell: Callable[[str], None]
    ) -> Generator[StepBatch, None, None]:
        source = self._training_data(rank)
        source = source.on(device) if self.config.data_device == AUTO else source
        finish = self._make_finish(rank, source, device, tell)
        with source.opened(tell) as opened:
            drafts = self._drafts_at_will if self.config.paces else self._drafts
            for found in drafts(opened, rank, start):
                batch = finish(found.batch, found.number)
                yield dataclasses.replace(found, batch=batch)

    def _training_data(self, rank: int) -> Source:
        if not self.facts.by_rank:
            assert self.train is not None, "this process was given no training data"
            return self.train
        if rank not in self.of_rank:
            self.of_rank[rank] = load_data(self.config, self.recipe, rank)[0]
        return self.of_rank[rank]

    def _drafts(self, source: Source, rank: int, start: int) -> Generator[StepBatch, None, None]:
        """Of which batches are made, each in the place of its batch."""
        config, share = self.config, self.share(rank)
        before = self._batches_before(source.num_batches(share), start)
        number, epoch, first = (0, 0, 0) if before is None else source.find(share, before)
        step = start if number else 0
        last_step, last_epoch = config.steps or math.inf, config.epochs or math.inf
        if self.facts.elastic:  # a server says when it is enough
            last_step = last_epoch = math.inf
        while step < last_step and epoch < last_epoch:
            before = number
            drafts = source.drafts(share, epoch, first)
            for draft, ends_step in grouped(drafts, config.batches_per_step):
                if step >= start:
                    yield StepBatch(epoch, draft, number, ends_step)
                number += 1
                step += ends_step
                if step == last_step:
                    return
            if number == before:
                raise _nothing_for(rank)
            epoch += 1
            first = 0

    def _drafts_at_will(
        self, source: Source, rank: int, start: int
    ) -> Generator[StepBatch, None, None]:
        """The same from batch `start` on, as many of them as there would be otherwise."""
        config, share = self.config, self.share(rank)
        number, epoch, first = source.find(share, start)
        last_number: float = math.inf
        if config.steps is not None:
            last_number = self._batches_after(source.num_batches(share), config.steps)
        while number < last_number and epoch < (config.epochs or math.inf):
            before = number
            for draft, ends_epoch in grouped(source.drafts(share, epoch, first), sys.maxsize):
                number += 1
                if number > start:
                    is_last = ends_epoch or number == last_number
                    yield StepBatch(epoch, draft, number - 1, is_last)
                if number == last_number:
                    return
            if number == before:
                raise _nothing_for(rank)
            epoch += 1
            first = 0

    def _batches_after(self, per_epoch: int | None, steps: int) -> int:
        """How many a worker has gone through with so many steps, if it takes as many local ones as
        any; of a stream as if it had no end."""
        before = self._batches_before(per_epoch, steps)
        return steps * self.config.batches_per_step if before is None else before

    def _batches_before(self, per_epoch: int | None, step: int) -> int | None:
        """How many batches a worker that has so many in an epoch has gone through before it begins
        with `step`; None: it has to count them."""
        several = self.config.batches_per_step
        if per_epoch is None:
            return step if several == 1 else None
        steps = -(-per_epoch // several)
        return step // steps * per_epoch + step % steps * several

    def share(self, rank: int) -> Share:
        """What worker `rank` goes through."""
        config = self.config
        return Share(
            rank=rank,
            num_shares=config.workers,
            batch_size=self._drawn,
            seed=config.seed,
            disjoint=config.split == "disjoint" and not self.facts.by_rank,
        )

    @property
    def resolved(self) -> dict[str, Any]:
        """What the run really uses, whoever said so: flags, the recipe or the machine. Of a cluster
        only the master's own devices are known, and on Ray nobody's."""
        config = self.config
        known = {"cluster": 1, "ray": 0}.get(config.engine, config.workers)
        return {
            "optimizer": str(self.inner or self.optimizer),
            "lr": float((self.inner or self.optimizer).options["lr"]),
            "local_steps": config.local_steps,
            "outer_optimizer": str(self.optimizer) if self.inner else None,
            "overlap": config.overlap,
            "compress": None if self.codec is None else self.codec.label,
            "compress_replies": None if self.reply_codec is None else self.reply_codec.label,
            "compress_always": config.compress_always,
            "lr_scale": config.lr_scale,
            "schedule": schedule_name(self.recipe.schedule),
            "partition": TENSORS if self.facts.whole_tensors else ELEMENTS,
            "batch_size": config.batch_size,
            "accumulate": config.accumulate,
            "epochs": config.epochs,
            "steps": config.steps,
            "devices": [
                _one_or_all([str(device) for device in self.devices(rank)])
                if rank < known
                else None
                for rank in range(config.workers)
            ],
            "engine": self.facts.engine,
            "crews": self.facts.crews or None,
            "threads": config.threads,
            "amp": self.amp,
            **self._resolved_place,
            "feed": self.recipe.feed,
            "ema": self.recipe.ema,
            "eval_every": config.eval_every,
            "checkpoint_every": config.checkpoint_every or config.eval_every,
        }

    @property
    def _resolved_place(self) -> dict[str, str | None]:
        """Where parameters lie that are trained; without servers each worker's own."""
        if self.facts.served:
            return {"server_device": str(self.server_device), "backend": None}
        where = "cuda" if self.sums.on_gpus else "cpu"
        return {"server_device": where, "backend": self.sums.backend}

    # -- going on from a checkpoint ------------------------------------------------------------

    @property
    def plan(self) -> dict[str, Any]:
        """What a checkpoint must say of the run, so that another one can go on from it."""
        ranks = range(self.config.workers)
        return {
            **self._cut_by,
            "steps_per_epoch": [self.steps_per_epoch(rank) for rank in ranks],
            "batches_per_epoch": [self._batches_per_epoch(rank) for rank in ranks],
            "drawn": self._drawn,
        }

    @property
    def _cut_by(self) -> dict[str, Any]:
        """What shares and steps come of."""
        config = self.config
        return {
            "num_workers": config.workers,
            "batch_size": self.step_size,
            "split": config.split,
            "paces": config.paces,
        }

    @property
    def cut_mark(self) -> int:
        """The same for all runs in which a worker's step of one number goes through the same
        data."""
        return zlib.crc32(json.dumps(self._cut_by, sort_keys=True).encode())

    def states_after(self, checkpoint: Checkpoint) -> tuple[ShardState, ...]:
        """What servers that come empty go on from."""
        checkpoint.check_model(self.manifest)
        states = checkpoint.for_optimizer(self.optimizer.classes).recut(self.slices)
        starts = self.starts(checkpoint)
        if starts is None:
            return states
        return tuple(
            dataclasses.replace(state, accounts=moved(state.accounts, starts)) for state in states
        )

    def starts(self, checkpoint: Checkpoint) -> dict[int, Start] | None:
        """Where each worker goes on after `checkpoint`: with the incarnation of its last gradient
        that is in; None: the run is cut as it was, so that the shards' own books hold.

        With other shares a worker has done its part of what was gone through so far.
        """
        before, cut_by = {"paces": False, **checkpoint.plan}, self._cut_by
        if {key: before.get(key) for key in cut_by} == cut_by:
            return None
        applied = checkpoint.applied()
        incarnation = max((i for i, _ in applied.values()), default=0)
        done = {rank: sequence for rank, (_, sequence) in applied.items()}
        if (before["paces"] or self.config.paces) and "drawn" in before:
            return self._starts_by_batches(checkpoint, incarnation)
        found = {}
        for rank in range(self.config.workers):
            start = self._done(rank, done, before, self.steps_per_epoch(rank), self.step_size)
            batches = self._done(rank, done, before, self._batches_per_epoch(rank), self._drawn)
            found[rank] = self._start(rank, incarnation, start, batches)
        return found

    def _starts_by_batches(self, checkpoint: Checkpoint, incarnation: int) -> dict[int, Start]:
        """The same where pushes are no measure, since workers take different numbers of steps. With
        shares as they were each goes on where it was."""
        before, done = checkpoint.plan, checkpoint.batches()
        shares = {key: self.plan[key] for key in ("num_workers", "split", "drawn")}
        is_shared_out_alike = {key: before[key] for key in shares} == shares
        of_batches = {"steps_per_epoch": before["batches_per_epoch"], "batch_size": before["drawn"]}
        found = {}
        for rank in range(self.config.workers):
            per_epoch = self._batches_per_epoch(rank)
            batches = done.get(rank, 0)
            if not is_shared_out_alike:
                batches = self._done(rank, done, {**before, **of_batches}, per_epoch, self._drawn)
            epochs, rest = (0, batches) if per_epoch is None else divmod(batches, per_epoch)
            steps = epochs * (self.steps_per_epoch(rank) or 0)
            steps += rest // self.config.batches_per_step
            found[rank] = self._start(rank, incarnation, steps, batches)
        return found

    def _start(self, rank: int, incarnation: int, steps: int, batches: int) -> Start:
        """No later than the work is done."""
        steps = min(steps, self.num_steps(rank) or steps)
        if self.config.paces:  # it goes on after so many batches: some push has to stand for them
            batches = min(batches, self.num_batches(rank) or batches)
            steps = max(steps, int(batches > 0))
        return incarnation, steps, batches

    def _done(
        self,
        rank: int,
        done: Mapping[int, int],
        before: Mapping[str, Any],
        per_epoch: int | None,
        size: int,
    ) -> int:
        """How many of worker `rank`'s steps, or of its batches, go through its part of what the
        workers of a run that was cut otherwise have gone through in the steps that they have
        `done`. Epochs are what can be compared: they may end with odd batches. Of a stream,
        examples. `per_epoch`, `size`: steps now, and examples of one."""
        config = self.config
        of_ranks: Sequence[int | None] = before.get("steps_per_epoch") or [None]
        if per_epoch is None or None in of_ranks:
            num_examples = sum(done.values()) * int(before["batch_size"])
            return num_examples // (config.workers * size)
        passes = Fraction(0)
        for former, num_steps in done.items():
            passes += Fraction(num_steps, of_ranks[min(former, len(of_ranks) - 1)] or 1)
        if before["split"] == "disjoint":  # everybody's together are one through all of the data
            passes /= before["num_workers"]
        return int(passes * per_epoch / (1 if config.split == "disjoint" else config.workers))

    def total_updates_after(self, checkpoint: Checkpoint | None) -> int | None:
        """How many updates each shard will have seen in the end; None: not known."""
        steps = [self.num_steps(rank) for rank in range(self.config.workers)]
        known = [n for n in steps if n is not None]
        if len(known) < len(steps) or self.config.paces:
            return None
        version = 0
        if checkpoint is not None and not self.facts.elastic:
            version = checkpoint.version
            starts: Mapping[int, tuple[int, ...]]
            starts = self.starts(checkpoint) or checkpoint.applied()
            known = [max(0, n - starts.get(rank, (0, 0))[1]) for rank, n in enumerate(known)]
        return version + self.make_discipline().num_updates(known)


def load_data(
    config: TrainConfig, recipe: Recipe, rank: int = 0, asked: Callable[[], None] = lambda: None
) -> tuple[Source, Source | None]:
    """For worker `rank`; `asked` is called if the recipe wants to know that."""
    told = dataclasses.replace(config, batch_size=config.batch_size or recipe.batch_size)
    place = Place(rank=rank % config.workers, world_size=config.workers, asked=asked)
    with at(place):
        loaded = from_recipe("data", lambda: recipe.data(told))
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        raise RecipeError("the recipe's data(config) must return a pair: training data, test data")
    train, test = loaded
    source = make_source(train, "training", recipe.collate, config.loader_workers)
    return source, None if test is None else make_source(test, "test", recipe.collate)


def seeded_model(recipe: Recipe, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(make_seed(seed, "model"))
        model = from_recipe("model", recipe.model)
    if not isinstance(model, nn.Module):
        raise RecipeError(f"the recipe's model() returned a {type(model).__name__}, not a Module")
    return model


def from_recipe(what: str, call: Callable[[], Any]) -> Any:
    """Call a function of the user's; what it raises becomes one line that says where from."""
    try:
        return call()
    except OffbeatError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(f"the recipe's {what} function failed: {in_a_line(error)}") from error


def _nothing_for(rank: int) -> DataError:
    return DataError(
        f"the training data has nothing for worker {rank}: it is empty, or there are more workers "
        f"than examples"
    )


def _unchanged(batch: Batch, generator: torch.Generator) -> Batch:
    return batch


def _one_or_all(names: list[str]) -> str | list[str]:
    return names if len(names) > 1 else names[0]


def disagreement(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The first thing in which two sides' agreements differ, in words; empty: nothing."""
    for key, name in (
        ("protocol", "the protocol's version"),
        ("num_shards", "the number of servers"),
        ("optimizer", "the optimizer"),
        ("codec", "the codec"),
        ("reply_codec", "the codec of replies"),
        ("compress_always", "compress_always"),
    ):
        if theirs.get(key) != ours.get(key):
            return f"{name} is {theirs.get(key)} there, {ours.get(key)} here"
    model, our_model = theirs.get("model"), ours.get("model")
    if isinstance(model, list) and isinstance(our_model, list):
        for there, here in itertools.zip_longest(model, our_model):
            if there != here:
                return f"the model has {_tensor(there)} there, {_tensor(here)} here"
    if theirs.get("fingerprint") != ours.get("fingerprint"):
        return "the model: its tensors, or which of them are frozen, tied or buffers"
    return ""


def _tensor(described: Any) -> str:
    match described:
        case [str(name), list(shape), str(dtype)]:
            return f"{name} {shape} {dtype}"
    return "nothing more" if described is None else "something odd"
