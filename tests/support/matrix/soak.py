"""Row 25: all of it, at random, for hours: deaths and halts of everybody, both kinds of promises,
wall clocks that jump, disks that fail; and nothing grows in the process that starts it all.
"""

import dataclasses
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from chaos import Fault, Plan, draw_plan
from processes import RECIPE_FILE

from matrix import failing
from matrix.clocks import HOUR_S
from matrix.evaluators import SCORED_FILE
from matrix.row import Row, Trial
from matrix.runs import Ended, ended

LEAST_ACCURACY = 0.85
"""A quiet run of this recipe reaches 0.9 and more."""
MOST_MORE_MB = 150
NUM_WARM_UP = 3
"""After so many runs of a process its memory and its open files are to stay as they are."""


def soak(seed: int) -> Trial:
    draw = random.Random(f"row 25, {seed}")
    plan = _with_more(draw, draw_plan(seed))
    learns = seed % 4 == 3
    more = {"eval_every": draw.choice([0, 50]), "keep": draw.choice([1, 3])}
    if learns:
        plan = dataclasses.replace(plan, steps=4000)
    else:
        more |= {"eval_every": more["eval_every"] and 50}
    source = "\n".join([*_disturbances(draw, plan), RECIPE_FILE if learns else SCORED_FILE])
    with ended(plan, source=source, more=more, is_oracle=not learns) as run:
        if not run.complaints and learns:
            run.complaints += _about_learning(run)
        run.complaints += _about_growth()
        return run.trial(counted=1)


def _with_more(draw: random.Random, plan: Plan) -> Plan:
    """Faults at any time, some more of them, and promises where there may be some."""
    faults = [dataclasses.replace(f, delay_s=draw.uniform(0.0, 0.25)) for f in plan.faults]
    if draw.random() < 0.3:
        faults.insert(0, Fault(draw.uniform(0.05, 0.5), "evaluator", signal.SIGKILL))
        faults.sort(key=lambda fault: fault.after)
    durable = plan.discipline != "lock-free" and draw.random() < 0.5
    return dataclasses.replace(plan, faults=faults, ack="durable" if durable else "applied")


def _disturbances(draw: random.Random, plan: Plan) -> Iterator[str]:
    """What roles do to themselves as they import their recipe."""
    if draw.random() < 0.3:
        by_s, after_s = draw.choice([-HOUR_S, HOUR_S]), draw.uniform(0.1, 1.0)
        yield f"from matrix.clocks import jump\njump({by_s}, {after_s}, ('ps', 'worker', 'master'))"
    if draw.random() < 0.3:
        way, first = draw.choice(failing.WAYS), draw.randint(1, plan.steps // 2)
        yield f"from matrix.failing import fail\nfail({way!r}, {first}, {first + plan.steps // 4})"


def _about_learning(run: Ended) -> Iterator[str]:
    accuracy = run.summary()["test_accuracy"]
    if accuracy is None or accuracy < LEAST_ACCURACY:
        yield f"it has come to an accuracy of {accuracy}"


# -- nothing grows ---------------------------------------------------------------------------------

_seen: list[tuple[int, int]] = []
"""Of this process after each of its runs: megabytes, and open files."""


def _about_growth() -> Iterator[str]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory_mb = pages * resource.getpagesize() >> 20
    _seen.append((memory_mb, len(list(Path("/proc/self/fd").iterdir()))))
    if len(_seen) <= NUM_WARM_UP:
        return
    first_mb, num_first = _seen[NUM_WARM_UP - 1]
    if memory_mb > first_mb + MOST_MORE_MB:
        yield f"this process has {memory_mb} MB after {len(_seen)} runs, and had {first_mb}"
    if _seen[-1][1] > num_first + 2:
        yield f"this process has {_seen[-1][1]} files open, and had {num_first}"


ROWS = (
    Row(
        25,
        "soak: all of it, random seeds",
        "the books hold; accuracy within noise of a quiet run; memory and descriptors flat",
        2000,
        1,
        soak,
    ),
)
