"""Rows 4 to 6: who writes a checkpoint is killed, a checkpoint is damaged, and its disk fails."""

import contextlib
import functools
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tracing
from chaos import ORACLE_FILE, ChaosRun, Plan
from checkpoints import make_checkpoint
from planting import Bug

from matrix import failing
from matrix.protections import BUGS, protections
from matrix.row import Protection, Row, Trial
from matrix.runs import ended
from offbeat.errors import CheckpointError
from offbeat.run import checkpoint as checkpoints
from offbeat.run.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
)

OLD, NEW, LATER = 10, 20, 30


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="row-") as folder:
        yield Path(folder)


def _of(*bugs: Bug) -> dict[str, Protection]:
    return {bug.name: bug.planted for bug in bugs}


# -- row 4 -----------------------------------------------------------------------------------------


def kill_at_each_call(seed: int) -> Trial:
    """One shape of checkpoints, with or without some before, killed at every single call."""
    draw = random.Random(f"row 4, {seed}")
    shape = {"num_shards": draw.choice([1, 2, 3]), "ema": draw.choice([False, True])}
    keep, num_older = draw.choice([1, 2]), draw.choice([0, 1, 2])
    new = make_checkpoint(NEW, **shape)
    violations: list[str] = []
    with _folder() as folder:
        for version in range(OLD - num_older, OLD + 1):
            checkpoints.save_checkpoint(folder / "before", make_checkpoint(version, **shape))
        for number in itertools.count(1):
            left = folder / str(number)
            shutil.copytree(folder / "before", left)
            was_killed = tracing.killed_at(number, functools.partial(_commit, left, new, keep))
            found = list(_about_killed(left, was_killed, keep))
            violations += [f"killed at call {number} ({shape}, {keep}): {what}" for what in found]
            shutil.rmtree(left)
            if not was_killed:
                return Trial(tuple(violations), counted=number - 1)
    raise AssertionError


def _commit(folder: Path, new: Checkpoint, keep: int) -> None:
    """As the master does."""
    checkpoints.save_checkpoint(folder, new)
    prune_checkpoints(folder, keep)


def _about_killed(folder: Path, was_killed: bool, keep: int) -> Iterator[str]:
    try:
        found = newest_checkpoint(folder).version
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    if found not in ((OLD, NEW) if was_killed else (NEW,)):
        yield f"version {found} is the newest"
    for path in list_checkpoints(folder):
        try:
            load_checkpoint(path)
        except Exception as error:
            if int(path.name) >= found:  # older ones may be about to be removed
                yield f"what has its name is not whole: {error}"
    _commit(folder, make_checkpoint(LATER), keep)
    if len(list(folder.iterdir())) != min(keep, len(list_checkpoints(folder))):
        yield f"what was killed is in the way: {sorted(path.name for path in folder.iterdir())}"


def _clear_all(folder: Path) -> None:
    for path in folder.glob("*"):
        shutil.rmtree(path)


_save = checkpoints.save_checkpoint


def _save_in_place(folder: Path, checkpoint: Checkpoint) -> Path:
    """Every file at once where it belongs."""
    final = folder / f"{checkpoint.version:08d}"
    with tempfile.TemporaryDirectory() as other:
        made = _save(Path(other), checkpoint)
        final.mkdir(parents=True)
        for path in sorted(made.iterdir()):
            (final / path.name).write_bytes(path.read_bytes())
    return final


# -- row 5 -----------------------------------------------------------------------------------------

KINDS = ("flip", "truncate", "zero")
NUM_PARTS = 60
"""So many trials go through every byte of every file, in three ways."""


def damage(seed: int) -> Trial:
    counted, violations = 0, []
    with _folder() as folder:
        checkpoints.save_checkpoint(folder, make_checkpoint(OLD))
        newest = checkpoints.save_checkpoint(folder, make_checkpoint(NEW))
        for file, place, kind in _places(newest)[seed % NUM_PARTS :: NUM_PARTS]:
            whole = file.read_bytes()
            file.write_bytes(spoilt := _spoil(whole, place, kind))
            what = f"{kind} at byte {place} of {file.name}"
            violations += [f"{what}: {c}" for c in _about_damaged(newest, file, spoilt != whole)]
            file.write_bytes(whole)
            counted += 1
    return Trial(tuple(violations), counted=counted)


def _places(path: Path) -> list[tuple[Path, int, str]]:
    files = sorted(path.iterdir())
    sizes = {file: file.stat().st_size for file in files}
    return [(f, place, kind) for f in files for place in range(sizes[f]) for kind in KINDS]


