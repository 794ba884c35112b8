"""What a recipe is, and how one is found by its name.

A recipe is a model, its data, a loss, a metric, an optimizer and a schedule. The built-in ones have
names; a user's own is `package.module:attribute` or `path/to/file.py:attribute`, which may also be
a function that makes one (parameters.py). A run keeps where that was found, so that it goes on from
any folder.
"""

import hashlib
import inspect
import math
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from offbeat.config import BATCHING, BF16, DIRECT, TrainConfig
from offbeat.data.batches import batch_length
from offbeat.decline import Plateau
from offbeat.errors import ConfigError, RecipeError, nearest
from offbeat.importing import import_file, import_module
from offbeat.optim import SGD, Optimizer, Schedule, constant
from offbeat.recipes.callbacks import Callback
from offbeat.recipes.metrics import LOSS, Metric, check_metrics, direction_of
from offbeat.recipes.parameters import Value, call_with, read_parameters

BUILT_IN = {
    "alexnet": "offbeat.recipes.alexnet:recipe",
    "alexnet-fast": "offbeat.recipes.alexnet:fast",
    "fashion-cnn": "offbeat.recipes.fashion_cnn:recipe",
    "mnist-convnet": "offbeat.recipes.mnist_convnet:recipe",
    "mnist-sigmoid": "offbeat.recipes.mnist_sigmoid:recipe",
    "simplecnn": "offbeat.recipes.simplecnn:recipe",
    "simplecnn-100": "offbeat.recipes.simplecnn:recipe_100",
}


Loss = Callable[[nn.Module, Any], Tensor]


def accuracy(model: nn.Module, batch: Any) -> tuple[float, int]:
    """How many of a batch (inputs, labels) the model gets right, and of how many. Labels are whole
    numbers, and the model's outputs have one more dimension, with a value for each class."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise _no_accuracy(
            f"batches (inputs, labels), not a {type(batch).__name__} of {len(batch)}"
        )
    inputs, labels = batch
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        raise _no_accuracy(f"labels that are whole numbers, not {_described(labels)}")
    outputs = model(inputs)
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else []
    if shape[:-1] != list(labels.shape) or shape[-1] < 2:
        raise _no_accuracy(
            f"a value for each class: labels are {_described(labels)}, outputs "
            f"{_described(outputs)}"
        )
    right = (outputs.argmax(dim=-1) == labels).sum().item()
    return float(right), labels.numel()


def _no_accuracy(needed: str) -> RecipeError:
    return RecipeError(
        f"the metric offbeat.accuracy needs {needed}; without a metric a recipe's test loss is "
        f"reported"
    )


def _described(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
    return f"a {type(found).__name__}"


class MeanLoss:
    """A loss as a metric: its mean over all examples, so that a small last batch counts for
    less."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> tuple[float, int]:
        count = batch_length(batch)
        return float(self._loss(model, batch)) * count, count


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """What there is to say of a step on the console. Times are means since the line before."""

    step: int
    """Of this worker, from 1."""
    version: int
    """Updates that were in shard 0 when the step was over."""
    epoch: int
    batch: int
    """Within the epoch; both from 1."""
    num_batches: int | None
    loss: float
    examples_per_s: float
    step_s: float


