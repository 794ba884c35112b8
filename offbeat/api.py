"""`train(...) -> Result`: the same thing as `offbeat train`, from Python."""

import dataclasses
import functools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.rays import RayCluster, find_ray
from offbeat.config import APPLIED, TrainConfig, make_config, not_overruled
from offbeat.engines.actors import RayEngine, ray_for
from offbeat.engines.base import Engine
from offbeat.engines.cluster import ClusterEngine
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.engines.inproc import InprocEngine
from offbeat.engines.local import LocalEngine
from offbeat.errors import CheckpointError, ConfigError, RecipeError
from offbeat.flat import FlatModel
from offbeat.importing import FILE_PREFIX
from offbeat.recipes.base import (
    Recipe,
    RecipeFile,
    RecipeFunction,
    directions,
    find_recipe,
    locate,
    make_recipe,
    metric_name,
)
from offbeat.recipes.callbacks import Callback, Start
from offbeat.recipes.metrics import Scores
from offbeat.report.summary import summarise
from offbeat.roles.control import Control
from offbeat.roles.evaluator import Evaluator, FolderSource, found_in
from offbeat.roles.evaluator import Found as Scored
from offbeat.roles.judging import make_judges, reason_of
from offbeat.roles.salvage import has_journals, salvage
from offbeat.roles.scoring import score_line
from offbeat.run.callbacks import Caller, Given, make_callbacks
from offbeat.run.checkpoint import newest_checkpoint, read_weights, write_weights
from offbeat.run.event_files import remove_halves
from offbeat.run.job import Facts, Job
from offbeat.run.journal import remove_if_empty
from offbeat.run.making import make_job, rejoin_job
from offbeat.run.progress import Display, MakeDisplay, make_display
from offbeat.run.rundir import RunFolder, create_run_folder, describe_run
from offbeat.run.tensorboard import check_installed
from offbeat.run.trackers import check_trackers, make_trackers

OTHER_FORMATS = {
    *(".pt", ".pth", ".pt2", ".bin", ".ckpt", ".pkl", ".pickle", ".onnx", ".h5", ".hdf5", ".keras"),
    *(".npy", ".npz", ".pb", ".tflite", ".gguf", ".msgpack", ".joblib", ".zip", ".tar"),
}
"""Endings of files that do not hold safetensors."""


_MAKING = threading.Lock()
"""Held while a job is made: models and data draw from torch's generator, which threads share."""


@dataclass(frozen=True)
class Staleness:
    """Of the applied gradients, pooled over the shards; NaN where there were none."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, its figures, and its weights."""

    run_dir: Path
    summary: Mapping[str, Any]

    @property
    def test_accuracy(self) -> float | None:
        """A fraction; None where the recipe's metric is another, or there is no test data."""
        return cast("float | None", self.summary["test_accuracy"])

    @property
    def test_metric(self) -> float | None:
        """NaN where it is no number; None: there is no test data."""
        if self.summary["metric_is_nan"]:
            return math.nan
        return cast("float | None", self.summary["test_metric"])

    @property
    def test_scores(self) -> dict[str, float]:
        """By each metric's name, the test loss among them; NaN where one is no number."""
        found = self.summary["test_scores"]
        return {name: math.nan if value is None else value for name, value in found.items()}

    @property
    def test_loss(self) -> float | None:
        """NaN where it is no number; None: there is no test data, or the loss fails on it."""
        return self.test_scores.get("loss")

    @cached_property
    def staleness(self) -> Staleness:
        values = self.summary["staleness"]
        return Staleness(**{k: math.nan if v is None else v for k, v in values.items()})

    @property
    def interrupted(self) -> bool:
        return bool(self.summary["status"] == "interrupted")

    @property
    def best(self) -> tuple[int, float] | None:
        """The version that was scored best, and what it scored; None: there is no score, or the
        metric does not say what is better."""
        found = self.summary["best"]
        return None if found is None else (found["version"], found["metric"])

    def state_dict(self, *, ema: bool = False, best: bool = False) -> dict[str, Tensor]:
        """The final weights, for `load_state_dict`; with `ema`, their moving average, which is
        what was scored where the recipe has one; with `best`, what was scored best, of a run with
        keep_best."""
        return load(self.run_dir, ema=ema, best=best)


