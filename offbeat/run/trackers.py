"""Experiment trackers as callbacks: `--track wandb|mlflow|trackio`, or NAME:PROJECT.

Made by the api for each run; called as all callbacks are (run/callbacks.py). Each shows the
options, and over the updates loss, learning_rate, gradients_per_s, examples_per_s, staleness, and
test/ with each metric's name; in the end what the run came to. Runs that differ in their seed only
share a group. What is no number is left out. A run that is resumed goes on where it was, as far as
the library can.
"""

import contextlib
import importlib
import json
import math
import netrc
import os
import re
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from offbeat.errors import ConfigError
from offbeat.recipes.callbacks import Callback, End, Evaluation, Start, Steps

PROJECT = "offbeat"
"""Where neither the flag nor the library's environment variable names one."""
GRID_FILE = "compare.json"
"""In the folder of a comparison."""
NOT_AN_OPTION = ("run_dir", "track", "quiet")


class Tracker(Callback):
    """One library. What it needs to find a run again stands in RUN/trackers.json."""

    name: ClassVar[str]
    variable: ClassVar[str]
    """What the library reads a project's name from."""

    def __init__(self, project: str) -> None:
        self._project = project or os.environ.get(self.variable, "") or PROJECT
        self._library: Any = importlib.import_module(self.name)

    def on_start(self, run: Start) -> None:
        kept = run.run_dir / "trackers.json"
        known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        known[self.name] = self._open(run, known.get(self.name))
        kept.write_text(json.dumps(known) + "\n", encoding="utf-8")

    def on_step(self, steps: Steps) -> None:
        names = ("loss", "gradients_per_s", "examples_per_s", "staleness")
        found = {name: getattr(steps, name) for name in names}
        self._show({**found, "learning_rate": steps.lr}, steps.version)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        found = {f"test/{name}": value for name, value in evaluation.scores.items()}
        self._show(found, evaluation.version)

    def on_end(self, end: End) -> None:
        self._close(end)

    def _show(self, values: Mapping[str, float | None], version: int) -> None:
        known = {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
        if known:
            self._log(known, version)

    @abstractmethod
    def _open(self, run: Start, known: str | None) -> str:
        """Begin, or go on with the one `known` by this; returns what it is known by."""

    @abstractmethod
    def _log(self, values: dict[str, float], version: int) -> None: ...

    @abstractmethod
    def _close(self, end: End) -> None: ...


class Wandb(Tracker):
    """Weights & Biases. Without an account on this machine, and unless WANDB_MODE says otherwise,
    into RUN/wandb, for `wandb sync`."""

    name = "wandb"
    variable = "WANDB_PROJECT"

    def _open(self, run: Start, known: str | None) -> str:
        self._run = self._library.init(
            project=self._project,
            name=name_of(run.run_dir),
            group=os.environ.get("WANDB_RUN_GROUP") or group_of(run),
            config=options_of(run),
            dir=str(run.run_dir),
            id=known,
            resume="allow" if known else None,
            mode=None if _may_log_in() else "offline",
            reinit="create_new",
            settings=self._library.Settings(console="off", silent=bool(run.config["quiet"])),
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")  # a score comes after later steps
        return str(self._run.id)

    def _log(self, values: dict[str, float], version: int) -> None:
        self._run.log({**values, "version": version})

    def _close(self, end: End) -> None:
        self._run.summary.update({"status": end.status, "reason": end.reason})
        self._run.finish(exit_code=0 if end.status == "finished" else 1)


class Mlflow(Tracker):
    """MLflow, wherever MLFLOW_TRACKING_URI leads to."""

    name = "mlflow"
    variable = "MLFLOW_EXPERIMENT_NAME"

    STATUS: ClassVar = {"finished": "FINISHED", "interrupted": "KILLED"}

    def _open(self, run: Start, known: str | None) -> str:
        self._client = self._library.MlflowClient()
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return known
        tags = {"mlflow.source.name": "offbeat", "group": group_of(run)}
        made = self._client.create_run(self._experiment(), tags=tags, run_name=name_of(run.run_dir))
        self._id = str(made.info.run_id)
        for name, value in options_of(run).items():
            self._client.log_param(self._id, name, value)
        return self._id

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._project)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self._project))

    def _log(self, values: dict[str, float], version: int) -> None:
        at_ms = int(time.time() * 1000)
        named = {re.sub(r"[^\w./ -]", "_", name): value for name, value in values.items()}
        metric = self._library.entities.Metric
        self._client.log_batch(self._id, [metric(k, v, at_ms, version) for k, v in named.items()])

    def _close(self, end: End) -> None:
        if end.reason is not None:
            self._client.set_tag(self._id, "reason", end.reason)
        self._client.set_terminated(self._id, self.STATUS.get(end.status, "FAILED"))


class Trackio(Tracker):
    """Trackio, on this machine, or where TRACKIO_SPACE_ID leads to."""

    name = "trackio"
    variable = "TRACKIO_PROJECT"

    def _open(self, run: Start, known: str | None) -> str:
        self._run = self._library.init(
            project=self._project,
            name=known or name_of(run.run_dir),
            group=group_of(run),
            config=options_of(run),
            resume="allow" if known else "never",
        )
        return str(self._run.name)

    def _log(self, values: dict[str, float], version: int) -> None:
        self._run.log(values, step=version)

    def _close(self, end: End) -> None:
        self._run.log({"status": end.status}, step=end.summary.get("updates"))
        self._run.finish()


KINDS: dict[str, type[Tracker]] = {kind.name: kind for kind in (Wandb, Mlflow, Trackio)}


def check_trackers(asked: Iterable[str]) -> None:
    """A ConfigError where one of what --track was given is not installed."""
    for name in (text.partition(":")[0] for text in asked):
        try:
            importlib.import_module(KINDS[name].name)
        except ImportError as error:
            raise ConfigError(
                f"--track {name} needs a package that cannot be imported ({error}): "
                f"pip install 'offbeat[{name}]'"
            ) from error


def make_trackers(asked: Iterable[str]) -> list[Tracker]:
    parts = (text.partition(":") for text in asked)
    return [KINDS[name](project) for name, _, project in parts]


def options_of(run: Start) -> dict[str, Any]:
    """The options and what they came to, by their names."""
    found = {**run.config, **run.resolved}
    return {k: v for k, v in found.items() if v is not None and k not in NOT_AN_OPTION}


def name_of(run_dir: Path) -> str:
    """The folder's; of a run in a comparison the cell's, too."""
    in_a_grid = (run_dir.absolute().parent.parent / GRID_FILE).exists()
    return f"{run_dir.parent.name}-{run_dir.name}" if in_a_grid else run_dir.absolute().name


def group_of(run: Start) -> str:
    """Runs that differ in their seed only have the same."""
    config = run.config
    recipe = Path(config["recipe"]).name
    told = ("staleness", "backup_workers", "max_delay", "collect", "buffer_size")
    asked = {name: config.get(name) for name in told}
    more = {**asked, **(config.get("set") or {})}
    options = "".join(f" {name}={value}" for name, value in more.items() if value)
    return f"{recipe} {config['discipline']} {config['workers']}w {config['servers']}s{options}"


def _may_log_in() -> bool:
    """Whether Weights & Biases is to find out by itself: it was told how, or knows its account."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(str(host)) is not None
    return False
