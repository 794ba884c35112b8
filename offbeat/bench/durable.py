"""`offbeat bench durable`: what it costs that a push is answered when its server's disk has it.

The same recipe on the same made-up data with --ack applied and --ack durable, in turn; and, on the
same disk in the same round, how long it takes to add one gradient's bytes to a file and to sync it.
The disk is that of the folder for temporary files (TMPDIR says another one).
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.bench.processes import TIMEOUT_S
from offbeat.bench.rig import CALIBRATION_STEPS, Rig, options_for
from offbeat.bench.tables import Row, short
from offbeat.config import APPLIED, DURABLE
from offbeat.engines.forkserver import fork_server

ACKS = (APPLIED, DURABLE)
NUM_SYNCS = 20


def durable(
    *, recipe: str, disciplines: Sequence[str], seconds: float, rounds: int, **options: Any
) -> list[Row]:
    """Gradients per second both ways, in rounds; `options` are train's."""
    options = options_for(recipe, options)
    cases = [(discipline, ack) for discipline in disciplines for ack in ACKS]
    rates: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    syncs: list[float] = []
    with contextlib.ExitStack() as stack:
        forks = stack.enter_context(fork_server("local"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-bench-")))
        rigs = {}
        for ack in ACKS:
            (place := folder / ack).mkdir()
            rig = Rig(place, {**options, "ack": ack}, forks, timeout_s=TIMEOUT_S + 10 * seconds)
            rigs[ack] = stack.enter_context(contextlib.closing(rig))
        num_bytes = 4 * rigs[APPLIED].num_elements // int(options.get("servers", 1))
        steps = {
            ack: {d: rig.steps_for(d, seconds, CALIBRATION_STEPS[recipe]) for d in disciplines}
            for ack, rig in rigs.items()
        }
        for number in range(1, 1 + rounds):
            syncs.append(1e3 * time_sync(folder, num_bytes))
            for discipline, ack in cases:
                found = rates[discipline, ack]
                found.append(rigs[ack].rate(discipline, steps[ack]))
                line = f"round {number} of {rounds}: {discipline}, {ack} {short(found[-1])}/s"
                print(line, file=sys.stderr, flush=True)
    rows: list[Row] = []
    for discipline, ack in cases:
        mine, beside = rates[discipline, ack], rates[discipline, APPLIED]
        row: Row = {"discipline": discipline, "ack": ack, "gradients/s": mine}
        row["of applied"] = [a / b for a, b in zip(mine, beside, strict=True)]
        row["one sync, ms"] = syncs
        rows.append(row)
    return rows


def time_sync(folder: Path, num_bytes: int) -> float:
    """To add so many bytes to a file and bring them to the disk: the median of several."""
    raw, times = bytes(num_bytes), []
    path = folder / "synced"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for _ in range(NUM_SYNCS):
            begun_s = time.perf_counter()
            os.write(descriptor, raw)
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - begun_s)
    finally:
        os.close(descriptor)
        path.unlink()
    return statistics.median(times)