def load(run_dir: str | Path, *, ema: bool = False, best: bool = False) -> dict[str, Tensor]:
    """The newest weights in a run's folder, for `load_state_dict`; damaged checkpoints are passed
    over. With `ema`, their moving average where the recipe has one. With `best`, what was scored
    best instead, which is the average where there is one."""
    if best:
        return _best_of(RunFolder(Path(run_dir)))[1]
    return newest_checkpoint(RunFolder(Path(run_dir)).checkpoints).state_dict(ema=ema)


def _best_of(folder: RunFolder) -> tuple[int, dict[str, Tensor]]:
    """The version that was scored best, and its weights."""
    found = folder.read_best()
    if found is None:
        raise CheckpointError(
            f"{folder.path} keeps no best weights: that takes --keep-best, and a score"
        )
    return found[0], read_weights(folder.best)


def export(run_dir: str | Path, file: str | Path, *, ema: bool = False, best: bool = False) -> None:
    """Write a run's newest weights, their moving average, or what was scored best, to a safetensors
    file."""
    _check_format(Path(file))
    if best:
        write_weights(Path(file), load(run_dir, best=True))
        return
    checkpoint = newest_checkpoint(RunFolder(Path(run_dir)).checkpoints)
    if ema and not checkpoint.has_ema:
        raise CheckpointError(f"{run_dir} keeps no moving average: its recipe has no ema")
    write_weights(Path(file), checkpoint.state_dict(ema=ema))


def _check_format(file: Path) -> None:
    """What reads a file by its name must not be promised another format than it gets."""
    if file.suffix.lower() in OTHER_FORMATS:
        raise ConfigError(
            f"{file} has the name of another format, and weights are written as safetensors: call "
            f"it {file.with_suffix('.safetensors').name}"
        )


def recipe_of(
    config: TrainConfig,
    described: Mapping[str, Any],
    recipe: str | Recipe | RecipeFunction | None,
    tell: Callable[[str], None],
) -> Recipe:
    """A recorded run's; `recipe`: the same one, where it is not to be found where it was. `tell`
    is told of a file that has changed."""
    if recipe is None or isinstance(recipe, str):
        kept = RecipeFile.kept(described)
        found = find_again(recipe or config.recipe, kept, is_given=recipe is not None)
        recipe = found.recipe
        if found.change is not None:
            tell(found.change)
    made, _ = make_recipe(recipe, config.recipe, config.set)
    return made


def evaluate(
    run_dir: str | Path,
    *,
    follow: bool = False,
    best: bool = False,
    say: Callable[[str], None] = lambda line: None,
    recipe: str | Recipe | RecipeFunction | None = None,
    data_dir: str | None = None,
    device: str | None = None,
) -> float | None:
    """Score the newest checkpoint in a run's folder on its test data, each example once; with
    `follow` each newest one until the run is over, with `best` what was scored best. Returns the
    last score by the recipe's metric, the first of several; a line with all of them for each
    checkpoint goes to `say`. The run goes on undisturbed; nothing is written into its folder.
    `recipe`: the same one, where it is not to be found where it was."""
    folder = RunFolder(Path(run_dir))
    config, described = folder.read_config()
    if "script" in described:
        raise ConfigError(f"{run_dir} was launched: its script is what scores it")
    config = dataclasses.replace(
        config,
        data_dir=data_dir or config.data_dir,
        device=device or config.device,
        eval_skipped=False,
    )
    log = logging.getLogger("offbeat.eval")
    made = recipe_of(config, described, recipe, log.warning)
    job = rejoin_job(config, made, Facts(**described["job"]), {}, needs=["test"])
    if job.test is None:
        raise RecipeError(f"the recipe {config.recipe} has no test data: there is nothing to score")
    scores: list[float] = []

    def scored(version: int, found: Scores) -> None:
        scores.append(found.metric)
        line = score_line(found.values)
        say(f"version {version}: {line}" if follow or best else line)

    source = FolderSource(folder, 1, log=log, gives_up=True)
    evaluator = Evaluator(  # no role of the run: nothing is recorded
        job,
        job.make_model().module,
        source,
        stop=threading.Event(),
        scored=scored,
        warn=log.warning,
        clock=time.monotonic,
    )
    threads_before = torch.get_num_threads()
    try:
        if follow:
            torch.set_num_threads(1)
            evaluator.run()
        elif best:
            evaluator.score(Scored(*_best_of(folder)))
        else:
            evaluator.score(found_in(newest_checkpoint(folder.checkpoints)))
    finally:
        torch.set_num_threads(threads_before)
    return scores[-1] if scores else None


