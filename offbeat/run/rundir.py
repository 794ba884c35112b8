"""A run's folder: what is where, how it is made, and what config.json says.

RUN/config.json  RUN/logs/  RUN/events/  RUN/checkpoints/  RUN/summary.json
RUN/tensorboard/
"""

import contextlib
import fcntl
import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.config import TrainConfig, make_config
from offbeat.errors import RoleError, RunDirError
from offbeat.version import __version__

if TYPE_CHECKING:  # whoever only looks at a run's folder does without
    import torch

MEETING = "meeting"
ALWAYS = 1000
"""So often the same thing stands in a log before it is left out."""


class RunFolder:
    """The paths in a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.cluster = path / "cluster.json"
        """While the run goes on: where its servers are."""
        self.state = path / "state.json"
        """Written by the master once the last checkpoint is committed."""
        self.model = path / "model.json"
        """Of somebody's own loop: what rank 0's script trains, and with which optimizer."""
        self.logs = path / "logs"
        self.events = path / "events"
        self.checkpoints = path / "checkpoints"
        self.states = path / "states"
        """What workers of this machine keep of their own, each in a folder of its name."""
        self.enough = path / "enough.json"
        """Why the run is to end before its work is done; written by the evaluator."""
        self.falls = path / "falls.json"
        """How often the learning rate is to fall, where it goes by scores; by the evaluator, which
        adds to it."""
        self.journal = path / "journal"
        """With --ack durable: what servers have that no checkpoint has yet, each in a folder of its
        name."""
        self.best = path / "best.safetensors"
        """With --keep-best: what was scored best so far; `best_score` says which version."""
        self.best_score = path / "best.json"
        self.initial = path / "init.safetensors"
        """What the run began from, with --init."""
        self.orders = path / "orders"
        """What somebody who looks on asks of the run; its engine takes them from there."""
        self.tensorboard = path / "tensorboard"
        self.summary = path / "summary.json"

    def write_json(self, path: Path, content: Any) -> None:
        """Readers see the old file or the new one, never half of it."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        temporary.write_text(
            json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        temporary.replace(path)

    def meeting(self, generation: int) -> Path:
        """Where workers that have no servers find each other."""
        return self.path.absolute() / f"{MEETING}-{generation}"

    def meetings(self) -> list[Path]:
        return sorted(self.path.glob(f"{MEETING}-*"))

    def read_json(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunDirError(f"cannot read {path}: {error.strerror}; is that a run?") from error
        except ValueError as error:
            raise RunDirError(f"{path} is no valid JSON: {error}") from error

    def read_config(self) -> tuple[TrainConfig, dict[str, Any]]:
        """The resolved configuration of the run, and what config.json says beside it."""
        described = self.read_json(self.config)
        options = {k: v for k, v in described["config"].items() if v is not None}
        return make_config({**options, "run_dir": str(self.path)}), described

    def write_state(self, outcome: str, last: str | None) -> None:
        """How training ended, and which checkpoint was its last."""
        self.write_json(self.state, {"outcome": outcome, "last_checkpoint": last})

    def early_reason(self) -> str | None:
        """Why the run ended before its work was done; None: it did not, as far as is known here."""
        return str(self.read_json(self.enough)["reason"]) if self.enough.exists() else None

    def read_falls(self) -> list[int]:
        """The versions whose scores each made the learning rate fall once more."""
        return list(self.read_json(self.falls)["scored"]) if self.falls.exists() else []

    def write_best(self, version: int, metric: float) -> None:
        self.write_json(self.best_score, {"version": version, "metric": metric})

    def read_best(self) -> tuple[int, float] | None:
        """Which version was scored best, and what it scored; None: none is kept."""
        if not self.best_score.exists():
            return None
        found = self.read_json(self.best_score)
        return int(found["version"]), float(found["metric"])

    def open_log(self, role: str) -> logging.Logger:
        """A logger of one role, to logs/ROLE.log; `close_log` ends it."""
        logger = logging.Logger(role)
        handler = logging.FileHandler(self.logs / f"{role}.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handler.addFilter(_Seldom())
        logger.addHandler(handler)
        return logger

    def failure(self, role: str, line: str, step: int | None = None) -> RoleError:
        """The error that says who failed, when, why, and where to read on."""
        when = f" at step {step}" if step else ""
        log = self.logs / f"{role}.log"
        return RoleError(f"{in_words(role)} failed{when}: {line}; the traceback is in {log}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Take the folder for one run, until this block has ended and the copies of its descriptor
        in other processes are closed; a RunDirError where another run has it."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunDirError(f"{self.path} is in use: its run has not ended yet") from error
            yield descriptor
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a run is under way in the folder."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False


def role_name(role: str, index: int) -> str:
    """What a role's log and events are called: ps-0, worker-1, master, evaluator."""
    return role if role in ("master", "evaluator") else f"{role}-{index}"


def in_words(role: str) -> str:
    """worker-1 -> worker 1, ps-0 -> server 0, master -> the master."""
    kind, _, number = role.partition("-")
    return f"{'server' if kind == 'ps' else kind} {number}" if number else f"the {kind}"


class _Seldom(logging.Filter):
    """Lets what is said again and again through ALWAYS times, and then the 2,000th time, the
    4,000th, ..., so that a run of any length does not fill a disk with it."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        # texts that are put together beforehand are all different, and counted together
        said = record.msg if record.args and isinstance(record.msg, str) else ""
        with self._lock:
            self._counts[said] += 1
            times = self._counts[said]
        if times <= ALWAYS:
            return True
        rounds, rest = divmod(times, ALWAYS)
        record.msg = f"{record.msg} (said {times:,} times; most are left out)"
        return not rest and rounds.bit_count() == 1


def close_log(logger: logging.Logger) -> None:
    logger.disabled = True  # a thread that was given up may still have something to say
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def create_run_folder(config: TrainConfig) -> RunFolder:
    """Make the folder that `config` names, or a new one under runs/."""
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
    return folder


def describe_run(
    config: TrainConfig, devices: "Iterable[torch.device]" = (), **more: Any
) -> dict[str, Any]:
    """What config.json says: the options, `more`, and where and how it was started; `devices` are
    those of this machine that the run uses."""
    environment = {**_environment(), "gpus": _gpu_names(devices)}
    return {"config": config.to_json(), **more, "environment": environment}


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
    discipline = re.sub(r"[^\w.-]+", "-", config.chosen.label)
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{recipe}-{discipline}"


def _environment() -> dict[str, Any]:
    import torch

    return {
        "offbeat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "git": _git_hash(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """The processor's own name where Linux tells it, else the kind of it."""
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        about = ""
    found = re.search(r"^model name\s*:\s*(.+)$", about, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _gpu_names(devices: "Iterable[torch.device]") -> dict[str, str]:
    import torch

    return {str(d): torch.cuda.get_device_name(d) for d in devices if d.type == "cuda"}


def _git_hash() -> str | None:
    """The commit of the folder that the run was started in, if it is a checkout."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
