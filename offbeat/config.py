"""The configuration of a run: one frozen dataclass, from which flags, file keys and arguments are
made.

Called by the command line and by `offbeat.train`; imports no torch, so that `offbeat --help` is
instant. A flag beats a file beats a default:

    >>> TrainConfig(workers=4, discipline="bounded:2").validated().staleness
    2.0
"""

import dataclasses
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from offbeat.disciplines import Bounded, Discipline, Sync
from offbeat.errors import ConfigError, nearest
from offbeat.family import BUILT_IN, Buffer, Rennala, Ringmaster
from offbeat.plugins import Choice, Option, find, parse, read_options

DISCIPLINES = tuple(name for name, kind in BUILT_IN.items() if kind.served)
"""Those that servers have."""
SPLITS = ("disjoint", "shared")
BATCHING, DIRECT = "batching", "direct"
AUTO, OFF = "auto", "off"
BF16 = "bf16"
ENGINES = (AUTO, "local", "inproc", "ray", "cluster")
OF_PROCESSES = (AUTO, "local", "ray")
"""Engines whose workers are processes of their own, or may be."""
RAY_OPTIONS = (
    "ray_address",
    "most_workers",
    "cpus_per_worker",
    "gpus_per_worker",
    "memory_per_server",
)
PEER_ENGINES = (AUTO, "local", "ray")
"""Those that tell workers without servers where they meet."""
ROLES = ("ps", "master", "worker", "evaluator")
OPTIMIZERS = (
    *("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop"),
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "ASGD", "NAdam"),
    *("RAdam", "Rprop", "Adafactor", "Muon", "SparseAdam"),
)
"""In small letters with a learning rate of Offbeat's, else as torch has it."""
REFUSED_LATER = {"optimizer": ("LBFGS",), "outer_optimizer": ("LBFGS",)}
"""No choices, but left to those who can say why not (optim.py)."""
RULES = (
    *("mean", "sum", "trimmed-mean", "median"),
    *("staleness-aware", "delay-adaptive", "exponential", "gap-aware"),
    *("dc-asgd", "dc-asgd-a", "dana", "delayed-nesterov"),
)
NONE = "none"
CODECS = (NONE, "bf16", "int8", "topk")
REPLY_CODECS = (NONE, "bf16", "delta")
CODING_OPTIONS = ("compress", "compress_replies", "compress_always")
RULES_OF_SUMS = RULES[:2]
"""Those that need no more of a round's gradients than their sum."""
RULES_OF_SEVERAL = RULES[1:4]
"""Those that mean nothing where every update is made of one gradient."""
ELEMENTS, TENSORS = "elements", "tensors"
PARTITIONS = (AUTO, ELEMENTS, TENSORS)
LR_SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda workers: 1.0,
    "linear": float,
    "sqrt": math.sqrt,
}
"""What a learning rate is multiplied by, for so many workers."""
TRACKERS = ("wandb", "mlflow", "trackio")
LOCAL_OPTIONS = ("data_dir", "device", "threads", "log_every")
"""What a worker or evaluator of a cluster is told on its own machine; the rest is the master's."""
FAULT_OPTIONS = ("slow_worker", "kill_worker", "lying_worker")
"""Options that make a worker worse than it is."""
PLUGINS = ("optimizer", "outer_optimizer", "rule", "compress", "compress_replies")
"""Options that can also name a class of the user's own; disciplines are looked up here already."""
APPLIED, DURABLE = "applied", "durable"
LAUNCH_OPTIONS = (
    *(
        "ack",
        "discipline",
        "servers",
        "workers",
        "fused",
        "rule",
        "backup_workers",
        "round_timeout",
    ),
    *("staleness", "max_delay", "collect", "buffer_size", "threads", "worker_timeout"),
    *("max_restarts", "fresh_worker_state", *FAULT_OPTIONS),
    *("run_dir", "checkpoint_every", "keep", "quiet", "seed", "tensorboard", "track", "engine"),
    "partition",
    *RAY_OPTIONS,
    *CODING_OPTIONS,
)
"""Those that have a meaning where the training loop is the user's own."""
CHECKPOINT_EVERY = 1000
"""Updates, in such a loop, where nobody says otherwise: what an epoch is the script alone knows."""
MAX_THREADS = 1024


def _option(
    default: Any, kind: Callable[[Any], Any], help: str, *, choices: tuple[str, ...] = ()
) -> Any:
    about = {"kind": kind, "help": help, "choices": choices}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