def log_line(log: StepLog) -> str:
    """As the seeds' CIFAR programs have it."""
    return (
        f"{datetime.now()}: step {log.step}, loss = {log.loss:.2f} "
        f"({log.examples_per_s:.1f} examples/sec; {log.step_s:.3f} sec/batch)"
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Model, data, loss, metric, optimizer and schedule: everything that a run needs to know.

    A batch is whatever the data is made of: a tuple of tensors for tensors, what a DataLoader
    gives, else what `collate`, or torch's default_collate, makes of a list of examples. It may hold
    more than tensors, however deep.

    model: () -> a new model; called once per worker, with torch's generator seeded the same each
        time.
    data: (config) -> the training and the test data: tensors, any torch Dataset or DataLoader;
        None: nothing to test on.
    loss: (model, batch) -> the mean loss, to be differentiated.
    metric: (model, batch) -> a sum and a count; the result is their quotient over all test batches.
        None: `offbeat.accuracy` where the labels are classes, else the mean of the loss.
    metrics: several of them by their names, instead of `metric`; the first is what the run is
        judged by. `offbeat.metric` says of one which way it is better. The loss on the test data is
        scored too, as "loss", unless one of them is called so.
    optimizer: what the servers make updates with, as offbeat.SGD(lr=0.1), or offbeat.optimizer(...)
        for any other.
    schedule: (version, expected number of updates) -> what the learning rate is multiplied by; or
        offbeat.schedule(...), one of torch's.
    augment: (training batch, the generator to draw from) -> the batch to train on. On a GPU batch
        and generator are there, and so is what torch makes in this function, unless it says
        otherwise.
    ema: decay of the moving average of the parameters, which is what gets evaluated; None: no
        average.
    feed: how batches come to a step where --feed does not say: made when they are needed
        ("direct"), or by a thread that is a few ahead ("batching").
    by_feed: what is different under one of the two.
    log_line: how --log-every words a line.
    collate: (list of examples) -> batch, instead of default_collate, where data is a Dataset: for
        examples that differ in length.
    batch_size: examples in a step of one device, where --batch-size does not say.
    epochs: how often the data is gone through, where neither --epochs nor --steps says.
    amp: the shorter number format to compute in ("bf16"), where --amp does not say; None: float32.
    clip_norm: the norm above which gradients are clipped, where neither --clip-norm nor
        --clip-value says; None: none are.
    callbacks: () -> who is to be told what happens in a run, each an offbeat.Callback; called once
        for every run.
    """

    model: Callable[[], nn.Module]
    data: Callable[[TrainConfig], tuple[Any, Any]]
    loss: Loss
    metric: Metric | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    optimizer: Optimizer = field(default_factory=SGD)
    schedule: Schedule = field(default_factory=constant)
    augment: Callable[[Any, torch.Generator], Any] | None = None
    ema: float | None = None
    feed: str = DIRECT
    by_feed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    log_line: Callable[[StepLog], str] = log_line
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int = 100
    epochs: int = 1
    amp: str | None = None
    clip_norm: float | None = None
    callbacks: Callable[[], Iterable[Callback]] | None = None

    def fed(self, feed: str | None) -> "Recipe":
        """This recipe as it is under `feed`, or under its own."""
        feed = feed or self.feed
        return replace(self, feed=feed, by_feed={}, **self.by_feed.get(feed, {}))

    def judged(self, *, by_loss: bool) -> "Recipe":
        """This recipe with all that it is scored by in `metrics`: the metric that was chosen for
        it, where it has none of its own, and its loss."""
        found = dict(self.metrics)
        if not found:
            chosen: dict[str, Metric] = {} if by_loss else {"accuracy": accuracy}
            found = {metric_name(self): self.metric} if self.metric else chosen
        found.setdefault(LOSS, MeanLoss(self.loss))
        return replace(self, metric=None, metrics=found)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise RecipeError(
                "a recipe's model must be a function that makes a new one, as lambda: Net(); every "
                "worker needs a model of its own"
            )
        scheduler = torch.optim.lr_scheduler.LRScheduler
        if isinstance(self.schedule, scheduler) or (
            isinstance(self.schedule, type) and issubclass(self.schedule, scheduler)
        ):
            raise RecipeError(
                "a recipe's schedule is one of Offbeat's, or one of torch's as "
                "offbeat.schedule(torch.optim.lr_scheduler.StepLR, step_size=30)"
            )
        for name in (
            "model",
            "data",
            "loss",
            "metric",
            "schedule",
            "augment",
            "log_line",
            "collate",
        ):
            value = getattr(self, name)
            may_be_none = name in ("metric", "augment", "collate")
            if not callable(value) and not (value is None and may_be_none):
                raise RecipeError(f"a recipe's {name} must be a function")
        if self.callbacks is not None and not callable(self.callbacks):
            raise RecipeError(
                "a recipe's callbacks must be a function that makes them, as lambda: [Printer()]; "
                "every run has its own"
            )
        if self.metric is not None and self.metrics:
            raise RecipeError("a recipe has either a metric or metrics: give one of the two")
        check_metrics(self.metrics)
        if self.ema is not None and not 0 < self.ema < 1:
            raise RecipeError(
                f"a recipe's ema must lie between 0 and 1, as 0.999, not be {self.ema!r}; None: no "
                f"moving average"
            )
        if not isinstance(self.optimizer, Optimizer):
            raise RecipeError(
                "a recipe's optimizer must be one of offbeat's, as offbeat.SGD(lr=0.1), or one of "
                "torch's as offbeat.optimizer(torch.optim.Adadelta, lr=1.0)"
            )
        if self.feed not in (BATCHING, DIRECT):
            raise RecipeError(
                f"a recipe's feed must be {BATCHING!r} or {DIRECT!r}, not {self.feed!r}"
            )
        if self.amp not in (None, BF16):
            raise RecipeError(f"a recipe's amp must be {BF16!r} or None, not {self.amp!r}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise RecipeError(
                f"a recipe's clip_norm must be above 0 and finite, not {self.clip_norm!r}; None: "
                f"nothing is clipped"
            )
        for name in ("batch_size", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise RecipeError(f"a recipe's {name} must be at least 1, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """Where a recipe of the user's was found: `recipe_file` in config.json."""

    path: str
    """Absolute."""
    sha256: str
    folder: str | None
    """What its module is imported from; None: it is named by its file, or installed."""

    @classmethod
    def kept(cls, described: Mapping[str, Any]) -> "RecipeFile | None":
        """Out of config.json, or compare.json; None: the recipe has no file of its own."""
        found = described.get("recipe_file")
        return None if found is None else cls(**found)

    def change(self, now: "RecipeFile | None") -> str | None:
        """What to say of the file that is used now; None: it is what it was."""
        if now is None or now.sha256 == self.sha256:
            return None
        return f"the recipe's file {now.path} has changed since the start"


RecipeFunction = Callable[..., Recipe]
"""One with parameters."""


def metric_name(recipe: Recipe) -> str:
    """Of what a run is judged by."""
    if recipe.metrics:
        return next(iter(recipe.metrics))
    name = getattr(recipe.metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name


def directions(recipe: Recipe) -> dict[str, bool | None]:
    """For each metric of a job's recipe, whether more of it is better; None: nobody said so."""
    return {name: direction_of(name, function) for name, function in recipe.metrics.items()}


def what_falls(recipe: Recipe, schedule: Plateau) -> tuple[str, bool | None]:
    """The metric that a job's schedule goes by, and whether more of it is better."""
    name = schedule.metric or metric_name(recipe)
    known = directions(recipe)
    if name not in known:
        raise ConfigError(f"the schedule goes by {name!r}; {nearest(name, list(known))}")
    return name, known[name] if schedule.most is None else schedule.most


def load_recipe(
    name: str, kept: RecipeFile | None = None, given: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe called `name`, or a RecipeError of one line; `kept`: where it was found before;
    `given`: the parameters of one that is a function."""
    return make_recipe(find_recipe(name, kept), name, given or {})[0]


def make_recipe(
    found: "Recipe | RecipeFunction", name: str, given: Mapping[str, Any]
) -> tuple[Recipe, dict[str, Value]]:
    """A recipe that was found, or what a function makes; and the parameters as they were read."""
    if isinstance(found, Recipe):
        if given:
            raise RecipeError(
                f"{name} is a recipe and has no parameters: leave --set out, or make it a function "
                f"that returns one"
            )
        return found, {}
    values = read_parameters(found, name, given)
    made = call_with(found, name, values)
    if not isinstance(made, Recipe):
        raise RecipeError(f"{name}() returned a {type(made).__name__}, not an offbeat.Recipe")
    return made, values


def find_recipe(name: str, kept: RecipeFile | None = None) -> "Recipe | RecipeFunction":
    """The same, as it is there."""
    source, colon, attribute = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise RecipeError(f"name the recipe in the file too, as in {name}:recipe")
        if name not in BUILT_IN:
            raise RecipeError(
                f"unknown recipe {name!r}; {nearest(name, BUILT_IN)} "
                f"(your own: path/to/file.py:attribute)"
            )
        source, _, attribute = BUILT_IN[name].partition(":")
    if source.endswith(".py"):
        module = import_file(_find_file(name, kept), "recipe", RecipeError)
    else:
        module = _import_module(source, kept)
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if _may_be_one(value, module)]
        hint = nearest(attribute, known) if known else "there is no recipe in it"
        raise RecipeError(f"{source} has no {attribute!r}; {hint}")
    found = getattr(module, attribute)
    if not isinstance(found, Recipe) and not callable(found):
        raise RecipeError(
            f"{name} is a {type(found).__name__}, not an offbeat.Recipe, nor a function that makes "
            f"one"
        )
    return cast("Recipe | RecipeFunction", found)


def _may_be_one(value: object, module: ModuleType) -> bool:
    """A recipe, or a function of the module's own whose parameters --set may give."""
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return isinstance(value, Recipe)
    given = inspect.signature(value).parameters.values()
    return bool(given) and all(p.default is not p.empty for p in given)


def locate(name: str, kept: RecipeFile | None = None) -> RecipeFile | None:
    """Where the recipe called `name`, which has been loaded, comes from; None: it is built in, or
    there is no file that one could go back to."""
    source, colon, _ = name.rpartition(":")
    folder = None
    if colon and source.endswith(".py"):
        path = _find_file(name, kept).absolute()
    else:
        path = Path(getattr(sys.modules.get(source), "__file__", None) or "")
        folder = _import_folder(source, path)
    return (
        RecipeFile(path=str(path), sha256=_digest(path), folder=folder) if path.is_file() else None
    )


def _find_file(name: str, kept: RecipeFile | None) -> Path:
    """The file in a recipe's name: where it was, or where the name says if it is the same there."""
    source, _, attribute = name.rpartition(":")
    if kept is None or Path(kept.path).is_file():
        return Path(source if kept is None else kept.path)
    if Path(source).is_file() and _digest(Path(source)) == kept.sha256:
        return Path(source)
    raise RecipeError(
        f"the recipe's file {kept.path} is not there any more; say where it is: "
        f"--recipe FILE.py:{attribute}"
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _import_folder(module_name: str, path: Path) -> str | None:
    """The folder that makes a module importable; None: it is installed."""
    inner = Path(*module_name.split("."))
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")}
    for entry in sys.path:
        folder = Path(entry).absolute()
        if path in (folder / f"{inner}.py", folder / inner / "__init__.py"):
            return None if str(folder) in installed else str(folder)
    return None


def _import_module(name: str, kept: RecipeFile | None) -> ModuleType:
    folders = [] if kept is None or kept.folder is None else [Path(kept.folder)]
    was = ""
    if kept is not None and not Path(kept.path).is_file():
        was = f"; {kept.path} is not there any more: say where it is with --recipe"
    return import_module(name, RecipeError, folders, was)