def train(
    recipe: str | Recipe | RecipeFunction = "fashion-cnn",
    *,
    callbacks: Given = (),
    **options: Any,
) -> Result:
    """Train `recipe` (a Recipe, a function that makes one, or what --recipe takes); `options` are
    train's flags by name; `callbacks` are told what happens, beside the recipe's own.

        offbeat.train(recipe, discipline="lock-free", workers=4, lr=0.05)
        offbeat.train(make_recipe, set={"width": 128})

    The processes of a run import the recipe by its name. One that has no name in any module (it was
    made inside a function, in a notebook, or in a script that came by standard input) is trained in
    this process, unless told otherwise.

    Raises an OffbeatError: a UsageError when nothing was begun, a RunError when a run failed, after
    what could be kept has been kept.
    """
    refuse_recursion()
    name, options = named(recipe, options)
    found = find_recipe(recipe) if isinstance(recipe, str) else recipe
    return train_config(make_config({"recipe": name}, options), found, callbacks=callbacks)


def named(
    recipe: str | Recipe | RecipeFunction, options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """What a run calls its recipe, and its options: one that has no name is trained here."""
    if isinstance(recipe, str):
        return recipe, dict(options)
    name = _name_of(recipe)
    if name is not None:
        return name, dict(options)
    if options.get("engine") in ("local", "ray"):
        raise RecipeError(
            "other processes cannot find this recipe: assign it to a name at the top level of "
            "a module or script, or use engine='inproc'"
        )
    return "custom", {**options, "engine": "inproc"}


def resume(
    run_dir: str | Path,
    recipe: str | Recipe | RecipeFunction | None = None,
    *,
    callbacks: Given = (),
    **options: Any,
) -> Result:
    """Go on with the run in `run_dir` from its newest valid checkpoint; `options` that are given
    replace those it was started with. `recipe`: the same one, where it has no name to be found by,
    or is not to be found where it was."""
    if recipe is None:
        return resume_config(Path(run_dir), options, callbacks=callbacks)
    name, options = named(recipe, options)
    found = None if isinstance(recipe, str) else recipe
    return resume_config(Path(run_dir), {**options, "recipe": name}, found, callbacks=callbacks)


@dataclass(frozen=True)
class Found:
    """A recipe, where it comes from, and what is to be said of that."""

    recipe: Recipe | RecipeFunction
    file: RecipeFile | None
    change: str | None = None

    @property
    def kept(self) -> dict[str, Any] | None:
        """What is written down of the file."""
        return None if self.file is None else dataclasses.asdict(self.file)


def find_again(
    name: str,
    kept: RecipeFile | None,
    recipe: Recipe | RecipeFunction | None = None,
    *,
    is_given: bool,
) -> Found:
    """The recipe of a run that has `kept` where it was; `is_given`: the user says where it is."""
    source = None if is_given else kept
    recipe = recipe or find_recipe(name, source)
    file = locate(name, source)
    return Found(recipe, file, kept.change(file) if kept is not None else None)


def train_config(
    config: TrainConfig,
    recipe: Recipe | RecipeFunction | None = None,
    endpoint: Endpoint | None = None,
    display: MakeDisplay | None = None,
    forks: ForkServer | None = None,
    file: RecipeFile | None = None,
    callbacks: Given = (),
    begun: Callable[[Engine], None] = lambda engine: None,
) -> Result:
    """The same, from a configuration that is complete; with `endpoint`, as the master of a cluster;
    `display` makes what shows its progress, `forks` starts the processes; `file` is where the
    recipe comes from, where that is known better than by its name; `begun` is given the engine, so
    that another thread can stop it."""
    began_s = time.monotonic()
    _check(config, endpoint)
    with fork_server(config.engine, forks) as forks:
        recipe = recipe or find_recipe(config.recipe, file)
        found = Found(recipe, locate(config.recipe, file))
        made, config = _with_parameters(config, recipe)
        is_elastic = endpoint is not None or config.most_workers is not None
        with _MAKING:
            job = make_job(config, made, elastic=is_elastic)
        told = [*make_callbacks(made, callbacks), *make_trackers(config.track)]
        replicas = _make_replicas(job)
        with ray_for(job.config) as cluster:
            folder = create_run_folder(job.config)
            if job.initial is not None:
                write_weights(folder.initial, dict(job.initial.state))
            start = _Start(
                folder,
                began_s,
                endpoint,
                found,
                forks,
                cluster,
                threads=config.threads,
                callbacks=told,
                display=display,
                begun=begun,
            )
            with folder.locked() as lock:
                return _run(job, replicas, start, lock=lock, incarnation=0)


def resume_config(
    run_dir: Path,
    options: Mapping[str, Any],
    recipe: Recipe | RecipeFunction | None = None,
    endpoint: Endpoint | None = None,
    forks: ForkServer | None = None,
    callbacks: Given = (),
) -> Result:
    if options.get("init") is not None:
        raise ConfigError("a run that goes on has weights of its own: leave init out")
    folder = RunFolder(run_dir)
    before, described = folder.read_config()
    if "script" in described:
        raise ConfigError(f"{run_dir} was launched: go on with offbeat launch --resume {run_dir}")
    kept = {key: value for key, value in before.to_json().items() if value is not None}
    config = make_config(not_overruled(kept, options), options, {"run_dir": str(run_dir)})
    _check(config, endpoint)
    with folder.locked() as lock, fork_server(config.engine, forks) as forks:
        checkpoint = newest_checkpoint(folder.checkpoints)
        remove_halves(folder.events)
        elapsed_s = summarise(folder.path)["total_time_s"]
        began_s = time.monotonic() - elapsed_s
        is_given = options.get("recipe") is not None
        found = find_again(config.recipe, RecipeFile.kept(described), recipe, is_given=is_given)
        salvaged: Sequence[str] = ()
        if has_journals(folder):
            former, _ = make_recipe(found.recipe, before.recipe, before.set)
            job = rejoin_job(before, former, Facts(**described["job"]), None)
            is_tolerant = options.get("ack") == APPLIED
            salvaged = salvage(folder, job, at_s=elapsed_s, tolerant=is_tolerant)
            checkpoint = newest_checkpoint(folder.checkpoints)
        made, config = _with_parameters(config, found.recipe)
        job = make_job(
            config,
            made,
            checkpoint,
            elastic=endpoint is not None or config.most_workers is not None,
            kept_initial=folder.initial,
        )
        _check_not_over(job, folder)
        told = [*make_callbacks(made, callbacks), *make_trackers(config.track)]
        replicas = _make_replicas(job)
        threads = config.threads if options.get("threads") is not None else None
        with ray_for(job.config) as cluster:
            for path in (folder.state, folder.enough):
                path.unlink(missing_ok=True)
            start = _Start(
                folder,
                began_s,
                endpoint,
                found,
                forks,
                cluster,
                threads=threads,
                callbacks=told,
                resumed=True,
                salvaged=salvaged,
            )
            return _run(job, replicas, start, lock=lock, incarnation=checkpoint.next_incarnation)


def _check_not_over(job: Job, folder: RunFolder) -> None:
    """What ended a run early holds still, unless it is asked for something else now."""
    if (reason := reason_of(make_judges(job, folder.events))) is not None:
        raise ConfigError(
            f"{folder.path} has nothing left to do: {reason}; to go on say --stop-at or --patience "
            f"anew (--stop-at inf: never)"
        )


def _with_parameters(
    config: TrainConfig, found: Recipe | RecipeFunction
) -> tuple[Recipe, TrainConfig]:
    """The recipe as it is asked for, and the configuration with the values that were read."""
    made, values = make_recipe(found, config.recipe, config.set)
    return made, dataclasses.replace(config, set=values)


@dataclass(frozen=True)
class _Start:
    """Where and when a run begins; `threads`: of each worker, where the user said how many."""

    folder: RunFolder
    began_s: float
    endpoint: Endpoint | None
    found: Found
    forks: ForkServer | None
    cluster: RayCluster | None
    threads: int | None
    callbacks: Sequence[Callback]
    display: MakeDisplay | None = None
    resumed: bool = False
    salvaged: Sequence[str] = ()
    """What is to be said of the journals that it had."""
    begun: Callable[[Engine], None] = lambda engine: None

    def clock(self) -> float:
        return time.monotonic() - self.began_s


def _make_replicas(job: Job) -> list[FlatModel]:
    """What the engine `inproc` needs; the other one only has to know that there can be several."""
    if job.facts.engine == "inproc":
        return job.make_replicas(job.config.workers + 1)
    replicas = job.make_replicas(2)
    return replicas if job.facts.engine == "cluster" else []


def _run(
    job: Job,
    replicas: list[FlatModel],
    start: _Start,
    *,
    lock: int,
    incarnation: int,
) -> Result:
    config, folder = job.config, start.folder
    folder.write_json(folder.config, _describe(job, start.found))
    steps = [job.num_steps(rank) for rank in range(config.workers)]
    total = None if None in steps or config.paces else sum(n for n in steps if n is not None)
    show = start.display or functools.partial(make_display, quiet=config.quiet)
    display = show(_title(job, folder), total)
    for line in (*_notices(job, start.found.change), *start.salvaged):
        display.notice(line)
    caller = Caller(start.callbacks, folder, display, _beginning(job, start))
    engine = _make_engine(job, replicas, start, caller.display, lock=lock, incarnation=incarnation)
    start.begun(engine)
    with caller:
        try:
            engine.run()
            folder.cluster.unlink(missing_ok=True)
        finally:
            remove_if_empty(folder.journal)
            summary = summarise(folder.path)
            folder.write_json(folder.summary, summary)
            caller.ended(summary, engine.failures)
    return Result(folder.path, summary)


def _beginning(job: Job, start: _Start) -> Start:
    """What callbacks are told of a run."""
    return Start(
        run_dir=start.folder.path,
        config=job.config.to_json(),
        resolved=job.resolved,
        metric=metric_name(job.recipe),
        higher_is_better=directions(job.recipe),
        total_updates=job.facts.total_updates,
        is_resumed=start.resumed,
    )


def _make_engine(
    job: Job,
    replicas: list[FlatModel],
    start: _Start,
    display: Display,
    *,
    lock: int,
    incarnation: int,
) -> Engine:
    folder = start.folder
    if start.cluster is not None:
        return RayEngine(
            job,
            folder,
            display,
            start.began_s,
            cluster=start.cluster,
            incarnation=incarnation,
        )
    if job.facts.engine == "local":
        return LocalEngine(
            job,
            folder,
            display,
            start.began_s,
            lock=lock,
            forks=start.forks,
            incarnation=incarnation,
        )
    if start.endpoint is None:
        return InprocEngine(job, replicas, folder, display, start.clock, incarnation=incarnation)
    return ClusterEngine(
        job,
        replicas,
        folder,
        display,
        start.clock,
        endpoint=start.endpoint,
        threads=start.threads,
        incarnation=incarnation,
    )


def _check(config: TrainConfig, endpoint: Endpoint | None) -> None:
    """Have what is missing said while there is no folder yet."""
    if config.tensorboard:
        check_installed()
    check_trackers(config.track)
    if config.engine == "ray":
        find_ray()
    if config.engine == "cluster" and endpoint is None:
        raise ConfigError(
            "the roles of a cluster are started one by one: offbeat role master --cluster FILE, "
            "and so on"
        )


def refuse_recursion() -> None:
    """A role imports the recipe's file; a train() at the top level of it would start the run again,
    and again."""
    if Control.in_a_role:
        raise RecipeError(
            "the recipe's file trains when it is imported, as every role does; put the call under "
            "if __name__ == '__main__':"
        )


def _describe(job: Job, found: Found) -> dict[str, Any]:
    """What config.json says."""
    own = {"cluster": 1, "ray": 0}  # whose devices are this machine's
    ranks = range(own.get(job.config.engine, job.config.workers))
    return describe_run(
        job.config,
        [device for rank in ranks for device in job.devices(rank)],
        recipe_file=found.kept,
        resolved=job.resolved,
        metric=metric_name(job.recipe),
        metrics=directions(job.recipe),
        job=dataclasses.asdict(job.facts),
    )


def _notices(job: Job, change: str | None) -> Iterator[str]:
    """What a person should know of a run that begins."""
    if change is not None:
        yield change
    yield from () if job.initial is None else job.initial.notices
    if rounded := job.manifest.rounded_in_words:
        yield rounded
    if (idle := job.idle_codecs) is not None:
        yield idle
    if job.facts.num_batches is None and job.config.steps is None:
        yield (
            "the training data does not say how long it is: an epoch ends when it does, and the "
            "run after so many, or with --steps N"
        )


def _title(job: Job, folder: RunFolder) -> str:
    config = job.config
    count = config.servers if config.chosen.kind.served else "no"
    servers = f"{count} server{'s' * (count != 1)}"
    workers = f"{config.workers} worker{'s' * (config.workers > 1)}"
    values = ", ".join(f"{name}={value}" for name, value in config.set.items())
    return (
        f"{config.recipe}{f' ({values})' if values else ''}: {job.manifest.num_elements:,} "
        f"parameters, {config.variant}, {servers}, {workers} -> {folder.path}"
    )


def _name_of(recipe: Recipe | RecipeFunction) -> str | None:
    """Where --recipe would find this one, from any process; None: nowhere."""
    if isinstance(recipe, torch.nn.Module):
        raise RecipeError(
            "train takes a Recipe, not a model: offbeat.Recipe(model=lambda: Net(), data=..., ...)"
        )
    if not isinstance(recipe, Recipe) and not callable(recipe):
        raise RecipeError(
            f"train takes a Recipe, a function that makes one, or the name of one, not a "
            f"{type(recipe).__name__}"
        )
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is recipe and (source := _source_of(module_name, module)) is not None:
                return f"{source}:{name}"
    return None


def _source_of(module_name: str, module: ModuleType) -> str | None:
    """Where another process can import this module from; None: from nowhere, as a notebook, what
    came by standard input, or a script that lies in an archive."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not Path(file).is_file():
        return None
    if module_name != "__main__" and not module_name.startswith(FILE_PREFIX):
        return module_name
    return os.path.relpath(file) if file.endswith(".py") else None
