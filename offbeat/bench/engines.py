"""`offbeat bench engines`: what it costs to have Ray start the roles instead of this command.

The same recipe on the same made-up data, under the engine `local` and on a Ray cluster of this
machine alone, in turn; starting up is not counted.
"""

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.bench.processes import TIMEOUT_S
from offbeat.bench.rig import CALIBRATION_STEPS, Rig, options_for
from offbeat.bench.tables import Row, short
from offbeat.cluster.rays import LOCAL, joined
from offbeat.config import make_config
from offbeat.engines.actors import asks_of
from offbeat.engines.forkserver import fork_server

ENGINES = ("local", "ray")


def engines(
    *, recipe: str, disciplines: Sequence[str], seconds: float, rounds: int, **options: Any
) -> list[Row]:
    """Gradients per second under both engines, in rounds; `options` are train's."""
    options = options_for(recipe, options)
    cases = [(discipline, engine) for discipline in disciplines for engine in ENGINES]
    rates: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        forks = stack.enter_context(fork_server("local"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-bench-")))
        stack.enter_context(joined(LOCAL, asks_of(make_config(options, {"engine": "ray"}))))
        rigs = {}
        for engine in ENGINES:
            (place := folder / engine).mkdir()
            more = {**options, "engine": engine}
            rig = Rig(place, more, forks, timeout_s=TIMEOUT_S + 10 * seconds)
            rigs[engine] = stack.enter_context(contextlib.closing(rig))
        steps = {
            engine: {d: rig.steps_for(d, seconds, CALIBRATION_STEPS[recipe]) for d in disciplines}
            for engine, rig in rigs.items()
        }
        for number in range(1, 1 + rounds):
            for discipline, engine in cases:
                found = rates[discipline, engine]
                found.append(rigs[engine].rate(discipline, steps[engine]))
                line = f"round {number} of {rounds}: {discipline}, {engine} {short(found[-1])}/s"
                print(line, file=sys.stderr, flush=True)
    rows: list[Row] = []
    for discipline, engine in cases:
        mine, beside = rates[discipline, engine], rates[discipline, "local"]
        row: Row = {"discipline": discipline, "engine": engine, "gradients/s": mine}
        row["of local"] = [a / b for a, b in zip(mine, beside, strict=True)]
        rows.append(row)
    return rows
