"""`offbeat launch`: start a script as the workers of a run, with servers beside them.

The engine is `local`, or in a cluster the master's own; the run's folder is like that of any other,
and has no recipe but a script.
"""

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.api import Result
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.rays import RayCluster, find_ray
from offbeat.config import APPLIED, CODING_OPTIONS, TrainConfig, make_config, not_overruled
from offbeat.engines.actors import RayEngine, ray_for
from offbeat.engines.base import Engine
from offbeat.engines.forkserver import ForkServer
from offbeat.engines.local import LocalEngine
from offbeat.engines.scripted import ScriptedEngine
from offbeat.errors import ConfigError, ScriptEndedError, ScriptRefusedError
from offbeat.loops.description import Description
from offbeat.loops.job import facts_json, make_loop_job, resolved
from offbeat.recipes.callbacks import Callback, Start
from offbeat.recipes.metrics import LOSS
from offbeat.report.summary import summarise
from offbeat.roles.salvage import has_journals, salvage
from offbeat.run.callbacks import Caller
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.event_files import remove_halves
from offbeat.run.journal import remove_if_empty
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder, create_run_folder, describe_run
from offbeat.run.tensorboard import check_installed
from offbeat.run.trackers import check_trackers, make_trackers
from offbeat.scripts import change_of, describe_script


class Notices(Display):
    """The terminal is rank 0's; what happens to the run is said in between."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown: tuple[Any, ...] = ()

    def update(self, status: Status) -> None:
        """What the script has scored since."""
        if status.score is None or (what := (status.score[0], *status.scores)) == self._shown:
            return
        self._shown = what
        words = ", ".join(f"test {name} {value:.4f}" for name, value in status.scores.items())
        self.notice(f"{words} at version {status.score[0]}")

    def notice(self, text: str) -> None:
        self._say(f"offbeat: {text}")

    def close(self) -> None:
        pass


def launch(
    script: str,
    arguments: Sequence[str],
    options: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    forks: ForkServer | None = None,
    callbacks: Sequence[Callback] = (),
    master: "InCluster | None" = None,
) -> Result:
    """Run a script as every worker of a new run, or as a cluster's master alone."""
    described = describe_script(script, arguments)
    config = make_config({**options, "recipe": Path(script).name})
    return launch_config(
        config, described, Notices(say), forks=forks, callbacks=callbacks, master=master
    )


@dataclasses.dataclass(frozen=True)
class InCluster:
    """Of a cluster: how it meets the others, and what a person stops it with."""

    endpoint: Endpoint
    stop: threading.Event


def launch_config(
    config: TrainConfig,
    script: Mapping[str, Any],
    display: Display,
    *,
    forks: ForkServer | None = None,
    callbacks: Sequence[Callback] = (),
    shows_rank_0: bool = True,
    master: InCluster | None = None,
    begun: Callable[[Engine], None] = lambda engine: None,
) -> Result:
    """The same, from a configuration that is complete. `shows_rank_0`: what its script prints goes
    where this process's output does, not to a log; `begun` is given the engine."""
    began_s = time.monotonic()
    config = resolved(config)
    _check(config)
    with ray_for(config) as cluster:
        folder = create_run_folder(config)
        launched = Launched(
            config,
            folder,
            script,
            began_s,
            display,
            forks,
            callbacks=callbacks,
            shows_rank_0=shows_rank_0,
            master=master,
            begun=begun,
        )
        with folder.locked() as lock:
            try:
                return launched.run(cluster, lock, incarnation=0)
            except (ScriptEndedError, ScriptRefusedError):
                if not folder.model.exists():  # or another rank has begun
                    shutil.rmtree(folder.path)
                raise


