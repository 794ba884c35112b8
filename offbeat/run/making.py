"""How a job (run/job.py) is made: options, recipe, model and data resolved and checked together.

The command, or whoever trains from Python, makes one, which touches no file of the run: whatever is
wrong shows here, before anything is left behind. Every process of the run makes the same again:

    job = make_job(config, recipe)
    job = rejoin_job(config, recipe, facts, sources)
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from offbeat.compiling import check_toolchain
from offbeat.config import (
    ELEMENTS,
    LR_SCALES,
    TENSORS,
    TrainConfig,
    check_clipping,
)
from offbeat.data.batches import (
    Asked,
    Share,
    Source,
)
from offbeat.data.loaders import is_cut_twice
from offbeat.decline import Plateau
from offbeat.errors import (
    ConfigError,
    RecipeError,
    nearest,
)
from offbeat.flat import Manifest, describe
from offbeat.optim import Optimizer, named_optimizer, schedule_name
from offbeat.probing import Reach, check_rows, reach_of
from offbeat.recipes.base import Recipe, accuracy, directions, metric_name, what_falls
from offbeat.rules import make_rule
from offbeat.run.checkpoint import Checkpoint
from offbeat.run.crews import choose_engine
from offbeat.run.initial import Initial, read_initial
from offbeat.run.job import Facts, Job, from_recipe, load_data, seeded_model
from offbeat.schedules import TorchSchedule
from offbeat.shard import (
    partition,
    partition_rows,
    partition_tensors,
)
from offbeat.towers import CPU, find_devices
from offbeat.transport.codecs import gradient_codec, reply_codec

OF_ROUNDS, BESIDE_MOMENTUM = "nesterov:lr=0.7", 0.7
"""What servers have where workers take steps by themselves: for the mean of a round as DiLoCo's
paper found it best, and the rate where the rule has a momentum."""
NUM_LOOKED_AT = 2
"""Test examples that say which metric fits."""


def make_job(
    config: TrainConfig,
    recipe: Recipe,
    checkpoint: Checkpoint | None = None,
    *,
    elastic: bool = False,
    kept_initial: Path | None = None,
) -> Job:
    """Resolve and check everything that can be checked before the run begins; `checkpoint` is what
    it goes on from; `elastic`: let workers come and go where the run is of that kind;
    `kept_initial`: where a run that goes on has what --init once gave it."""
    recipe, asked = recipe.fed(config.feed), config.batch_size
    optimizer, inner = _resolve_optimizers(config, recipe)
    for each in (optimizer, inner):
        if each is not None:
            each.check(fused=config.fused)
    config = _resolve_suggestions(config, recipe)
    check_clipping(config)
    here = "cpu" if config.engine == "ray" else config.devices or config.device
    devices = [  # one that is not here is a usage error
        find_devices(here, rank) for rank in range(config.workers)
    ]
    engine, crews = choose_engine(config, devices)
    if config.compile:
        check_toolchain(itertools.chain(*devices))
    module = seeded_model(recipe, config.seed)
    manifest = describe(module)
    _check_values(module)
    _check_groups(inner or optimizer, manifest)
    if inner is not None:
        _check_local_steps(inner, manifest)
    check_servers(config, manifest)
    if manifest.is_sparse and not config.chosen.kind.served:
        raise ConfigError(
            f"{config.chosen.kind.name} adds up whole gradients, not rows: train with sparse=False"
        )
    if checkpoint is not None:
        checkpoint.check_model(manifest)
    initial = _find_initial(config, module, manifest, kept_initial)
    asked_rank = Asked()
    train, test = load_data(config, recipe, asked=asked_rank)
    by_rank = bool(asked_rank)
    config = dataclasses.replace(config, batch_size=_resolve_batch_size(asked, config, train))
    num_examples = None if by_rank else train.num_examples
    _check_data(config, train, by_rank=by_rank)
    by_loss = _is_judged_by_loss(recipe, module, test)
    is_counted = train.num_batches(Share(rank=0, num_shares=1, batch_size=1, seed=0)) is not None
    recipe = recipe.judged(by_loss=by_loss)
    facts = Facts(
        num_examples=num_examples,
        by_rank=by_rank,
        has_test=test is not None,
        total_updates=None,
        by_loss=by_loss,
        in_rounds=config.chosen.kind.in_rounds,
        served=config.chosen.kind.served,
        variant=config.variant,
        elastic=elastic
        and (is_counted or config.steps is not None)
        and config.split == "shared"
        and not config.chosen.kind.in_rounds,
        engine=engine,
        higher_is_better=directions(recipe).get(metric_name(recipe)),
        crews=crews,
        whole_tensors=needs_whole_tensors(config, optimizer, manifest),
    )
    if config.paces and facts.elastic:
        raise ConfigError(
            f"local_steps {config.local_steps} has every worker go through batches of its own, and "
            f"here any of them does any step: say --split disjoint, or {config.most_local_steps}"
        )
    if config.most_workers is not None and not facts.elastic:
        raise ConfigError(
            f"workers {config.workers}..{config.most_workers}: the training data does not say how "
            f"long it is, so that nobody knows when the run is over: give --steps N"
        )
    job = _cut(config, recipe, manifest, facts)
    job = dataclasses.replace(job, train=train, test=test, initial=initial)
    job = dataclasses.replace(
        job, facts=_with_num_batches(job, train), of_rank={0: train} if by_rank else {}
    )
    job.layout(0)  # which not every codec can have
    if not config.chosen.kind.served:
        _ = job.sums  # which --server-device may not allow
    elif config.server_device == "cuda" and job.server_device == CPU:
        raise ConfigError(
            "the servers cannot be on cuda: that takes workers that are threads of one process "
            "(--engine inproc) and compute on one GPU, one each, and no sparse gradients"
        )
    _check_rule(job)
    _check_joint_norms(job)
    job = dataclasses.replace(job, facts=_with_length(job, checkpoint))
    # a schedule that needs a length, or takes other arguments, says so now
    from_recipe("schedule", lambda: float(job.rates_of_recipe()[2].at(0)[0]["lr"]))
    _check_lr(job)
    if config.eval_every is None:
        config = dataclasses.replace(config, eval_every=_updates_per_epoch(job))
    _check_judging(config, recipe, facts)
    _check_plateau(config, recipe, facts)
    return dataclasses.replace(job, config=config)


def check_servers(config: TrainConfig, manifest: Manifest) -> None:
    if config.servers > manifest.num_elements:
        raise ConfigError(
            f"{config.servers} servers for {manifest.num_elements} parameters: each server needs "
            f"at least one; lower servers"
        )


def _check_joint_norms(job: Job) -> None:
    if job.config.is_durable and job.joins_norms:
        raise ConfigError(
            "ack durable has each server's updates in its own journal, and a round that is clipped "
            "by the norm of several servers' slices is in none as a whole: say --servers 1, or "
            "--clip-value, or --clip-norm inf"
        )


def _check_rule(job: Job) -> None:
    rule, members = job.make_rule(), job.optimizer.members
    if rule.remembers and job.manifest.is_sparse:
        raise ConfigError(
            f"the rule {rule.name} keeps something for every element, and sparse gradients have "
            f"some rows only: train with sparse=False"
        )
    if rule.has_momentum and any(member.options.get("momentum") for member in members):
        raise ConfigError(
            f"the rule {rule.name} has a momentum of its own: give the servers an optimizer "
            f"without, as --optimizer sgd (with --local-steps: --outer-optimizer SGD:lr=0.7)"
        )


def _check_data(config: TrainConfig, train: Source, *, by_rank: bool) -> None:
    """`by_rank`: each worker has its own."""
    if by_rank and is_cut_twice(train):
        raise ConfigError(
            "the DataLoader has a DistributedSampler, and its shares are cut here: give it no "
            "offbeat.rank(), or no DistributedSampler"
        )
    is_counted = train.num_examples is not None and not by_rank
    if is_counted and (train.num_examples or 0) < config.workers:
        raise ConfigError(
            f"{config.workers} workers for {train.num_examples} training examples; lower workers"
        )


def _with_length(job: Job, checkpoint: Checkpoint | None) -> Facts:
    """The job's facts, with the run's length in updates."""
    total, planned = job.total_updates_after(checkpoint), job.total_updates_after(None)
    steps = [job.steps_per_epoch(rank) for rank in range(job.config.workers)]
    known = [n for n in steps if n is not None]
    count = job.make_discipline().num_updates
    return dataclasses.replace(
        job.facts,
        total_updates=total,
        updates_per_epoch=count(known) if len(known) == len(steps) else None,
        epoch_shift=0 if total is None or planned is None else planned - total,
    )


def _find_initial(
    config: TrainConfig, module: nn.Module, manifest: Manifest, kept: Path | None
) -> Initial | None:
    if config.init is None:
        return None
    if config.engine == "cluster" and manifest.frozen:
        raise ConfigError(
            "init does not reach parameters that do not train on other machines: have the recipe's "
            "model() load them"
        )
    return read_initial(kept or Path(config.init), module)


def _check_lr(job: Job) -> None:
    """Whether a learning rate that somebody asks for is used: some of torch's schedulers have rates
    of their own."""
    config, (optimizer, schedule, _) = job.config, job.rates_of_recipe()
    asked = f"--lr {config.lr:g}" if config.lr is not None else f"--lr-scale {config.lr_scale}"
    if config.lr is None and config.lr_scale == "none":
        return
    if isinstance(schedule, TorchSchedule) and schedule.sets_rates(optimizer):
        raise ConfigError(
            f"{asked} would change nothing: {schedule_name(schedule)} sets rates of its own; leave "
            f"it out, and give the schedule another {schedule.own_rates()}"
        )


def _check_judging(config: TrainConfig, recipe: Recipe, facts: Facts) -> None:
    """Whether there will be scores that something can follow from."""
    if not config.is_judged:
        return
    what = "stop_at, patience and keep_best"
    if config.engine == "cluster":
        raise ConfigError(f"{what} need an evaluator beside training, which a cluster has not")
    if not facts.has_test:
        raise ConfigError(f"{what} need test data to score on, and the recipe has none")
    stops_by, level = config.stops_at or (None, None)
    judges = stops_by is None or config.patience is not None or config.keep_best
    if judges and facts.higher_is_better is None:
        name = metric_name(recipe)
        raise ConfigError(
            f"{what} need to know whether more {name} is better: say so in the recipe, as "
            f"metric=offbeat.metric({name}, higher_is_better=False)"
        )
    if stops_by is not None and (known := directions(recipe)).get(stops_by) is None:
        what = f"stop_at goes by {stops_by!r}"
        if stops_by not in known:
            raise ConfigError(f"{what}, which nothing is scored by; {nearest(stops_by, known)}")
        raise ConfigError(
            f"{what}, of which nobody said whether more is better: say so in the recipe, as "
            f"offbeat.metric({stops_by}, higher_is_better=False)"
        )
    if level is not None and 1 < level < math.inf and _is_accuracy(recipe, stops_by):
        raise ConfigError(f"stop_at {level:g} is never reached: an accuracy is 1 at most")
    if config.eval_every == 0 and (config.stop_at is not None or config.patience is not None):
        raise ConfigError("stop_at and patience need scores along the way: give --eval-every")


def _is_accuracy(recipe: Recipe, name: str | None) -> bool:
    """Whether it is by this, or by the metric that a run is judged by."""
    chosen = recipe.metrics.get(name or metric_name(recipe), recipe.metric)
    return chosen is accuracy or (chosen is None and metric_name(recipe) == "accuracy")


def _check_plateau(config: TrainConfig, recipe: Recipe, facts: Facts) -> None:
    """Whether a schedule that goes by scores will have some."""
    schedule = recipe.schedule
    if not isinstance(schedule, Plateau):
        return
    if config.engine == "cluster":
        raise ConfigError(
            "a plateau schedule needs an evaluator beside training, which a cluster has not"
        )
    if not facts.has_test:
        raise ConfigError("a plateau schedule needs test data to score on; the recipe has none")
    if config.eval_every == 0:
        raise ConfigError("a plateau schedule needs scores along the way: give --eval-every")
    name, most = what_falls(recipe, schedule)
    if most is None:
        raise ConfigError(
            f"a plateau schedule needs to know whether more {name} is better: say mode='min' or "
            f"mode='max', or metric=offbeat.metric({name}, higher_is_better=False)"
        )


def rejoin_job(
    config: TrainConfig,
    recipe: Recipe,
    facts: Facts,
    sources: Mapping[str, Source] | None,
    kept_initial: Path | None = None,
    needs: Collection[str] = ("train", "test"),
) -> Job:
    """The same job in another process. `config` and `facts` are as `make_job` left them; `sources`
    are what is shared of the data, what else it `needs` is loaded here; None: it needs no data.
    `kept_initial`: what --init gave; None: this process trains nothing from the start."""
    recipe = recipe.fed(config.feed).judged(by_loss=facts.by_loss)
    module = seeded_model(recipe, config.seed)
    job = _cut(config, recipe, describe(module), facts)
    if kept_initial is not None and config.init is not None:
        job = dataclasses.replace(job, initial=read_initial(kept_initial, module))
    if sources is None:
        return job
    # what is each worker's own is loaded when it begins
    exists = {"train": not facts.by_rank, "test": facts.has_test}
    missing = [name for name in needs if exists[name] and name not in sources]
    train, test = load_data(config, recipe) if missing else (None, None)
    return dataclasses.replace(
        job, train=sources.get("train", train), test=sources.get("test", test)
    )


def _cut(config: TrainConfig, recipe: Recipe, manifest: Manifest, facts: Facts) -> Job:
    optimizer, inner = _resolve_optimizers(config, recipe)
    return Job(
        config=config,
        recipe=recipe,
        codec=gradient_codec(config.compress),
        reply_codec=reply_codec(config.compress_replies),
        optimizer=optimizer,
        inner=inner,
        manifest=manifest,
        slices=cut_slices(manifest, config.servers, whole=facts.whole_tensors),
        facts=facts,
    )


def cut_slices(manifest: Manifest, servers: int, *, whole: bool) -> tuple[tuple[int, int], ...]:
    """What each server has of the flat vector; `whole`: cut between tensors."""
    if whole:
        return tuple(partition_tensors(manifest, servers))
    if manifest.is_sparse:
        return tuple(partition_rows(manifest, servers))
    return tuple(partition(manifest.num_elements, servers))


def _resolve_optimizers(config: TrainConfig, recipe: Recipe) -> tuple[Optimizer, Optimizer | None]:
    """The servers', and that of steps which workers take by themselves; None: there are none. One
    such step with plain SGD is the gradient times a rate: then that is how it is computed."""
    asked = _resolve_optimizer(config, recipe)
    if config.local_steps is None:
        return asked, None
    outer = named_optimizer(config.outer_optimizer or _suggested_outer(config))
    if config.most_local_steps == 1 and asked.is_plain_sgd and not asked.groups:
        return outer.scaled(asked.options["lr"]), None
    return outer, asked


def _suggested_outer(config: TrainConfig) -> str:
    """While every worker pushes once, the servers go as far as those went on average."""
    rule = make_rule(config.rule)
    if config.chosen.kind.in_rounds and not rule.has_momentum:
        return OF_ROUNDS
    rate = BESIDE_MOMENTUM if rule.has_momentum else 1.0
    if config.most_local_steps != 1 and not rule.shares_a_pass:
        rate /= max(1.0, config.updates_per_pass)  # a mean of more than that goes no further
    return f"SGD:lr={rate:.6g}"


def _check_local_steps(inner: Optimizer, manifest: Manifest) -> None:
    if manifest.is_sparse:
        raise ConfigError(
            "local_steps move whole tensors, not rows of sparse ones: train with sparse=False"
        )
    if reach_of(inner) > Reach.ELEMENT:
        inner.check_shapes([(s.name, s.shape) for s in manifest.tensors if s.numel])


def _resolve_optimizer(config: TrainConfig, recipe: Recipe) -> Optimizer:
    optimizer = recipe.optimizer
    if config.optimizer is not None:
        optimizer = dataclasses.replace(named_optimizer(config.optimizer), groups=optimizer.groups)
    if config.lr is not None:
        optimizer = optimizer.with_lr(config.lr)
    factor = LR_SCALES[config.lr_scale](config.workers)
    return optimizer if factor == 1 else optimizer.scaled(factor)


def needs_whole_tensors(config: TrainConfig, optimizer: Optimizer, manifest: Manifest) -> bool:
    """Whether the slices are cut between tensors, which the optimizer may need."""
    check_rows(optimizer, manifest, fused=config.fused)
    reach = reach_of(optimizer)
    if reach > Reach.ELEMENT and config.partition == ELEMENTS:
        raise ConfigError(
            f"the optimizer {optimizer.kind} needs whole tensors: its update of an element depends "
            f"on others; leave partition {ELEMENTS} out"
        )
    if reach > Reach.TENSOR and config.servers > 1:
        raise ConfigError(
            f"the optimizer {optimizer.kind} needs all parameters in one place: its update of a "
            f"tensor depends on the others; use 1 server"
        )
    is_whole = reach > Reach.ELEMENT or config.partition == TENSORS
    if is_whole:
        optimizer.check_shapes([(s.name, s.shape) for s in manifest.tensors if s.numel])
    return is_whole


def _check_values(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not bool(parameter.isfinite().all()):
            raise RecipeError(
                f"the recipe's model() returned a parameter with NaN or infinite values: {name}"
            )


def _check_groups(optimizer: Optimizer, manifest: Manifest) -> None:
    used = {optimizer.group_of(spec.name) for spec in manifest.tensors}
    for index, pattern in enumerate(optimizer.groups, start=1):
        if index not in used:
            names = [spec.name for spec in manifest.tensors]
            raise ConfigError(
                f"the parameter group {pattern!r} matches no parameter; {nearest(pattern, names)}"
            )


def _resolve_suggestions(config: TrainConfig, recipe: Recipe) -> TrainConfig:
    """What the recipe and the machine suggest where no option says otherwise."""
    epochs = config.epochs
    if epochs is None and config.steps is None:
        epochs = recipe.epochs
    return dataclasses.replace(
        config,
        epochs=epochs,
        batch_size=config.batch_size or recipe.batch_size,
        threads=config.threads or _own_threads(config),
        amp=config.amp or recipe.amp,
        device=_device_of_actors(config) if config.engine == "ray" else config.device,
        clip_norm=recipe.clip_norm
        if config.clip_norm is None and config.clip_value is None
        else config.clip_norm,
    )


def _device_of_actors(config: TrainConfig) -> str:
    """Ray shows each worker the GPUs that it is given, and no others."""
    return config.device or ("cuda" if config.gpus_per_worker else "cpu")


def _own_threads(config: TrainConfig) -> int:
    """A worker's part of its machine's cores."""
    if config.engine == "ray":
        return max(1, int(config.cpus_per_worker))
    sharing = 1 if config.engine == "cluster" else config.workers
    return max(1, (os.cpu_count() or 1) // sharing)


def _resolve_batch_size(asked: int | None, config: TrainConfig, train: Source) -> int | None:
    """`asked` for, or what the data suggests, or the recipe; None: the data comes in batches."""
    if train.own_batches is None:
        return asked or train.batch_size or config.batch_size
    if asked is not None:
        raise ConfigError(
            f"batch_size {asked}: the DataLoader's {train.own_batches} decides what is in a batch; "
            f"leave --batch-size out"
        )
    return None


def _with_num_batches(job: Job, train: Source) -> Facts:
    ranks = [0 if job.facts.by_rank else rank for rank in range(job.config.workers)]
    found = [train.num_batches(job.share(rank)) for rank in ranks]  # about, where each has its own
    known = [count for count in found if count is not None]
    if 0 in known:
        raise ConfigError(
            f"the DataLoader gives worker {known.index(0)} of {len(known)} no batch at all; lower "
            f"workers{'' if job.config.batch_size is None else ' or batch_size'}"
        )
    return dataclasses.replace(job.facts, num_batches=known if len(known) == len(found) else None)


def _is_judged_by_loss(recipe: Recipe, module: nn.Module, test: Source | None) -> bool:
    """Whether a recipe without a metric is one that accuracy says nothing about, to judge by a few
    test examples. Where the recipe asks for accuracy that is an error."""
    given = [recipe.metric] if recipe.metric else list(recipe.metrics.values())
    if test is None or (given and accuracy not in given):
        return False
    batch = from_recipe("data", lambda: test.first(NUM_LOOKED_AT))
    if batch is None:
        return False
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            accuracy(module, batch)
    except RecipeError:
        if given:
            raise
        return True
    except Exception:  # a model that a loss calls in another way, or one for another device
        return not given
    return False


def _updates_per_epoch(job: Job) -> int:
    """About how many updates it takes until every example was used once; 0: not known."""
    counts, num_examples = job.facts.num_batches, job.facts.num_examples
    if counts is None:
        return 0
    steps = [-(-count // job.config.batches_per_step) for count in counts]
    num_steps = sum(steps) if job.config.split == "disjoint" else steps[0]
    if num_examples is not None:
        num_steps = -(-num_examples // job.step_size)
    return max(1, num_steps // job.make_discipline().gradients_per_update)
