"""A run's folder: what is where, how it is made, and what config.json says.

RUN/config.json  RUN/logs/  RUN/events/  RUN/checkpoints/  RUN/summary.json
"""

import json
import logging
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from offbeat.config import TrainConfig
from offbeat.errors import RunDirError
from offbeat.version import __version__


class RunFolder:
    """The paths in a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.logs = path / "logs"
        self.events = path / "events"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"

    def write_json(self, path: Path, content: Any) -> None:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def open_log(self, role: str) -> logging.Logger:
        """A logger of one role, to logs/ROLE.log; `close_log` ends it."""
        logger = logging.Logger(role)
        handler = logging.FileHandler(self.logs / f"{role}.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        return logger


def close_log(logger: logging.Logger) -> None:
    logger.disabled = True  # a thread that was given up may still have something to say
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def create_run_folder(config: TrainConfig, metric: str) -> RunFolder:
    """Make the folder that `config` names, or a new one under runs/, and write config.json."""
    try:
        path = _claim(Path(config.run_dir)) if config.run_dir else _claim_new(_default_name(config))
        folder = RunFolder(path)
        for part in (folder.logs, folder.events, folder.checkpoints):
            part.mkdir()
    except OSError as error:
        where = error.filename or config.run_dir
        raise RunDirError(
            f"cannot make the run's folder {where}: {error.strerror}; choose another --run-dir"
        ) from error
    described = {"config": config.to_json(), "metric": metric, "environment": _environment()}
    folder.write_json(folder.config, described)
    return folder


def _claim(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise RunDirError(f"{path} is a file; choose another --run-dir")
    if (path / "config.json").exists():
        raise RunDirError(f"{path} holds another run; choose another --run-dir, or remove it")
    if path.is_dir() and any(path.iterdir()):
        raise RunDirError(f"{path} is not empty; choose another --run-dir")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _claim_new(name: str) -> Path:
    """runs/NAME, with a number behind it where two runs begin in the same second."""
    path = Path("runs") / name
    path.parent.mkdir(exist_ok=True)
    for number in range(2, 1000):
        try:
            path.mkdir()
            return path
        except FileExistsError:
            path = path.with_name(f"{name}-{number}")
    raise RunDirError(f"runs/{name} and a thousand others exist; choose a --run-dir")


def _default_name(config: TrainConfig) -> str:
    recipe = re.sub(r"[^\w.-]+", "-", Path(config.recipe).name.replace(".py:", "-"))
    discipline = config.discipline
    if config.staleness is not None:
        discipline += f"-{config.staleness:g}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{recipe}-{discipline}"


def _environment() -> dict[str, Any]:
    return {
        "offbeat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "git": _git_hash(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _git_hash() -> str | None:
    """The commit of the folder that the run was started in, if it is a checkout."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
