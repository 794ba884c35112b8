"""`offbeat launch`: start a script as the workers of a run, with servers beside them.

The engine is `local`; the run's folder is like that of any other, and has no recipe but a script.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.api import Result
from offbeat.config import TrainConfig, make_config, not_overruled
from offbeat.engines.forkserver import ForkServer
from offbeat.engines.local import LocalEngine
from offbeat.errors import ConfigError
from offbeat.loops.job import facts_json, make_loop_job, resolved
from offbeat.report.summary import summarise
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder, create_run_folder, describe_run


class Notices(Display):
    """The terminal is rank 0's; what happens to the run is said in between."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def update(self, status: Status) -> None:
        pass

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
) -> Result:
    """Run a script as every worker of a new run."""
    began_s = time.monotonic()
    file = Path(script)
    if not file.is_file():
        raise ConfigError(f"there is no script {script}")
    config = resolved(make_config({**options, "recipe": file.name}))
    folder = create_run_folder(config)
    described = {"file": str(file.resolve()), "arguments": list(arguments)}
    with folder.locked() as lock:
        return _run(config, folder, described, began_s, say, forks, lock, incarnation=0)


def relaunch(
    run_dir: Path,
    options: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    forks: ForkServer | None = None,
) -> Result:
    """Go on with a run that was launched, from its newest checkpoint."""
    folder = RunFolder(run_dir)
    before, described = folder.read_config()
    if "script" not in described:
        raise ConfigError(f"{run_dir} is no launched run; go on with: offbeat train --resume")
    kept = {key: value for key, value in before.to_json().items() if value is not None}
    config = make_config(not_overruled(kept, options), options, {"run_dir": str(run_dir)})
    with folder.locked() as lock:
        checkpoint = newest_checkpoint(folder.checkpoints)
        began_s = time.monotonic() - summarise(folder.path)["total_time_s"]
        for left in (folder.state, folder.model):
            left.unlink(missing_ok=True)
        incarnation = 1 + max((i for i, _ in checkpoint.applied().values()), default=0)
        script = described["script"]
        return _run(config, folder, script, began_s, say, forks, lock, incarnation=incarnation)


def _run(
    config: TrainConfig,
    folder: RunFolder,
    script: Mapping[str, Any],
    began_s: float,
    say: Callable[[str], None],
    forks: ForkServer | None,
    lock: int,
    *,
    incarnation: int,
) -> Result:
    described = describe_run(
        config,
        script=dict(script),
        metric="loss",
        resolved=_resolved(config),
        job=facts_json(config),
    )
    folder.write_json(folder.config, described)
    engine = LocalEngine(
        make_loop_job(config, None),
        folder,
        Notices(say),
        began_s,
        lock=lock,
        forks=forks,
        incarnation=incarnation,
        shows_rank_0=True,
    )
    try:
        engine.run()
    finally:
        summary = summarise(folder.path)
        folder.write_json(folder.summary, summary)
    return Result(folder.path, summary)


def _resolved(config: TrainConfig) -> dict[str, Any]:
    asked = ("threads", "checkpoint_every")
    return {"engine": "local", **{name: dataclasses.asdict(config)[name] for name in asked}}
