"""Row 9: a link goes down and nobody is told, for 5 s and for ever. Hosts are namespaces."""

import functools
import itertools
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from chaos import ORACLE_FILE
from hosts import Net, NoHostsError, made

from matrix.protections import prelude, protections
from matrix.row import Row, Trial
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import read_events

SHORT_S = 5.0
WORKER_TIMEOUT_S = 3.0
PATIENCE_S = 120.0
STEPS = 1500


def cut_link(seed: int) -> Trial:
    """Even seeds: for a while that is shorter than connections live; odd ones: for ever."""
    draw = random.Random(f"row 9, {seed}")
    for_ever, discipline = bool(seed % 2), draw.choice(["sync", "apply-reply", "lock-free"])
    flags = ["--discipline", discipline, "--steps", str(STEPS), "--eval-every", "0"]
    flags += ["--worker-timeout", str(WORKER_TIMEOUT_S)] if for_ever else []
    flags += ["--rule", "sum"] if discipline == "sync" else []
    source = prelude() + ORACLE_FILE
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-faults-") as folder,
        made(Net(Path(folder), servers=1, workers=2, evaluates=False, source=source)) as net,
    ):
        net.start(*flags)
        net.wait_for_pushes(draw.randint(20, 300))
        before = _latest_s(net)
        net.hosts["worker-1"].set_link(False)
        if not for_ever:
            threading.Event().wait(SHORT_S)
            net.hosts["worker-1"].set_link(True)
        violations = list(_about_end(net, for_ever))
        violations += [] if violations else _about_books(net, discipline, for_ever)
        waited_s = _longest_wait_s(net, before)
    what = f"{discipline}, {'for ever' if for_ever else '5 s'}"
    found = tuple(f"{what}: {each}" for each in violations)
    return Trial(found, recovery_s=waited_s if for_ever else None)


def _latest_s(net: Net) -> float:
    return max(_applied_s(net), default=0.0)


def _applied_s(net: Net) -> list[float]:
    events = read_events(net.run_dir / "events")
    return sorted(e["applied_s"] for e in events if e["kind"] == "push" and e["applied_s"])


def _longest_wait_s(net: Net, from_s: float) -> float | None:
    """For how long nothing went in afterwards."""
    times = [at_s for at_s in _applied_s(net) if at_s >= from_s]
    return max((b - a for a, b in itertools.pairwise(times)), default=None)


def _about_end(net: Net, for_ever: bool) -> Iterator[str]:
    deadline_s = time.monotonic() + PATIENCE_S
    for name, host in net.hosts.items():
        if for_ever and name == "worker-1":
            continue
        (process,) = host.processes
        try:
            code = process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            yield f"{name} does not end: {host.text()[-300:]!r}"
            return
        if code:
            yield f"{name} ended with {code}: {host.text()[-300:]!r}"


def _about_books(net: Net, discipline: str, for_ever: bool) -> Iterator[str]:
    in_all = net.check_applied_once()
    there = (0, 1) if for_ever else (0, 1, 2)
    if any(in_all.get(rank) != STEPS for rank in there):
        yield f"of {STEPS} gradients each {in_all} are in"
    if for_ever and "worker 2 is gone" not in net.hosts["master"].text():
        yield "nobody was told that the worker is gone"
    (shard,) = newest_checkpoint(net.run_dir / "checkpoints").shards
    counts = {-int(value) for value in shard.tensors["params"]}
    if discipline != "lock-free" and counts != {sum(in_all.values())}:
        yield f"{counts} are in, {in_all} in the books"


@functools.cache
def why_not() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with made(Net(Path(folder), servers=1, workers=0, evaluates=False)):
                return None
        except NoHostsError as error:
            return str(error)


ROWS = (
    Row(
        9,
        "silent partition, 5 s and for ever",
        "short: goes on; long: declared gone within the timeout; sync rounds close without it",
        20,
        2,
        cut_link,
        protections("who is gone is not waited for"),
        why_not=why_not,
    ),
)