def relaunch(
    run_dir: Path,
    options: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    forks: ForkServer | None = None,
    callbacks: Sequence[Callback] = (),
    master: InCluster | None = None,
) -> Result:
    """Go on with a run that was launched, from its newest checkpoint."""
    folder = RunFolder(run_dir)
    before, described = folder.read_config()
    if "script" not in described:
        raise ConfigError(f"{run_dir} is no launched run; go on with: offbeat train --resume")
    kept = {key: value for key, value in before.to_json().items() if value is not None}
    here = {"run_dir": str(run_dir)} | ({} if master is None else {"engine": "cluster"})
    config = make_config(not_overruled(kept, options), options, here)
    _check(config)
    with folder.locked() as lock:
        remove_halves(folder.events)
        elapsed_s = summarise(folder.path)["total_time_s"]
        began_s = time.monotonic() - elapsed_s
        salvaged: Sequence[str] = ()
        if has_journals(folder):
            description = Description.from_json(folder.read_json(folder.model))
            job = make_loop_job(before, description)
            is_tolerant = options.get("ack") == APPLIED
            salvaged = salvage(folder, job, at_s=elapsed_s, tolerant=is_tolerant)
        checkpoint = newest_checkpoint(folder.checkpoints)
        for left in (folder.state, folder.model):
            left.unlink(missing_ok=True)
        incarnation = 1 + max((i for i, _ in checkpoint.applied().values()), default=0)
        display, script = Notices(say), described["script"]
        for line in salvaged:
            display.notice(line)
        if (change := change_of(script)) is not None:
            display.notice(change)
        about = (config, folder, script, began_s, display, forks)
        launched = Launched(*about, callbacks=callbacks, master=master)
        with ray_for(config) as cluster:
            return launched.run(cluster, lock, incarnation=incarnation)


def _check(config: TrainConfig) -> None:
    """Have what is missing said while there is no folder yet."""
    if config.tensorboard:
        check_installed()
    check_trackers(config.track)
    if config.most_workers is not None:
        raise ConfigError(
            f"workers {config.workers}..{config.most_workers} are for recipes: a script's share of "
            f"the data is cut once; give one number"
        )
    if config.engine == "ray":
        find_ray()


@dataclasses.dataclass(frozen=True)
class Launched:
    """A run that is about to begin, or to go on."""

    config: TrainConfig
    folder: RunFolder
    script: Mapping[str, Any]
    began_s: float
    display: Display
    forks: ForkServer | None
    callbacks: Sequence[Callback] = ()
    shows_rank_0: bool = True
    master: InCluster | None = None
    begun: Callable[[Engine], None] = lambda engine: None

    def run(self, cluster: RayCluster | None, lock: int, *, incarnation: int) -> Result:
        folder = self.folder
        folder.write_json(folder.config, describe_launched(self.config, self.script))
        told = [*self.callbacks, *make_trackers(self.config.track)]
        start = self._start(is_resumed=incarnation > 0)
        caller = Caller(told, folder, self.display, start)
        engine = self._make_engine(caller.display, cluster, lock, incarnation)
        self.begun(engine)
        with caller:
            try:
                engine.run()
                if not engine.interrupted:
                    folder.cluster.unlink(missing_ok=True)
            finally:
                remove_if_empty(folder.journal)
                summary = summarise(folder.path)
                folder.write_json(folder.summary, summary)
                caller.ended(summary, engine.failures)
        return Result(folder.path, summary)

    def _make_engine(
        self, display: Display, cluster: RayCluster | None, lock: int, incarnation: int
    ) -> Engine:
        job = make_loop_job(self.config, None)
        if (idle := job.idle_codecs) is not None:
            display.notice(idle)
        if cluster is not None:
            return RayEngine(
                job,
                self.folder,
                display,
                self.began_s,
                cluster=cluster,
                incarnation=incarnation,
                shows_rank_0=self.shows_rank_0,
            )
        if self.master is None:
            return LocalEngine(
                job,
                self.folder,
                display,
                self.began_s,
                lock=lock,
                forks=self.forks,
                incarnation=incarnation,
                shows_rank_0=self.shows_rank_0,
            )
        return ScriptedEngine(
            job,
            self.folder,
            self.script,
            display,
            lambda: time.monotonic() - self.began_s,
            endpoint=self.master.endpoint,
            stop=self.master.stop,
            incarnation=incarnation,
        )

    def _start(self, *, is_resumed: bool) -> Start:
        """What callbacks are told of it; what it is judged by the script has not said yet."""
        return Start(
            run_dir=self.folder.path,
            config=self.config.to_json(),
            resolved=_resolved(self.config),
            metric=LOSS,
            higher_is_better={},
            total_updates=None,
            is_resumed=is_resumed,
        )


def describe_launched(config: TrainConfig, script: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says."""
    return describe_run(
        config,
        script=dict(script),
        metric=LOSS,
        resolved=_resolved(config),
        job=facts_json(config),
    )


def _resolved(config: TrainConfig) -> dict[str, Any]:
    asked = ("engine", "threads", "checkpoint_every", *CODING_OPTIONS)
    return {name: getattr(config, name) for name in asked}