def whole(value: Any) -> int:
    """A whole number, out of a flag's text or a file's value."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def number(value: Any) -> float:
    """A number; `inf` is one, NaN is not."""
    if isinstance(value, bool) or math.isnan(result := float(value)):
        raise ValueError
    return result


def local(value: Any) -> int | str:
    """A number of local steps: H, or H:auto."""
    if not (isinstance(value, str) and ":" in value):
        return whole(value)
    figure, _, how = value.partition(":")
    if how != AUTO:
        raise ValueError
    return f"{whole(figure)}:{AUTO}"


def level(value: Any) -> float | str:
    """What a score is to reach: a number, or NAME=NUMBER."""
    if not (isinstance(value, str) and "=" in value):
        return number(value)
    name, _, figure = value.rpartition("=")
    if not name:
        raise ValueError
    return f"{name}={number(figure)!r}"


def text(value: Any) -> str:
    if not isinstance(value, str | Path):
        raise ValueError
    return os.path.expanduser(value)  # noqa: PTH111 - a recipe's name is no path


def texts(value: Any) -> tuple[str, ...]:
    """One or several."""
    return tuple(map(text, value)) if isinstance(value, list | tuple) else (text(value),)


def yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def settings(value: Any) -> dict[str, Any]:
    """Values by their names: as they are, or as NAME=VALUE, one or several."""
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    found = {}
    for part in [value] if isinstance(value, str) else value:
        name, equals, each = part.partition("=")
        if not equals or not name.strip():
            raise ValueError
        found[name.strip()] = each.strip()
    return found


MAX_SHOWN = 60
"""Characters of a value that an error shows."""
KIND_NAMES = {
    local: "a whole number, or NUMBER:auto",
    level: "a number, or METRIC=NUMBER",
    settings: "of the form NAME=VALUE",
    whole: "a whole number",
    number: "a number",
    text: "text",
    texts: "text, or a list of it",
    yes_or_no: "true or false",
}


def _option_of(kind: type[Discipline], flag: str, **more: Any) -> Any:
    """An option that means something under one discipline, which says all there is to say of it;
    `more` replaces its default."""
    option = next(option for option in kind.options if option.flag == flag)
    shown = f"{kind.name}: {option.help}"
    if more:
        shown += f" (default: {option.default:g})"
    exact = whole if option.whole and option.most < math.inf else number
    return _option(more.get("default", option.default), exact, shown)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What `offbeat train` can be told. None stands for "as the recipe or the machine suggests"."""

    recipe: str = _option(
        "fashion-cnn",
        text,
        "a built-in recipe's name, package.module:attribute, or path/to/file.py:attribute",
    )
    set: Mapping[str, Any] = _option(
        {}, settings, "NAME=VALUE, again and again: parameters of a recipe that is a function"
    )
    discipline: str = _option(
        "apply-reply",
        text,
        f"when gradients are applied: {', '.join(BUILT_IN)}; bounded:S and sync:B say "
        f"--staleness and --backup-workers too, ringmaster:R, rennala:B and buffer:K --max-delay, "
        f"--collect and --buffer-size; allreduce has no servers; your own: "
        f"package.module:Class or path/to/file.py:Class",
    )
    servers: int = _option(1, whole, "parameter servers, each with a slice of the parameters")
    workers: int = _option(
        2,
        whole,
        "workers, the master among them; 2..8 with --engine ray: from two on, up to eight as the "
        "cluster has room for them (asynchronous disciplines)",
    )
    epochs: int | None = _option(
        None, whole, "passes of each worker over its own share of the data (default: the recipe's)"
    )
    steps: int | None = _option(None, whole, "gradients per worker, instead of --epochs")
    batch_size: int | None = _option(None, whole, "examples per gradient (default: the recipe's)")
    accumulate: int = _option(
        1,
        whole,
        "batches per gradient: their mean is what is pushed, as of one so many times as large",
    )
    local_steps: int | str | None = _option(
        None,
        local,
        "so many steps each worker takes by itself, with the recipe's optimizer and schedule; then "
        "it pushes by how much its parameters moved, to which the servers apply --outer-optimizer; "
        "H:auto: the fastest worker takes H, and slower ones fewer, in proportion to their speed",
    )
    outer_optimizer: str | None = _option(
        None,
        text,
        "of the servers, with --local-steps, given as --optimizer is (default: nesterov:lr=0.7 in "
        "rounds, as DiLoCo has it, where SGD:lr=1 is plain averaging; else SGD with 1/W, for W "
        "workers)",
        choices=OPTIMIZERS,
    )
    overlap: bool = _option(
        False,
        yes_or_no,
        "a worker computes its next gradient while the last one's exchange is under way: each one "
        "is one more of its worker's steps old, as many versions as there are workers, and nobody "
        "waits for a network that is no slower than the computing",
    )
    optimizer: str | None = _option(
        None,
        text,
        "the servers' optimizer instead of the recipe's, with options as NAME:rho=0.9; your own: "
        "package.module:Class or path/to/file.py:Class",
        choices=OPTIMIZERS,
    )
    lr: float | None = _option(
        None, number, "learning rate, before the recipe's schedule (default: the recipe's)"
    )
    lr_scale: str = _option(
        "none",
        text,
        "what the learning rate is multiplied by: linear, the number of workers (usual in sync "
        "with SGD); sqrt, its square root (usual in sync with Adam); none, nothing (usual where "
        "they are asynchronous, and make so many times as many updates, and with --rule sum)",
        choices=tuple(LR_SCALES),
    )
    clip_norm: float | None = _option(
        None,
        number,
        "scale a gradient down where its norm, over all parameters, is above this; in sync the "
        "mean of a round's; inf: never (default: as the recipe has it)",
    )
    clip_value: float | None = _option(
        None, number, "bring the elements of a gradient that are further from zero to this"
    )
    fused: bool = _option(
        False,
        yes_or_no,
        "torch's fused optimizer kernels: close to the default ones, not bit for bit",
    )
    partition: str = _option(
        AUTO,
        text,
        "what servers share the parameters out by: single elements, in equal slices, or whole "
        "tensors; auto: tensors where the optimizer needs them",
        choices=PARTITIONS,
    )
    rule: str = _option(
        "mean",
        text,
        f"how an update's gradients become one, and what is done about staleness: "
        f"{', '.join(RULES)}; options as NAME:VALUE; your own: package.module:Class or "
        f"path/to/file.py:Class",
        choices=RULES,
    )
    compress: str | None = _option(
        None,
        text,
        "what gradients are made smaller by where they go over TCP: bf16, int8, topk:0.01 (the "
        "largest hundredth); what is left out goes with the next one; your own: "
        "package.module:Class or path/to/file.py:Class",
        choices=CODECS,
    )
    compress_replies: str | None = _option(
        None,
        text,
        "the same for parameters on their way back: bf16, rounded; delta, what has changed, to the "
        "last bit",
        choices=REPLY_CODECS,
    )
    compress_always: bool = _option(
        False,
        yes_or_no,
        "also between threads and in shared memory, where it only costs: for trying it out",
    )
    backup_workers: int = _option_of(Sync, "backup_workers")
    round_timeout: float = _option_of(Sync, "round_timeout")
    staleness: float | None = _option_of(Bounded, "staleness", default=None)
    max_delay: float | None = _option_of(Ringmaster, "max_delay", default=None)
    collect: int | None = _option_of(Rennala, "collect", default=None)
    buffer_size: int | None = _option_of(Buffer, "buffer_size", default=None)
    ack: str = _option(
        APPLIED,
        text,
        "what a server's answer promises: applied, that the gradient is in, as long as the server "
        "lives (one that is killed goes on from the newest checkpoint); durable, that it is in a "
        "journal on the disk, out of which everything that was answered is had again",
        choices=(APPLIED, DURABLE),
    )
    split: str = _option(
        "disjoint",
        text,
        "what each worker goes through: a share of its own, or all of the data in its own order",
        choices=SPLITS,
    )
    feed: str | None = _option(
        None,
        text,
        "batches come from a thread that prepares some ahead, or are made when they are needed "
        "(default: as the recipe has it)",
        choices=(BATCHING, DIRECT),
    )
    loader_workers: int = _option(
        0, whole, "processes that read a map-style Dataset for each worker; 0: it reads by itself"
    )
    seed: int = _option(0, whole, "seed of weights, shares, orders and augmentation")
    init: str | None = _option(
        None,
        text,
        "begin with the weights in this .safetensors file, or with the newest of the run in this "
        "folder, instead of the recipe's own (with an average: offbeat export RUN FILE --ema)",
    )
    device: str | None = _option(
        None, text, "what workers compute on: cpu, cuda, cuda:1 (default: a GPU if there is one)"
    )
    devices: str | None = _option(
        None,
        text,
        "towers: several devices per worker, as cuda:0,cuda:1; each computes on a batch of its own",
    )
    amp: str | None = _option(
        None,
        text,
        "compute in a shorter number format where it does no harm, or not (default: as the recipe "
        "has it)",
        choices=(BF16, OFF),
    )
    capture: str = _option(
        AUTO,
        text,
        "on a GPU, record a step once and replay it, where that can be done, or compute every step "
        "anew",
        choices=(AUTO, OFF),
    )
    compile: bool = _option(
        False,
        yes_or_no,
        "compile the step (torch.compile): close to the plain one, not bit for bit; needs a C++ "
        "compiler",
    )
    server_device: str = _option(
        AUTO,
        text,
        "where servers keep parameters: cpu, or cuda, where all workers are threads on one GPU; of "
        "allreduce, where every worker keeps them and gradients are added up: cuda, where each "
        "computes on one",
        choices=(AUTO, "cpu", "cuda"),
    )
    data_device: str = _option(
        AUTO,
        text,
        "where training data lies: cpu, or with the GPU that computes on it, where it fits",
        choices=(AUTO, "cpu"),
    )
    threads: int | None = _option(
        None, whole, "CPU threads of each worker (default: the cores, shared out)"
    )
    engine: str = _option(
        AUTO,
        text,
        "what starts the roles: local, each as a process of this machine; inproc, all as threads "
        "of this one; auto: inproc where all workers compute on one GPU, else local with one "
        "process for the workers of each GPU; ray: each as an actor on a Ray cluster; in a cluster "
        "by address they are started by hand (offbeat role)",
        choices=ENGINES,
    )
    ray_address: str | None = _option(
        None,
        text,
        "ray: the cluster, as host:port; auto: the one that is here, else one of this machine's "
        "own; local: that in any case (default: auto)",
    )
    most_workers: int | None = _option(
        None, whole, "ray: how many workers there may be, as --workers 2..8 says too"
    )
    cpus_per_worker: float = _option(1.0, number, "ray: CPUs of each worker")
    gpus_per_worker: float = _option(0.0, number, "ray: GPUs of each worker, which computes there")
    memory_per_server: float | None = _option(
        None, number, "ray: GiB of memory that each server has to itself"
    )
    worker_timeout: float = _option(
        30.0, number, "a process that is silent for so many seconds counts as gone"
    )
    max_restarts: int = _option(
        3, whole, "how often each process that dies is started again before the run stops"
    )
    fresh_worker_state: bool = _option(
        False,
        yes_or_no,
        "workers write nothing down of what no server has (what the optimizer of --local-steps "
        "keeps, and what --compress leaves out), and begin anew with it whenever they are started "
        "again or the run goes on",
    )
    slow_worker: str | None = _option(
        None, text, "for trying it out: 1:3x has worker 1 take three times as long for each step"
    )
    kill_worker: str | None = _option(
        None, text, "for trying it out: 1@200 has worker 1 killed when it is at step 200"
    )
    lying_worker: str | None = _option(
        None, text, "for trying it out: 1:-100x has worker 1 push its gradients times -100"
    )
    run_dir: str | None = _option(
        None, text, "the run's folder; default: runs/<time>-<recipe>-<discipline>"
    )
    data_dir: str = _option("data", text, "where datasets lie, each in a folder of its own")
    eval_every: int | None = _option(
        None,
        whole,
        "score a checkpoint every so many updates; 0: at the end only; default: about every epoch",
    )
    eval_skipped: bool = _option(
        False,
        yes_or_no,
        "when training is over, score also those of the kept checkpoints that were skipped",
    )
    stop_at: float | str | None = _option(
        None,
        level,
        "end the run when a scored checkpoint is as good as this: an accuracy as high, a loss as "
        "low; NAME=X goes by that metric; inf: never",
    )
    patience: int | None = _option(
        None, whole, "end the run after so many scores in a row that are no better than the best"
    )
    keep_best: bool = _option(
        False, yes_or_no, "keep the weights that were scored best too, as RUN/best.safetensors"
    )
    checkpoint_every: int | None = _option(
        None,
        whole,
        "commit a checkpoint every so many updates; default: whenever one is to be scored",
    )
    keep: int = _option(3, whole, "how many of the newest checkpoints to keep")
    tensorboard: bool = _option(
        False,
        yes_or_no,
        "write RUN/tensorboard (needs the extra: pip install 'offbeat[tensorboard]')",
    )
    summary_every: int | None = _option(
        None,
        whole,
        "tensorboard: show all tensors every so many updates; default: whenever one is scored",
    )
    track: tuple[str, ...] = _option(
        (),
        texts,
        "show the run in wandb (Weights & Biases), mlflow or trackio, or in a project there, as "
        "wandb:PROJECT; may be given several times (needs the extra: pip install 'offbeat[wandb]')",
    )
    log_every: int = _option(
        0, whole, "print a line every so many steps of rank 0, as the recipe words it; 0: none"
    )
    quiet: bool = _option(False, yes_or_no, "print the result only")

    @property
    def chosen(self) -> Choice[Discipline]:
        """The discipline, with its options, wherever they were given."""
        source, parts = parse(self.discipline, BUILT_IN)
        kind = find(source, BUILT_IN, Discipline, "discipline")
        given = read_options(kind, source, parts)
        values = {}
        for option in kind.options:
            value = given.get(option.flag, getattr(self, option.flag, None))
            values[option.name] = option.default if value is None else value
        return Choice(kind, source, values)

    @property
    def variant(self) -> str:
        """The discipline and what changes its updates in a word, as titles and reports have it."""
        parts = [self.chosen.label]
        if self.rule != options()["rule"].default:
            parts.append(self.rule)
        if self.local_steps is not None:
            parts.append(f"{self.local_steps} local steps")
        if self.overlap:
            parts.append("overlap")
        if self.compress is not None:
            parts.append(_in_short(self.compress))
        if self.compress_replies is not None:
            parts.append(f"{_in_short(self.compress_replies)} replies")
        return ", ".join(parts)

    @property
    def most_local_steps(self) -> int:
        """How many a worker takes from one exchange to the next; with auto the fastest."""
        return 1 if self.local_steps is None else int(str(self.local_steps).partition(":")[0])

    @property
    def paces(self) -> bool:
        """Whether slower workers take fewer of them."""
        return isinstance(self.local_steps, str)

    @property
    def batches_per_step(self) -> int:
        """How many a worker goes through from one exchange to the next; with auto the fastest."""
        return self.accumulate * self.most_local_steps

    @property
    def updates_per_pass(self) -> float:
        """How many there are while every worker pushes once."""
        chosen = self.chosen
        each = chosen.kind(range(self.workers), **chosen.values).gradients_per_update
        return self.workers / each

    @property
    def clips_by_norm(self) -> bool:
        return self.clip_norm is not None and self.clip_norm != math.inf

    @property
    def stops_at(self) -> tuple[str | None, float] | None:
        """By which metric, None: the one that the run is judged by, and what it is to reach."""
        if self.stop_at is None or isinstance(self.stop_at, float | int):
            return None if self.stop_at is None else (None, float(self.stop_at))
        name, _, figure = self.stop_at.rpartition("=")
        return name, float(figure)

    @property
    def is_judged(self) -> bool:
        """Whether anything follows from scores."""
        return self.stop_at is not None or self.patience is not None or self.keep_best

    @property
    def num_towers(self) -> int:
        return len(self.devices.split(",")) if self.devices else 1

    @property
    def is_durable(self) -> bool:
        """Whether what servers have answered is on their disks."""
        return self.ack == DURABLE

    @property
    def slowdowns(self) -> dict[int, float]:
        """How many times as long as it needs to each worker that is held up takes for a step."""
        found = _by_rank("slow_worker", self.slow_worker, r"(\d+):(\d+(?:\.\d+)?)x", "1:3x")
        return {rank: float(factor) for rank, factor in found.items()}

    @property
    def kills(self) -> dict[int, int]:
        """At which step workers are killed."""
        found = _by_rank("kill_worker", self.kill_worker, r"(\d+)@(\d+)", "1@200")
        return {rank: int(step) for rank, step in found.items()}

    @property
    def lies(self) -> dict[int, float]:
        """What the gradients of each worker that lies are multiplied by."""
        found = _by_rank("lying_worker", self.lying_worker, r"(\d+):(-?\d+(?:\.\d+)?)x", "1:-100x")
        return {rank: float(factor) for rank, factor in found.items()}

    def validated(self) -> "TrainConfig":
        """The same in its resolved form, or a ConfigError that names what is wrong with it."""
        config = _resolve_discipline(self)
        if config.most_workers is not None:  # anybody can do any step
            config = dataclasses.replace(config, split="shared")
        for name, value in vars(config).items():
            _check_choice(name, value)
        for name, least in _LEAST.items():
            value = getattr(config, name)
            if name == "local_steps" and value is not None:
                value = config.most_local_steps
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if config.threads is not None and config.threads > MAX_THREADS:
            raise ConfigError(f"threads must be at most {MAX_THREADS}, not {config.threads}")
        for name in ("lr", "worker_timeout", "clip_norm", "clip_value"):
            value = getattr(config, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, not {value:g}")
        for name in ("lr", "clip_value"):
            if getattr(config, name) == math.inf:
                raise ConfigError(f"{name} must be finite")
        if config.steps is not None and config.epochs is not None:
            raise ConfigError("steps and epochs both say how long to train: give one of the two")
        if config.device is not None and config.devices is not None:
            raise ConfigError("device and devices both say where to compute: give one of the two")
        if config.device is not None and "," in config.device:
            raise ConfigError(f"several devices are given by devices, as --devices {config.device}")
        if config.stops_at is not None and config.stops_at[1] == -math.inf:
            raise ConfigError("stop_at must be finite, or inf: never")
        check_clipping(config)
        _check_injected(config)
        _check_ray(config)
        if config.run_dir is not None and "://" in config.run_dir:
            raise ConfigError(
                f"run_dir {config.run_dir} is no path, and a run's folder has to be one: where "
                f"files can be locked, added to and renamed; with several machines, a path that "
                f"all of them see"
            )
        config = _resolve_coding(config)
        _check_unserved(config)
        _check_ack(config)
        if config.outer_optimizer is not None and config.local_steps is None:
            raise ConfigError(
                "outer_optimizer is the servers', where workers have one of their own: give "
                "--local-steps H too, or say --optimizer"
            )
        _check_pacing(config)
        if config.init is not None:  # it is read by whoever is told of it, from any folder
            config = dataclasses.replace(config, init=str(Path(config.init).absolute()))
        for tracker in config.track:
            if (name := tracker.partition(":")[0]) not in TRACKERS:
                raise ConfigError(f"unknown track {name!r}; {nearest(name, TRACKERS)}")
        return config

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinities as text, since JSON knows none."""
        return {k: "inf" if v == math.inf else v for k, v in dataclasses.asdict(self).items()}


_LEAST = {
    "servers": 1,
    "workers": 1,
    "epochs": 1,
    "steps": 1,
    "batch_size": 1,
    "accumulate": 1,
    "local_steps": 1,
    "loader_workers": 0,
    "seed": 0,
    "threads": 1,
    "max_restarts": 0,
    "eval_every": 0,
    "patience": 1,
    "checkpoint_every": 1,
    "keep": 1,
    "summary_every": 1,
    "log_every": 0,
}


def options() -> dict[str, dataclasses.Field[Any]]:
    """Every option by its name, in the order of the dataclass."""
    return {f.name: f for f in dataclasses.fields(TrainConfig)}


def make_config(*layers: Mapping[str, Any]) -> TrainConfig:
    """A validated configuration; a later layer beats an earlier one, unknown keys are fatal."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in _with_range(layer).items():
            found = convert(key, value)
            if found is None and options()[key].default is not None:
                continue  # from Python: as if it were not given
            merged[key] = {**merged.get(key, {}), **found} if isinstance(found, dict) else found
    return TrainConfig(**merged).validated()


def _with_range(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """2..8 workers are two options."""
    least, dots, most = str(layer.get("workers", "")).partition("..")
    if dots and "most_workers" in layer:
        raise ConfigError(f"workers {least}{dots}{most} says most_workers too: leave one of them")
    return {**layer, "workers": least, "most_workers": most} if dots else layer


def not_overruled(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What of `before` still holds beside what is `given`, also where that has another name."""
    overruled = {name for name in given if name != "set"}  # of which each layer says some
    for names in ({"steps", "epochs"}, {"clip_norm", "clip_value"}):
        if names & overruled:
            overruled |= names
    if "discipline" in given:
        source, parts = parse(str(given["discipline"]), BUILT_IN)
        if source != parse(str(before.get("discipline", "")), BUILT_IN)[0]:
            overruled |= discipline_options()
            if rule_of(before) in RULES_OF_SEVERAL:
                overruled.add("rule")
        elif parts:
            overruled |= discipline_options()
    return {key: value for key, value in before.items() if key not in overruled}


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The options in a TOML or JSON file; a run's own config.json will do."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
        loaded = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError) as error:
        form = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not valid {form}: {error}") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("config"), dict):
        loaded = _options_of_run(loaded)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds no table of options")
    values = {key.replace("-", "_"): value for key, value in loaded.items()}
    for key in values:
        if key not in options():
            raise ConfigError(f"{path}: unknown key {key!r}; {nearest(key, options())}")
    return {key: value for key, value in values.items() if value is not None}


def _options_of_run(described: Mapping[str, Any]) -> dict[str, Any]:
    """Out of a run's config.json: its other keys tell where it ran, and its folder is taken. The
    recipe's file is where it was then, unless its name leads to one from here."""
    found = {k: v for k, v in described["config"].items() if k != "run_dir"}
    source, _, attribute = str(found.get("recipe")).rpartition(":")
    file = described.get("recipe_file")
    if isinstance(file, dict) and source.endswith(".py") and not Path(source).is_file():
        found["recipe"] = f"{file['path']}:{attribute}"
    return found


def convert(key: str, value: Any) -> Any:
    """An option's value, out of a flag's text or a file's value."""
    known = options()
    if key not in known:
        raise ConfigError(f"unknown option {key!r}; {nearest(key, known)}")
    if value is None:
        return None
    kind = known[key].metadata["kind"]
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{key} must be {KIND_NAMES[kind]}, not {_briefly(value)}") from None


def _briefly(value: Any) -> str:
    """What was given instead."""
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return ", ".join(map(repr, value))
    shown = repr(value)
    return (
        shown
        if len(shown) <= MAX_SHOWN and "\n" not in shown
        else f"an object of class {type(value).__name__}"
    )


def _check_choice(name: str, value: Any) -> None:
    choices = options()[name].metadata["choices"]
    if name in PLUGINS and value is not None and ":" in value:
        return  # one of the user's own
    if value is not None and choices and value not in (*choices, *REFUSED_LATER.get(name, ())):
        raise ConfigError(f"unknown {name} {value!r}; {nearest(value, choices)}")


def _by_rank(name: str, value: str | None, form: str, example: str) -> dict[int, str]:
    """What is said of some workers, one or several with commas between them."""
    found: dict[int, str] = {}
    for part in value.split(",") if value else []:
        match = re.fullmatch(form, part.strip())
        if match is None:
            raise ConfigError(f"{name} must be of the form {example}, not {part.strip()!r}")
        found[int(match[1])] = match[2]
    return found


def check_clipping(config: TrainConfig) -> None:
    """What the options say, or the recipe suggests."""
    if config.clip_norm is not None and config.clip_value is not None:
        raise ConfigError("clip_norm and clip_value both clip gradients: give one of the two")


def _check_injected(config: TrainConfig) -> None:
    found: tuple[Mapping[int, float], ...] = (config.slowdowns, config.kills, config.lies)
    most = config.most_workers or config.workers
    for name, by_rank in zip(FAULT_OPTIONS, found, strict=True):
        for rank, value in by_rank.items():
            if rank >= most:
                raise ConfigError(
                    f"{name} names worker {rank}, but there are {most}, counted from 0"
                )
            if value < 1 and name != "lying_worker":
                raise ConfigError(f"{name} must say 1 or more, not {value:g}")
    if config.kills and config.engine not in OF_PROCESSES:
        raise ConfigError(
            f"kill_worker needs the engine local or ray, where workers are processes; not "
            f"{config.engine}"
        )


def _check_ray(config: TrainConfig) -> None:
    known = options()
    for name in RAY_OPTIONS:
        if config.engine != "ray" and getattr(config, name) != known[name].default:
            raise ConfigError(f"{name} belongs to the engine ray: give --engine ray, or leave it")
    _check_range(config)
    if config.devices is not None and config.engine == "ray":
        raise ConfigError(
            "devices are a machine's own, and Ray gives workers theirs: say --gpus-per-worker N"
        )
    for name in ("cpus_per_worker", "gpus_per_worker", "memory_per_server"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be 0 or more, not {value:g}")
        if value is not None and value > 1 and name != "memory_per_server" and value % 1:
            raise ConfigError(f"{name} above 1 must be whole for Ray, not {value:g}")


def _check_range(config: TrainConfig) -> None:
    if (most := config.most_workers) is None:
        return
    if most < config.workers:
        raise ConfigError(f"workers {config.workers}..{most}: the first number is the smaller one")
    if config.chosen.kind.in_rounds:
        raise ConfigError(
            f"workers come and go under asynchronous disciplines only, and {config.chosen.label} "
            f"waits for all of them: give one number of workers"
        )


def _check_unserved(config: TrainConfig) -> None:
    """What takes servers, where there are none."""
    kind = config.chosen.kind
    if kind.served:
        return
    if config.servers > 1:
        raise ConfigError(
            f"{kind.name} has no servers: leave servers {config.servers} out, or say 1 where a run "
            f"goes on"
        )
    if config.engine not in PEER_ENGINES:
        raise ConfigError(
            f"{kind.name} needs the engine local, where workers are processes that meet without a "
            f"server; not {config.engine}"
        )
    if config.partition != AUTO:
        raise ConfigError(f"{kind.name} has no servers: leave partition {config.partition} out")
    for name in CODING_OPTIONS[:2]:
        if (value := getattr(config, name)) is not None:
            raise ConfigError(
                f"{kind.name} adds gradients up as they are, and has no replies: leave {name} "
                f"{value} out"
            )
    if config.rule not in RULES_OF_SUMS:
        raise ConfigError(
            f"{kind.name} knows no more of a round's gradients than their sum: rule must be "
            f"{' or '.join(RULES_OF_SUMS)}, not {config.rule}"
        )


def _check_ack(config: TrainConfig) -> None:
    """A journal is a server's, on its own disk, and has updates in one order."""
    if not config.is_durable:
        return
    kind = config.chosen.kind
    if not kind.served:
        raise ConfigError(
            f"ack durable is a server's promise, and {kind.name} has none: leave it out"
        )
    if not kind.locked:
        raise ConfigError(
            f"ack durable writes updates down in the order in which they are made, and {kind.name} "
            f"has no such order: say --discipline reply-apply, which answers at once as well"
        )
    if config.engine == "ray":
        raise ConfigError(
            "ack durable keeps a journal on the server's disk, and Ray may start a server again "
            "on another node: say --engine local, or start the roles on machines by hand"
        )
    if config.server_device not in (AUTO, "cpu"):
        raise ConfigError(
            f"ack durable writes gradients down from the CPU's memory: leave server_device "
            f"{config.server_device} out, or say cpu"
        )


def _resolve_coding(config: TrainConfig) -> TrainConfig:
    """Without the codec that is none."""
    changed: dict[str, Any]
    changed = {name: None for name in CODING_OPTIONS[:2] if getattr(config, name) == NONE}
    config = dataclasses.replace(config, **changed)
    if config.compress_always and config.compress is None and config.compress_replies is None:
        raise ConfigError(
            "compress_always says where to compress, and nothing says what: give --compress or "
            "--compress-replies too"
        )
    return config


def _in_short(source: str) -> str:
    """A codec, without the folder that it is in."""
    return source.rpartition("/")[2]


def _check_pacing(config: TrainConfig) -> None:
    if not config.paces:
        return
    what = f"local_steps {config.local_steps}"
    if config.most_local_steps == 1:
        raise ConfigError(f"{what} leaves slower workers no fewer to take: give 2 or more")
    if not config.chosen.kind.served:
        raise ConfigError(
            f"{what} needs servers, who tell workers how fast the others are, and "
            f"{config.chosen.kind.name} has none: say {config.most_local_steps}"
        )
    if config.most_workers is not None:
        raise ConfigError(
            f"{what} has every worker go through batches of its own, and where workers come and go "
            f"any of them does any step: say {config.most_local_steps}"
        )


def discipline_options() -> set[str]:
    """Options that mean something under one discipline only."""
    return {option.flag for kind in BUILT_IN.values() for option in kind.options}


def _resolve_discipline(config: TrainConfig) -> TrainConfig:
    """Take bounded:2 apart, and refuse options that the chosen discipline would ignore."""
    source, parts = parse(config.discipline, BUILT_IN)
    kind = find(source, BUILT_IN, Discipline, "discipline")
    given = read_options(kind, source, parts)
    known = {option.flag: option for option in kind.options}
    _refuse_foreign(config, kind, known)
    fields: dict[str, Any] = {}
    rest = []
    for flag, option in known.items():
        if flag in options():
            fields[flag] = _given_once(config, flag, option, given)
        elif flag in given:
            option.check(given[flag])
            rest.append(f"{flag}={given[flag]:g}")
    fields["discipline"] = ":".join([_from_anywhere(source, config), *rest])
    for name in PLUGINS:
        if (named := getattr(config, name)) is not None:
            source, parts = parse(named, {})
            fields[name] = ":".join([_from_anywhere(source, config), *parts])
    config = dataclasses.replace(config, **fields)
    if complaint := kind.complaint(config.workers, config.chosen.values):
        raise ConfigError(complaint)
    return config


def _from_anywhere(source: str, config: TrainConfig) -> str:
    """Where a class of the user's is, for processes and people in other folders too; not on other
    machines, where the same name leads to a place of their own."""
    path, _, name = source.rpartition(":")
    if config.engine == "cluster" or not path.endswith(".py"):
        return source
    return f"{Path(path).absolute()}:{name}"


def _refuse_foreign(
    config: TrainConfig, kind: type[Discipline], known: Mapping[str, Option]
) -> None:
    """An option that belongs to another discipline is not passed over."""
    for other in BUILT_IN.values():
        for option in other.options:
            default = options()[option.flag].default
            if option.flag not in known and getattr(config, option.flag) != default:
                raise ConfigError(
                    f"{option.flag} belongs to the discipline {other.name}, not to {kind.name}"
                )
    if not kind.merges and rule_of({"rule": config.rule}) in RULES_OF_SEVERAL:
        merging = [k.name for k in BUILT_IN.values() if k.merges]
        raise ConfigError(
            f"the rule {config.rule} is for updates of several gradients, as "
            f"{' or '.join(merging)} makes them, and {kind.name} makes each of one"
        )


def rule_of(given: Mapping[str, Any]) -> str:
    """A rule's name without its options."""
    return parse(str(given.get("rule", "")), {})[0]


def _given_once(
    config: TrainConfig, flag: str, option: Option, given: Mapping[str, float]
) -> float:
    """An option's value, which a short form and a flag must not give differently."""
    value, default = getattr(config, flag), options()[flag].default
    if flag in given:
        short = convert(flag, given[flag])
        if value not in (default, short):
            raise ConfigError(f"{config.discipline} contradicts {flag} {value:g}")
        value = short
    value = convert(flag, option.default) if value is None else value
    option.check(value)
    return cast("float", value)
