"""`offbeat bench start`: how long it takes from the command until everybody is at work, and from a
worker's death until there is another one.

Roles that the fork server forks, beside roles that are started anew, each with torch to import.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from offbeat.bench.processes import TIMEOUT_S, last_line
from offbeat.bench.tables import Row
from offbeat.errors import RunError
from offbeat.run.events import read_events
from offbeat.run.rundir import RunFolder

FORKED, ANEW = "forked", "anew"
FLAGS = ("--steps", "3", "--threads", "1", "--device", "cpu", "--eval-every", "0", "--quiet")
PROGRAM = f"""
import sys
from offbeat.engines import forkserver
forkserver.CAN_FORK &= sys.argv.pop(1) == {FORKED!r}
from offbeat.cli import main
sys.exit(main())
"""
"""The command, told first whether roles are to be forked."""
POLL_S = 0.01


def start(*, workers: Sequence[int], rounds: int) -> list[Row]:
    """Time the start of short runs with so many workers, in rounds that go through all of them."""
    cases = [(count, way) for count in workers for way in (FORKED, ANEW)]
    found: dict[tuple[int, str], list[tuple[float, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        for number in range(1, 1 + rounds):
            for count, way in cases:
                run_dir = Path(folder) / f"{number}-{count}-{way}"
                found[count, way].append(_time_run(run_dir, count, way))
                line = f"round {number} of {rounds}: {count} workers, {way}: %.1f s, %.1f s"
                print(line % found[count, way][-1], file=sys.stderr, flush=True)
    rows: list[Row] = []
    for count, way in cases:
        row: Row = {"workers": str(count), "roles": way}
        row["all at work, s"] = [work_s for work_s, _ in found[count, way]]
        both = zip(found[count, way], found[count, ANEW], strict=True)
        row["of anew"] = [own[0] / other[0] for own, other in both]
        row["back again, s"] = [back_s for _, back_s in found[count, way]]
        rows.append(row)
    return rows


def _time_run(run_dir: Path, workers: int, way: str) -> tuple[float, float]:
    """Seconds from the command until a gradient of every worker had arrived; and from when a dead
    worker was missed until one of its successor's had."""
    killed = workers - 1
    flags = ("--workers", str(workers), "--kill-worker", f"{killed}@2", "--run-dir", str(run_dir))
    log = run_dir.with_suffix(".log")
    asked_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, way, "train", *FLAGS, *flags],
            stdout=output,
            stderr=output,
        )
    try:
        began_s = _wait(process, RunFolder(run_dir))
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    if process.returncode:
        raise RunError(f"a run with {workers} workers failed: {last_line(log)}")
    events = list(read_events(RunFolder(run_dir).events))
    pushes = [event for event in events if event["kind"] == "push"]
    (missed_s,) = [event["at_s"] for event in events if event.get("phase") == "restart"]
    first_s = [
        min(push["received_s"] for push in pushes if push["worker"] == rank)
        for rank in range(workers)
    ]
    back_s = min(push["received_s"] for push in pushes if push["incarnation"])
    return began_s + max(first_s) - asked_s, back_s - missed_s


def _wait(process: "subprocess.Popen[bytes]", folder: RunFolder) -> float:
    """Until the run is over. Returns when its clock began, which stands in its folder so long."""
    deadline_s = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    began_s = 0.0
    while process.poll() is None and time.monotonic() < deadline_s:
        if not began_s and folder.cluster.exists():
            began_s = json.loads(folder.cluster.read_text(encoding="utf-8"))["began_s"]
        pause.wait(POLL_S)
    return began_s
