"""`offbeat bench long`: one run of very many tiny updates, and whether anything grows with them.

Two workers, a model of six parameters, the engine `local`: what a push costs beside its arithmetic.
Rates are those of the first tenth of all updates and of the last one; as other people's work on the
machine shows in them, the processors' time for each update stands beside them. Memory is each
process's resident set when a tenth was done, and when all but the last moment was.
"""

import math
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional as F

from offbeat.bench.processes import last_line
from offbeat.bench.tables import Row
from offbeat.config import TrainConfig
from offbeat.errors import RunError
from offbeat.optim import SGD
from offbeat.recipes.base import Recipe
from offbeat.run.events import Followed
from offbeat.run.rundir import RunFolder

WORKERS = 2
LOOK_EVERY_S = 0.5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FLAGS = ("--recipe", f"{__name__}:recipe", "--workers", str(WORKERS), "--servers", "1")
MORE_FLAGS = ("--threads", "1", "--device", "cpu", "--engine", "local", "--quiet")
NUM_CHECKPOINTS = 20
Pair = tuple[torch.Tensor, torch.Tensor]


def load_data(config: TrainConfig) -> tuple[Pair, Pair]:
    """Inside a circle, or outside of it."""
    x = torch.randn(512, 2, generator=torch.Generator().manual_seed(config.seed))
    y = (x.norm(dim=1) > 1.2).long()
    return (x[:256], y[:256]), (x[256:], y[256:])


recipe = Recipe(
    model=lambda: torch.nn.Linear(2, 2),
    data=load_data,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=SGD(lr=0.05),
    batch_size=32,
)


@dataclass
class Look:
    """What there was to see at a moment."""

    num_updates: int
    memory_mb: dict[str, float]
    """Of each process."""
    cpu_s: float
    """That those which are there now have used."""


@dataclass
class Course:
    """A run, as it was seen while it went on."""

    updates: int
    """That there are to be."""
    num_updates: int = 0
    reached_s: dict[int, float] = field(default_factory=dict)
    """When the run had so many tenths of them; 0: the first one."""
    looks: list[Look] = field(default_factory=list)

    def updated(self, at_s: float) -> None:
        self.num_updates += 1
        tenths, rest = divmod(self.num_updates, self.updates // 10)
        if self.num_updates == 1 or rest == 0:
            self.reached_s[tenths] = at_s

    def rate(self, tenth: int) -> float:
        return self.updates / 10 / (self.reached_s[tenth] - self.reached_s[tenth - 1])

    def at(self, share: float) -> Look:
        """The first look when so many of the updates were made."""
        return next(look for look in self.looks if look.num_updates >= share * self.updates)

    def cpu_us(self, first: Look, last: Look) -> float:
        """Of a processor's time, for each update between two looks; NaN where so short a run was
        not looked at in between."""
        num_updates = last.num_updates - first.num_updates
        return 1e6 * (last.cpu_s - first.cpu_s) / num_updates if num_updates else math.nan


def long(*, updates: int, rounds: int) -> list[Row]:
    updates -= updates % (10 * WORKERS)
    if not updates:
        raise RunError(f"give --updates {10 * WORKERS} at least, so that there are tenths of them")
    row: Row = {"updates": f"{updates:,}"}
    for number in range(1, 1 + rounds):
        with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
            figures = _figures(RunFolder(Path(name) / "run"), updates)
        print(f"round {number} of {rounds}: {figures}", file=sys.stderr, flush=True)
        for column, value in figures.items():
            found = row.setdefault(column, [])
            assert isinstance(found, list)
            found.append(value)
    return [row]


def _figures(folder: RunFolder, updates: int) -> dict[str, float]:
    course = _run(folder, updates)
    found = {"first tenth, /s": course.rate(1), "last tenth, /s": course.rate(10)}
    found["last of first"] = course.rate(10) / course.rate(1)
    looks = course.looks
    found["us of CPU, second tenth"] = course.cpu_us(course.at(0.1), course.at(0.2))
    found["us of CPU, last"] = course.cpu_us(course.at(0.9), looks[-1])
    tenth = course.at(0.1)
    for who, memory_mb in looks[-1].memory_mb.items():
        found[f"{who}, MB at 10%"] = tenth.memory_mb.get(who, math.nan)
        found[f"{who}, MB at the end"] = memory_mb
    found["events, bytes/update"] = _size(folder.events) / updates
    found["logs, bytes"] = float(_size(folder.logs))
    return found


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _run(folder: RunFolder, updates: int) -> Course:
    every = str(max(1, updates // NUM_CHECKPOINTS))
    often = ("--eval-every", every, "--checkpoint-every", every)
    flags = ("--steps", str(updates // WORKERS), "--run-dir", str(folder.path), *often)
    log = folder.path.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "train", *FLAGS, *MORE_FLAGS, *flags],
            stdout=output,
            stderr=output,
        )
    course, pause = Course(updates), threading.Event()
    try:
        followed = Followed(folder.events, "ps-*.jsonl")
        while process.poll() is None:
            _look(process.pid, followed, course)
            pause.wait(LOOK_EVERY_S)
        _count(followed, course)
    finally:
        process.terminate()
        process.wait()
    if process.returncode or course.num_updates != updates:
        what = f"{course.num_updates:,} of {updates:,} updates"
        raise RunError(f"a run ended with {what}: {last_line(log)}")
    return course


def _look(pid: int, followed: Followed, course: Course) -> None:
    _count(followed, course)
    if not 0 < course.num_updates < course.updates:
        return
    found = {who: _usage(of) for who, of in _family(pid).items()}
    memory_mb = {who: mb for who, (mb, _) in found.items()}
    course.looks.append(Look(course.num_updates, memory_mb, sum(s for _, s in found.values())))


def _count(followed: Followed, course: Course) -> None:
    for event in followed.read():
        if event["kind"] == "push" and event["outcome"] == "applied":
            course.updated(event["applied_s"])


def _family(pid: int) -> dict[str, int]:
    """The command's process, and those of its roles, by what they are."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    found = {"command": pid}
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for child in family - {pid}:
        if name := _role(child):
            found[name] = child
    return dict(sorted(found.items()))


def _role(pid: int) -> str:
    """`ps 0`; nothing, if it is no role."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    match words:
        case [_, "-m", "offbeat", "role", role, "--index", index, *_]:
            return f"{role} {index}"
    return ""


def _usage(pid: int) -> tuple[float, float]:
    """MB in memory, and seconds of a processor; nothing of one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    kb = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(kb[0]) / 1000 if kb else 0.0, (int(words[11]) + int(words[12])) / TICKS_PER_S
