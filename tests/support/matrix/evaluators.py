"""Row 23: the evaluator dies again and again, and checkpoints are removed while it reads them."""

import itertools
import logging
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos import ORACLE_FILE, Fault, Plan
from checkpoints import make_checkpoint
from planting import Bug

from matrix.protections import protections
from matrix.row import Row, Trial
from matrix.runs import PATIENT, Ended, ended
from offbeat.roles.evaluator import FolderSource
from offbeat.run import checkpoint as checkpoints
from offbeat.run.checkpoint import Checkpoint
from offbeat.run.rundir import RunFolder

SCORED_FILE = ORACLE_FILE.replace(
    "data=lambda config: (torch.zeros(4000, 1), None),",
    "data=lambda config: (torch.zeros(4000, 1), torch.zeros(3, 1)),\n    metric=largest,",
).replace(
    "recipe = ",
    """def largest(model, batch):
    return -model.count.min().item() * len(batch), len(batch)
recipe = """,
)
"""Its score is the number of gradients that are in, and its loss is minus nine times that."""
NUM_PARAMS = 9


def disturb_evaluator(seed: int) -> Trial:
    return remove_as_it_reads(seed) if seed % 2 else kill_evaluator(seed)


# -- it dies ---------------------------------------------------------------------------------------


def kill_evaluator(seed: int) -> Trial:
    draw = random.Random(f"row 23, {seed}")
    discipline = draw.choice(["apply-reply", "sync", "bounded:1", "reply-apply"])
    faults = []
    for share in sorted(draw.uniform(0.05, 0.95) for _ in range(draw.randint(3, 6))):
        halts = draw.random() < 0.3
        number = signal.SIGSTOP if halts else signal.SIGKILL
        pause_s = draw.uniform(0.1, 0.5) if halts else 0.0
        faults.append(Fault(share, "evaluator", number, pause_s, draw.uniform(0.0, 0.2)))
    plan = Plan(seed, discipline, draw.choice([1, 2]), 2, 300, 10, faults)
    more = PATIENT | {"eval_every": 20, "keep": draw.choice([1, 2])}
    with ended(plan, source=SCORED_FILE, more=more) as run:
        if not run.complaints:
            run.complaints += _about_scores(run)
            run.complaints += _about_training(run)
        return run.trial()


def _about_scores(run: Ended) -> Iterator[str]:
    """Each is of one version, whole; and the last one is scored."""
    newest = checkpoints.newest_checkpoint(run.run_dir / "checkpoints")
    scores = run.events("score")
    for score in scores:
        count, loss = score["metric"], score["scores"]["loss"]
        if loss != -NUM_PARAMS * count:
            yield f"what was scored as version {score['version']} mixes: {score}"
    if not scores or scores[-1]["version"] != newest.version:
        yield f"the last checkpoint, {newest.version}, was not scored"


def _about_training(run: Ended) -> Iterator[str]:
    others = [event for event in run.phases("restart") if event["role"] != "evaluator"]
    if others:
        yield f"somebody else was started again: {others}"
    times = [push["applied_s"] for push in run.events("push") if push["applied_s"]]
    for struck in run.struck:
        if struck.at_s < max(times) - 1.0 and not any(0 < t - struck.at_s < 1.0 for t in times):
            yield "nothing went in for a second while the evaluator was away"


# -- what it reads is removed ----------------------------------------------------------------------


def _stamped(version: int, stamp: float) -> Checkpoint:
    made = make_checkpoint(version, num_shards=2)
    for shard in made.shards:
        for name in ("params", "ema", "floats"):
            if name in shard.tensors:
                shard.tensors[name].fill_(stamp)
    for tensor in made.frozen.values():
        tensor.fill_(stamp)
    return made


def remove_as_it_reads(seed: int) -> Trial:
    """Before each of its reads, in each of some ways."""
    counted, violations = 0, []
    for way in (_removed, _replaced, _newer):
        for number in itertools.count(1):
            with tempfile.TemporaryDirectory(prefix="row-") as folder:
                found = _look(Path(folder), way, number)
            if found is None:
                break
            counted += 1
            violations += [f"{way.__name__} before read {number}: {what}" for what in found]
    return Trial(tuple(violations), counted=counted)


def _removed(folder: Path) -> None:
    shutil.rmtree(folder / "00000010")


def _replaced(folder: Path) -> None:
    """By one of the same name, as when a server was set back; a version can come twice."""
    _removed(folder)
    checkpoints.save_checkpoint(folder, _stamped(10, 3.0))


def _newer(folder: Path) -> None:
    checkpoints.save_checkpoint(folder, _stamped(20, 2.0))
    _removed(folder)


def _look(path: Path, way: Callable[[Path], None], number: int) -> list[str] | None:
    """What an evaluator finds that is disturbed before its read of this number; None: it has read
    everything by then."""
    folder = RunFolder(path)
    checkpoints.save_checkpoint(folder.checkpoints, _stamped(10, 1.0))
    log = logging.Logger("row")
    log.addHandler(logging.NullHandler())
    source = FolderSource(folder, 10, log=log)
    reads, read, violations = itertools.count(1), checkpoints._read, []

    def disturbed(file: Path) -> bytes:
        if next(reads) == number:
            way(folder.checkpoints)
        return read(file)

    with Bug("", [(checkpoints, "_read", disturbed)]).planted():
        found = source.look().found
    if next(reads) <= number:
        return None
    later = source.look().found
    for each in (found, later):
        stamps = (
            set() if each is None else {float(v) for t in each.state.values() for v in t.view(-1)}
        )
        if len(stamps - {0.0}) > 1:
            violations.append(f"version {each.version if each else 0} mixes {sorted(stamps)}")
    if way is _newer and (later or found) is None:
        violations.append("nothing is found afterwards")
    return violations


ROWS = (
    Row(
        23,
        "evaluator crash; checkpoint removed while it reads",
        "training never blocked; never a mix of two versions",
        200,
        1,
        disturb_evaluator,
        protections("digests"),
    ),
)
