"""Rows 1 to 3: workers and servers are killed again and again while a run goes on."""

import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chaos import Fault, Plan, Struck

from matrix.protections import protections
from matrix.row import Row, Trial
from matrix.runs import PATIENT, Ended, back_after_s, ended
from offbeat.accounts import APPLIED
from offbeat.run.checkpoint import newest_checkpoint

DISCIPLINES = ("sync", "apply-reply", "reply-apply", "bounded:1")
DISCIPLINES += ("ringmaster:2", "rennala:3", "buffer:7")
LATEST_S = 0.25
"""Somebody dies at any time up to this after a step is seen to be done: they are seen in bursts."""
LONG_S = 2.0
"""Who has not come back after this is not the only one that others could have waited for."""


def kills(draw: random.Random, roles: Sequence[str], count: int) -> list[Fault]:
    """Of one of these at a time, or of several at once."""
    found = []
    for share in sorted(draw.uniform(0.02, 0.98) for _ in range(count)):
        for role in draw.sample(roles, draw.choice([1, 1, 1, len(roles)])):
            delay_s = draw.uniform(0.0, LATEST_S)
            found.append(Fault(share, role, signal.SIGKILL, delay_s=delay_s))
    return found


# -- row 1 -----------------------------------------------------------------------------------------


def kill_workers(seed: int) -> Trial:
    draw = random.Random(f"row 1, {seed}")
    servers, workers = draw.choice([1, 2, 2, 3]), draw.choice([2, 3, 4])
    roles = ["master", *(f"worker --index {rank}" for rank in range(1, workers))]
    discipline = draw.choice([*DISCIPLINES, "lock-free"])
    every = draw.choice([20, 60, 100_000])
    faults = kills(draw, roles, draw.randint(3, 6))
    plan = Plan(seed, discipline, servers, workers, draw.randrange(100, 250), every, faults)
    with ended(plan, more=PATIENT) as run:
        pushes = run.events("push") if not run.complaints else []
        if not run.complaints:
            run.complaints += _about_incarnations(run, pushes)
            run.complaints += _about_others(run, pushes)
            if servers == 1 and run.summary()["lost_updates"]:
                run.complaints.append("something is lost, and no server was")
        return run.trial(back_in_s(run, pushes))


def back_in_s(run: Ended, pushes: Sequence[Mapping[str, Any]]) -> list[float]:
    found = (back_after_s(struck, pushes) for struck in run.struck)
    return [after_s for after_s in found if after_s is not None]


