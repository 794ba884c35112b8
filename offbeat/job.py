"""A job: configuration and recipe, resolved against the model and the data. What every role is
given.

Making one touches no file of the run, so whatever is wrong with a configuration shows here, before
anything is left behind.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offbeat.config import TrainConfig
from offbeat.data.batches import Batch, Source, make_source
from offbeat.errors import ConfigError, DataError, OffbeatError, RecipeError, in_a_line, nearest
from offbeat.flat import FlatModel, Manifest, describe
from offbeat.optim import BY_NAME, Optimizer
from offbeat.randomness import make_generator, make_seed
from offbeat.recipes.base import Recipe
from offbeat.shard import Shard, partition, segments_of
from offbeat.transport.base import Layout


@dataclass(frozen=True, kw_only=True)
class Job:
    """`config` has no None left in it that concerns the length or the pace of training."""

    config: TrainConfig
    recipe: Recipe
    optimizer: Optimizer
    manifest: Manifest
    train: Source
    test: Source | None
    slices: tuple[tuple[int, int], ...]
    total_updates: int | None
    """How many updates each shard will see if nobody drops out; None: not known beforehand."""

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint(repr(self.optimizer))

    def make_model(self) -> FlatModel:
        """A replica with the run's initial weights. Seeds torch's own generator for a moment."""
        return FlatModel(_seeded_model(self.recipe, self.config.seed), self.manifest)

    def make_replicas(self, count: int) -> list[FlatModel]:
        """So many of them, each with parameters of its own."""
        replicas = [self.make_model() for _ in range(count)]
        if len({id(replica.parameters[0]) for replica in replicas}) < count:
            raise RecipeError(
                "the recipe's model() returned the same model twice; it must make a new one each "
                "time, since every worker needs one of its own"
            )
        return replicas

    def layout(self, shard: int) -> Layout:
        """What travels between a worker and this shard's server; buffers go to shard 0."""
        lo, hi = self.slices[shard]
        first = shard == 0
        return Layout(
            num_elements=hi - lo,
            num_tensors=len(self.manifest.tensors),
            num_floats=self.manifest.num_floats if first else 0,
            num_ints=self.manifest.num_ints if first else 0,
        )

    def make_shard(self, index: int, model: FlatModel) -> Shard:
        """Shard `index` as it is before the first update, cut out of `model`."""
        lo, hi = self.slices[index]
        layout = self.layout(index)
        floats = torch.zeros(layout.num_floats)
        ints = torch.zeros(layout.num_ints, dtype=torch.int64)
        if index == 0:
            model.write_buffers(floats, ints)
        return Shard(
            model.params[lo:hi].clone(),
            segments_of(self.manifest, self.optimizer, lo, hi),
            self.optimizer,
            schedule=self.recipe.schedule,
            total_updates=self.total_updates,
            ema_decay=self.recipe.ema,
            reduce=self.config.reduce,
            fused=self.config.fused,
            floats=floats,
            ints=ints,
        )

    def num_steps(self, rank: int) -> int | None:
        """How many gradients worker `rank` will compute, where that is known beforehand."""
        config = self.config
        if config.steps is not None:
            return config.steps
        assert config.epochs is not None and config.batch_size is not None
        size = self.train.share_size(rank, config.workers)
        return None if size is None else config.epochs * -(-size // config.batch_size)

    def batches(self, rank: int) -> Iterator[tuple[int, Batch]]:
        """Worker `rank`'s training batches with their epochs, until its work is done."""
        config = self.config
        assert config.batch_size is not None
        step = epoch = 0
        while config.steps is not None or epoch < (config.epochs or 0):
            first = step
            for batch in self.train.train(
                rank, config.workers, config.batch_size, config.seed, epoch
            ):
                if self.recipe.augment is not None:
                    generator = make_generator(config.seed, "augment", rank, step)
                    batch = self.recipe.augment(batch, generator)
                yield epoch, batch
                step += 1
                if step == config.steps:
                    return
            if step == first:
                raise DataError(
                    f"the training data has nothing for worker {rank}: it is empty, or there are "
                    f"more workers than examples"
                )
            epoch += 1


def make_job(config: TrainConfig, recipe: Recipe) -> Job:
    """Resolve and check everything that can be checked before the run begins."""
    optimizer = _resolve_optimizer(config, recipe)
    optimizer.check(fused=config.fused)
    config = _resolve_length(config, recipe)
    manifest = describe(_seeded_model(recipe, config.seed))
    _check_groups(optimizer, manifest)
    if config.servers > manifest.num_elements:
        raise ConfigError(
            f"{config.servers} servers for {manifest.num_elements} parameters: each server needs "
            f"at least one; lower servers"
        )
    train, test = _load_data(config, recipe)
    if train.num_examples is not None and train.num_examples < config.workers:
        raise ConfigError(
            f"{config.workers} workers for {train.num_examples} training examples; lower workers"
        )
    job = Job(
        config=config,
        recipe=recipe,
        optimizer=optimizer,
        manifest=manifest,
        train=train,
        test=test,
        slices=tuple(partition(manifest.num_elements, config.servers)),
        total_updates=None,
    )
    job = dataclasses.replace(job, total_updates=_total_updates(job))
    # a schedule that needs a length, or takes other arguments, says so now
    _from_recipe("schedule", lambda: float(recipe.schedule(0, job.total_updates)))
    if config.eval_every is None:
        config = dataclasses.replace(config, eval_every=_updates_per_epoch(job))
    return dataclasses.replace(job, config=config)


def _resolve_optimizer(config: TrainConfig, recipe: Recipe) -> Optimizer:
    optimizer = recipe.optimizer
    if config.optimizer is not None:
        optimizer = dataclasses.replace(BY_NAME[config.optimizer](), groups=optimizer.groups)
    return optimizer if config.lr is None else optimizer.with_lr(config.lr)


def _check_groups(optimizer: Optimizer, manifest: Manifest) -> None:
    used = {optimizer.group_of(spec.name) for spec in manifest.tensors}
    for index, pattern in enumerate(optimizer.groups, start=1):
        if index not in used:
            names = [spec.name for spec in manifest.tensors]
            raise ConfigError(
                f"the parameter group {pattern!r} matches no parameter; {nearest(pattern, names)}"
            )


def _resolve_length(config: TrainConfig, recipe: Recipe) -> TrainConfig:
    epochs = config.epochs
    if epochs is None and config.steps is None:
        epochs = recipe.epochs
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.workers)
    batch_size = config.batch_size or recipe.batch_size
    return dataclasses.replace(config, epochs=epochs, batch_size=batch_size, threads=threads)