def _spoil(whole: bytes, place: int, kind: str) -> bytes:
    if kind == "truncate":
        return whole[:place]
    if kind == "zero":  # as a file system that had made room for what did not come
        return whole[:place] + bytes(len(whole) - place)
    return whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]


def _about_damaged(path: Path, file: Path, is_damaged: bool) -> Iterator[str]:
    try:
        load_checkpoint(path)
        if is_damaged:
            yield "nobody noticed"
    except CheckpointError as error:
        named = {"manifest.sha256": "manifest.json"}.get(file.name, file.name)
        if not is_damaged or not (named in str(error) or file.name in str(error)):
            yield f"told as: {error}"
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
    try:
        found = newest_checkpoint(path.parent).version
    except CheckpointError as error:
        yield f"nothing else is used: {error}"
        return
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    if found != (OLD if is_damaged else NEW):
        yield f"version {found} is used"


def _num_places() -> int:
    with _folder() as folder:
        return len(_places(checkpoints.save_checkpoint(folder, make_checkpoint(NEW))))


def _only_the_newest(folder: Path) -> list[Path]:
    return list_checkpoints(folder)[-1:]


# -- row 6 -----------------------------------------------------------------------------------------


def fail_disk(seed: int) -> Trial:
    """What is saved in the midst of a run fails, in one of several ways."""
    draw = random.Random(f"row 6, {seed}")
    how, steps = draw.choice(failing.WAYS), 400
    discipline, updates = draw.choice(
        [("sync", steps), ("apply-reply", 2 * steps), ("buffer:7", 2 * steps // 7)]
    )
    lo, hi = (int(updates * draw.uniform(*where)) for where in ((0.05, 0.2), (0.5, 0.7)))
    ack = draw.choice(["applied", "durable"])
    plan = Plan(seed, discipline, draw.choice([1, 2]), 2, steps, max(1, updates // 80), ack=ack)
    source = f"from matrix.failing import fail\nfail({how!r}, {lo}, {hi})\n{ORACLE_FILE}"
    with ended(plan, source=source, meanwhile=_look_at_checkpoints) as run:
        if not run.complaints:
            log = (run.run_dir / "logs" / "master.log").read_text()
            if failing.WORDS[how] not in log:
                run.complaints.append(f"nothing failed, or nobody wrote it down: {how}")
            if not any("training goes on" in line for line in run.notes):
                run.complaints.append("nobody was told")
            if not any("kept again" in line for line in run.notes):
                run.complaints.append("it was not tried again")
        run.complaints = [f"{how}, versions {lo} to {hi}: {c}" for c in run.complaints]
        return run.trial(counted=1)


def _look_at_checkpoints(run: ChaosRun) -> Sequence[str]:
    """From the first one on there is always one that loads."""
    folder, has_begun, found = run.run_dir / "checkpoints", False, []
    while not run.has_ended(0.03):
        has_begun = has_begun or bool(list_checkpoints(folder))
        if has_begun and (what := _cannot_load(folder)):
            found.append(what)
    return found[:1]


def _cannot_load(folder: Path, within_s: float = 5.0) -> str:
    """What is looked at may be removed meanwhile: so some times."""
    deadline_s = time.monotonic() + within_s
    for attempt in itertools.count():
        try:
            newest_checkpoint(folder)
            return ""
        except CheckpointError as error:
            if attempt >= 20 or time.monotonic() > deadline_s:
                return f"no checkpoint can be loaded: {error}"
    raise AssertionError


_no_digests = BUGS["digests"].patches

ROWS = (
    Row(
        4,
        "SIGKILL at each system call of a checkpoint save",
        "the old or the new one loads, never neither",
        3000,
        1,
        kill_at_each_call,
        _of(
            Bug("old ones are there until the new one is", [(checkpoints, "_clear", _clear_all)]),
            Bug(
                "complete or absent, and digests",
                [(checkpoints, "save_checkpoint", _save_in_place), *_no_digests],
            ),
        ),
        why_not=tracing.why_not,
    ),
    Row(
        5,
        "bit flip, truncation, zero-fill in a checkpoint",
        "detected, the bad file named, the previous one used",
        _num_places(),
        1,
        damage,
        _of(
            BUGS["digests"],
            Bug("the previous one", [(checkpoints, "list_checkpoints", _only_the_newest)]),
        ),
    ),
    Row(
        6,
        "disk full, EIO, failing fsync while saving",
        "training goes on; a warning; the old checkpoint intact; tried again",
        50,
        1,
        fail_disk,
        protections("a failed save ends nothing", "a failed fsync is no save"),
    ),
)
