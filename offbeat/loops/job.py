"""The job of somebody's own loop: what servers, master and workers have to know of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from offbeat.config import CHECKPOINT_EVERY, TrainConfig
from offbeat.errors import ConfigError
from offbeat.flat import FlatModel, Manifest
from offbeat.loops.description import Description
from offbeat.optim import SGD, numbers_of
from offbeat.recipes.base import Recipe
from offbeat.run.job import Facts, Job
from offbeat.run.making import check_servers, cut_slices, needs_whole_tensors
from offbeat.shard import ShardState
from offbeat.transport.codecs import gradient_codec, reply_codec


def _is_the_scripts(*arguments: object) -> NoReturn:
    raise AssertionError("model, data and loss are the script's")


_RECIPE = Recipe(model=_is_the_scripts, data=_is_the_scripts, loss=_is_the_scripts)


@dataclass(frozen=True, kw_only=True)
class LoopJob(Job):
    kept: Sequence[Mapping[str, Tensor]] = field(default=(), repr=False, compare=False)
    """What the optimizer of rank 0 brings along, for each slice; known where the books are kept."""

    def initial_state(self, index: int, model: FlatModel) -> ShardState:
        begun = super().initial_state(index, model)
        kept = self.kept[index] if self.kept else {}
        return dataclasses.replace(begun, tensors={**begun.tensors, **kept})


def make_loop_job(config: TrainConfig, description: Description | None) -> LoopJob:
    """None: what is trained is not known yet, and neither are the servers' slices."""
    manifest = Manifest(tensors=(), floats=(), ints=(), frozen=(), aliases={})
    optimizer = SGD()
    if description is not None:
        manifest, optimizer = description.manifest, description.optimizer
    is_known = description is not None
    if is_known:
        check_servers(config, manifest)
    whole = is_known and needs_whole_tensors(config, optimizer, manifest)
    return LoopJob(
        config=config,
        recipe=_RECIPE,
        optimizer=optimizer,
        codec=gradient_codec(config.compress),
        reply_codec=reply_codec(config.compress_replies),
        manifest=manifest,
        slices=cut_slices(manifest, config.servers, whole=whole) if is_known else (),
        facts=dataclasses.replace(_facts(config), whole_tensors=whole),
        num_rates=sum(len(numbers_of(member.options)) for member in optimizer.members),
    )


def resolved(config: TrainConfig) -> TrainConfig:
    """Nothing is scored but by the script, and a step is what the script makes of one."""
    if not config.chosen.kind.served:
        raise ConfigError(
            f"{config.chosen.kind.name} is not for a loop of one's own: torch's "
            f"DistributedDataParallel does the same there, started by torchrun"
        )
    return dataclasses.replace(
        config,
        engine=_engine(config),
        batch_size=1,
        eval_every=0,
        checkpoint_every=config.checkpoint_every or CHECKPOINT_EVERY,
    )


def _facts(config: TrainConfig) -> Facts:
    return Facts(
        num_examples=None,
        has_test=False,
        total_updates=None,
        in_rounds=config.chosen.kind.in_rounds,
        variant=config.variant,
        engine=_engine(config),
    )


def _engine(config: TrainConfig) -> str:
    """The roles are processes in any case."""
    return config.engine if config.engine in ("cluster", "ray") else "local"


def facts_json(config: TrainConfig) -> dict[str, Any]:
    return dataclasses.asdict(_facts(config))