def _load_data(config: TrainConfig, recipe: Recipe) -> tuple[Source, Source | None]:
    loaded = _from_recipe("data", lambda: recipe.data(config))
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        raise RecipeError("the recipe's data(config) must return a pair: training data, test data")
    train, test = loaded
    return make_source(train, "training"), None if test is None else make_source(test, "test")


def _seeded_model(recipe: Recipe, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(make_seed(seed, "model"))
        model = _from_recipe("model", recipe.model)
    if not isinstance(model, nn.Module):
        raise RecipeError(f"the recipe's model() returned a {type(model).__name__}, not a Module")
    return model


def _from_recipe(what: str, call: Callable[[], Any]) -> Any:
    """Call a function of the user's; what it raises becomes one line that says where from."""
    try:
        return call()
    except OffbeatError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(f"the recipe's {what} function failed: {in_a_line(error)}") from error


def _total_updates(job: Job) -> int | None:
    steps = [job.num_steps(rank) for rank in range(job.config.workers)]
    known = [n for n in steps if n is not None]
    if len(known) < len(steps):
        return None
    return max(known) if job.config.discipline == "sync" else sum(known)


def _updates_per_epoch(job: Job) -> int:
    """About how many updates it takes until every example was used once; 0: not known."""
    if job.train.num_examples is None or job.config.batch_size is None:
        return 0
    num_batches = -(-job.train.num_examples // job.config.batch_size)
    per_update = job.config.workers if job.config.discipline == "sync" else 1
    return max(1, num_batches // per_update)