def _about_incarnations(run: Ended, pushes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Whoever is started again is another one."""
    restarts = run.phases("restart")
    for worker in range(run.plan.workers):
        role = "worker" if worker else "master"
        times = [e["at_s"] for e in restarts if (e["role"], e["index"]) == (role, worker)]
        for push in pushes:
            if push["worker"] == worker and push["incarnation"] > len(times):
                yield f"worker {worker} is {push['incarnation']} after {len(times)} restarts"
        last_s = max(times, default=0.0)
        newest = [p for p in pushes if p["worker"] == worker and p["received_s"] > last_s]
        if any(push["incarnation"] != len(times) for push in newest):
            yield f"worker {worker} came back under a former incarnation"


def _about_others(run: Ended, pushes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """They go on while one is away."""
    for struck in run.struck:
        after_s = back_after_s(struck, pushes)
        if after_s is None or after_s < LONG_S or _died_together(run, struck):
            continue
        index = int(struck.fault.role.partition(" --index ")[2] or 0)
        times = [p["applied_s"] for p in pushes if p["worker"] != index and p["applied_s"]]
        had_work = any(at_s > struck.at_s for at_s in times)
        if had_work and not any(0 < at_s - struck.at_s < after_s for at_s in times):
            yield f"nobody went on for {after_s:.1f} s while worker {index} was away"


def _died_together(run: Ended, struck: Struck) -> bool:
    times = [each.at_s for each in run.struck if each is not struck]
    return any(abs(at_s - struck.at_s) < LONG_S for at_s in times)


# -- rows 2 and 3 ----------------------------------------------------------------------------------


def _kill_servers(draw: random.Random, seed: int, disciplines: Sequence[str], ack: str) -> Plan:
    servers = draw.choice([1, 1, 2])
    roles = [f"ps --index {index}" for index in range(servers)]
    faults = kills(draw, roles, draw.randint(2, 4))
    about = (draw.choice(disciplines), servers, draw.choice([2, 3]), draw.randrange(60, 200))
    return Plan(seed, *about, draw.choice([20, 60, 100_000]), faults, ack)


def kill_servers_that_promise(seed: int) -> Trial:
    draw = random.Random(f"row 2, {seed}")
    plan = _kill_servers(draw, seed, DISCIPLINES, "durable")
    with ended(plan, more=PATIENT) as run:
        recoveries_s = _after_servers(run)
        if not run.complaints:
            run.complaints += _about_promises(run)
        return run.trial(recoveries_s)


def _about_promises(run: Ended) -> Iterator[str]:
    """What a worker wrote down as answered is in, at every server."""
    drops = run.plan.discipline.startswith("rennala")  # some of which it has answered
    answered: dict[int, set[int]] = {}
    for event in run.events("step"):
        if event["outcome"] == APPLIED:
            answered.setdefault(event["worker"], set()).add(event["step"])
    for index, shard in enumerate(newest_checkpoint(run.run_dir / "checkpoints").shards):
        for worker, steps in answered.items():
            account = shard.accounts[worker]
            if account.applied + drops * account.dropped < len(steps):
                yield (
                    f"shard {index}: {len(steps)} gradients of worker {worker} were answered as "
                    f"applied, {account.applied} are in"
                )


def _after_servers(run: Ended) -> list[float]:
    """Workers find them by themselves. Returns how long each death took."""
    if run.complaints:
        return []
    others = [event for event in run.phases("restart") if event["role"] != "ps"]
    if others:
        run.complaints.append(f"somebody else was started again: {others}")
    num_back = sum(event["epoch"] > 0 for event in run.phases("load"))
    is_there = num_back == len(run.phases("restart"))  # or the run was over, and nobody to tidy up
    if is_there and list(run.run_dir.glob("journal/*/*")):
        run.complaints.append("the journal has something that the last checkpoint should have")
    return back_in_s(run, run.events("push"))


def kill_servers(seed: int) -> Trial:
    draw = random.Random(f"row 3, {seed}")
    plan = _kill_servers(draw, seed, [*DISCIPLINES, "lock-free"], "applied")
    with ended(plan, more=PATIENT) as run:
        recoveries_s = _after_servers(run)
        if not run.complaints:
            run.complaints += _about_loads(run)
        return run.trial(recoveries_s)


def _about_loads(run: Ended) -> Iterator[str]:
    """A server comes back with what the newest checkpoint has, and with nothing older."""
    checkpoints = run.phases("checkpoint")
    deaths = [(struck.fault.role, struck.at_s) for struck in run.struck]
    for load in run.phases("load"):
        index, epoch = load["shard"], load["epoch"]
        times = [at_s for role, at_s in deaths if role == f"ps --index {index}"]
        if not 0 < epoch <= len(times):
            continue
        kept = [e["shards"][index][0] for e in checkpoints if e["at_s"] < times[epoch - 1]]
        if kept and load["version"] < max(kept):
            yield (
                f"server {index} came back with version {load['version']}, and a checkpoint had "
                f"{max(kept)}"
            )


ROWS = (
    Row(
        1,
        "worker SIGKILL at a random instant",
        "the others go on; no shard holds half a gradient; a new incarnation",
        1000,
        5,
        kill_workers,
        protections("same incarnation", "goes on a step too far"),
    ),
    Row(
        2,
        "server SIGKILL, `--ack durable`",
        "every acknowledged update is recovered; workers reconnect by themselves",
        300,
        3,
        kill_servers_that_promise,
        protections("answered before it is on the disk", "journal not read"),
    ),
    Row(
        3,
        "server SIGKILL, `--ack applied`",
        "loses at most what came after the last checkpoint, and reports how many",
        300,
        3,
        kill_servers,
        protections("accounts not saved", "oldest checkpoint"),
    ),
)
