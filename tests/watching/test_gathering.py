"""Events in, a summary out."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from offbeat.config import make_config
from offbeat.watching.gathering import NUM_MOMENTS, Gathered
from offbeat.watching.scores import MAX_POINTS, Scores
from offbeat.watching.series import NUM_KEPT_TICKS, Axis, means, rounded
from offbeat.watching.summary import figures, view
from offbeat.watching.waits import Waits


def described(workers: int = 2, servers: int = 1, **job: Any) -> dict[str, Any]:
    config = make_config({"recipe": "toy", "workers": workers, "servers": servers})
    facts = {"num_batches": [100] * workers, "total_updates": 100 * workers, **job}
    return {
        "config": config.to_json(),
        "metric": "accuracy",
        "metrics": {"accuracy": True},
        "resolved": {"epochs": 1, "steps": None, "accumulate": 1},
        "job": facts,
    }


def step(worker: int, number: int, start_s: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "worker": worker,
        "step": number,
        "epoch": 0,
        "loss": 1.0,
        "examples": 10,
        "outcome": "applied",
        "start_s": start_s,
        "compute_s": 0.05,
        "prepare_s": 0.01,
        "exchange_s": 0.04,
        **more,
    }


def push(worker: int, number: int, received_s: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "push",
        "shard": 0,
        "worker": worker,
        "incarnation": 0,
        "sequence": number,
        "outcome": "applied",
        "version": number,
        "staleness": 1,
        "mixed": False,
        "received_s": received_s,
        "applied_s": received_s,
        "replied_s": received_s + 0.03,
        "lr": 0.1,
        **more,
    }


def phase(name: str, at_s: float, **more: Any) -> dict[str, Any]:
    return {"kind": "run", "phase": name, "at_s": at_s, **more}


def a_run(workers: int, steps: int, each_s: float = 0.1) -> Iterator[dict[str, Any]]:
    yield phase("start", 1.0)
    for number in range(1, steps + 1):
        for worker in range(workers):
            at_s = 2.0 + each_s * number
            version = workers * (number - 1) + worker + 1
            yield push(worker, number, at_s + 0.06, version=version)
            yield step(worker, number, at_s, loss=1 / number)


def gathered_from(events: Any, **about: Any) -> Gathered:
    found = Gathered(described(**about))
    for event in events:
        found.add(event)
    found.tick()
    found.tick()
    return found


def row(shown: dict[str, Any], rank: int) -> dict[str, Any]:
    names = ("rank", "state", "steps", "expected", "rate", "loss", "staleness", "dropped")
    names += ("rejected", "restarts", "up", "down", "slowdown")
    return dict(zip(names, shown["workers"][rank], strict=True))


# -- numbers over time -----------------------------------------------------------------------------


def test_stretches_fold_and_nothing_is_lost() -> None:
    axis = Axis(8)
    counts, last = axis.column(), axis.column(adds=False)
    for moment in range(40):
        at = axis.index(moment / 4)
        counts.values[at] += 1
        last.values[at] = moment
    assert axis.width_s == 2.0 and axis.length == 5
    assert list(counts.values[:5]) == [8, 8, 8, 8, 8]
    assert list(last.values[:5]) == [7, 15, 23, 31, 39], "the later one stays"


def test_what_has_changed_since_a_tick_is_known() -> None:
    axis = Axis(8)
    axis.column()
    axis.index(0.1)
    axis.tick(1)
    axis.index(0.6)
    axis.tick(2)
    axis.tick(3)
    assert [axis.changed_since(tick) for tick in (0, 1, 2, 3)] == [0, 1, 8, 8]
    axis.index(1.6)  # nothing has happened in those between, which are new as well
    axis.tick(4)
    assert axis.changed_since(3) == 3
    axis.index(3.0)
    axis.tick(5)
    assert axis.changed_since(4) == 0, "two of them became one"
    for tick in range(6, 6 + NUM_KEPT_TICKS):
        axis.tick(tick)
    assert axis.changed_since(3) == 0, "that is too long ago"


def test_means_and_numbers_in_short() -> None:
    axis = Axis(4)
    sums, counts = axis.column(), axis.column()
    for at_s, value in ((0.0, 1.0), (0.1, 2.0), (0.6, 1 / 3)):
        at = axis.index(at_s)
        sums.values[at] += value
        counts.values[at] += 1
    assert means(sums, counts, 0, 3) == [1.5, None, 0.3333]
    assert [rounded(v) for v in (2.0, 123456.0, 1e-7)] == [2, 123500, 1e-7]


# -- who waits for whom ----------------------------------------------------------------------------


def test_in_a_round_all_wait_for_the_last_one() -> None:
    waits = Waits(3)
    for number in range(10):
        for worker, late_s in ((0, 0.0), (1, 0.1), (2, 0.5)):
            waits.add(worker, number + late_s, number + 0.6)
    found = waits.shares()
    assert set(found[0]) == set(found[1]) == {2} and 2 not in found
    assert found[0][2] == pytest.approx(5 / 9.6) and found[1][2] == pytest.approx(4 / 9.6)


def test_who_is_answered_at_once_waits_for_nobody() -> None:
    waits = Waits(2)
    for number in range(20):
        waits.add(number % 2, number, number + 0.01)
    assert waits.shares() == {}


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_in_figures() -> None:
    gathered = gathered_from(a_run(2, 50), workers=2)
    known = figures(gathered)
    assert known["status"] == "running"
    assert (known["gradients"], known["examples"], known["version"]) == (100, 1000, 100)
    assert known["progress"] == 0.5
    assert known["loss"] == 0.02 and known["staleness"] == 1 and known["lr"] == 0.1
    shown = view(gathered, 0)
    assert row(shown, 1)["steps"] == 50 and row(shown, 1)["expected"] == 100
    assert sum(shown["fine"]["gradients"]) == 100
    assert shown["fine"]["loss"][0] > shown["fine"]["loss"][-1]
    assert shown["fine"]["versions"]["0"][-1] == 100
    json.dumps(shown, allow_nan=False)


def test_rates_are_those_of_the_last_seconds() -> None:
    gathered = Gathered(described(workers=1))
    for number in range(1, 21):
        gathered.add(step(0, number, 0.1 * number))
        gathered.tick()
    assert gathered.rates()[0] == pytest.approx(10, rel=0.01)
    for _ in range(3):  # nothing comes any more
        gathered.tick(gathered.at_s + 20)
    assert gathered.rates()[0] == 0
    assert row(view(gathered, 0), 0)["state"] == "no step lately"
    assert figures(gathered)["left_s"] is None


def test_what_is_read_at_once_is_no_rate() -> None:
    """Somebody who comes late reads in a moment what took minutes."""
    gathered = Gathered(described(workers=1))
    gathered.add(step(0, 1, 0.1))
    gathered.tick(is_behind=True)
    for number in range(2, 101):
        gathered.add(step(0, number, 0.1 * number))
    gathered.tick()
    assert gathered.rates()[0] == pytest.approx(10, rel=0.05), "as long as it has trained"
    gathered.tick(gathered.at_s + 1)
    assert gathered.rates()[0] == 0


def test_the_time_that_is_left_goes_by_the_slowest() -> None:
    gathered = Gathered(described(workers=2))
    gathered.add(phase("start", 0.5))
    for number in range(1, 41):
        gathered.add(step(0, number, 1 + 0.1 * number))
        if number % 2:
            gathered.add(step(1, (number + 1) // 2, 1 + 0.1 * number))
        gathered.tick()
    left_s = figures(gathered)["left_s"]
    assert left_s == pytest.approx((100 - 20) / 5, rel=0.1)
    order = {"what": "stop_worker", "worker": 1, "words": "that worker 1 stops"}
    gathered.add(phase("order", 5.0, **order))
    assert figures(gathered)["left_s"] == pytest.approx((100 - 40) / 10, rel=0.1)


def test_a_later_view_has_only_what_is_new() -> None:
    events = list(a_run(4, 400))
    gathered = gathered_from(events[:-40], workers=4)
    before = view(gathered, 0)
    for event in events[-40:]:
        gathered.add(event)
    gathered.tick()
    new = view(gathered, before["tick"])
    assert len(json.dumps(new["fine"])) < len(json.dumps(before["fine"])) / 5
    start = new["fine"]["from"]
    whole = view(gathered, 0)["fine"]
    assert before["fine"]["gradients"][:start] + new["fine"]["gradients"] == whole["gradients"]
    assert "moments" not in new and "moments" in before


def test_waiting_is_told_from_exchanging() -> None:
    """By what the server says of the push, wherever its line is read first."""
    events = [step(0, 1, 1.0), push(0, 1, 1.06), step(0, 2, 1.1), push(0, 2, 1.16)]
    shown = view(gathered_from([events[1], events[0]], workers=1), 0)
    assert shown["coarse"]["parts"]["0"][0] == [50, 10, 30, 10]
    shown = view(gathered_from(events, workers=1), 0)
    assert [parts[4:] for parts in shown["recent"]] == [[10, 30, 10], [10, 30, 10]]


def test_the_newest_steps_are_of_the_same_time() -> None:
    """However much of whose file was read."""
    events = list(a_run(8, 200))
    behind = [e for e in events if e["kind"] != "step" or e["worker"] != 3 or e["step"] < 190]
    recent = view(gathered_from(behind, workers=8), 0)["recent"]
    shown = {rank: [s for r, _, s, *_ in recent if r == rank] for rank in range(8)}
    assert all(len(starts) >= 20 for starts in shown.values())
    assert max(map(max, shown.values())) - min(map(max, shown.values())) < 0.2
    assert max(map(min, shown.values())) - min(map(min, shown.values())) < 0.2


def test_a_death_shows_until_the_worker_steps_again() -> None:
    events = list(a_run(2, 10))
    restart = phase("restart", 3.2, role="worker", index=1, reason="was killed by SIGKILL")
    gathered = gathered_from([*events, restart], workers=2)
    shown = view(gathered, 0)
    assert row(shown, 1)["state"] == "was killed by SIGKILL" and row(shown, 1)["restarts"] == 1
    assert shown["moments"][-1][1:] == [
        "bad",
        "worker 1 was killed by SIGKILL: it is started again",
    ]
    assert shown["moments"][-1][0] == pytest.approx(3.2 - 2.1 - 0.06, abs=0.07)
    gathered.add(step(1, 11, 3.5, incarnation=1))
    assert row(view(gathered, 0), 1)["state"] == "at work"
    assert figures(gathered)["restarts"] == 1


def test_a_crew_falls_together() -> None:
    restart = phase("restart", 3.0, role="worker", index=1, reason="ended with 1", crew=[1, 3])
    shown = view(gathered_from([*a_run(4, 5), restart], workers=4), 0)
    assert [row(shown, r)["restarts"] for r in range(4)] == [0, 1, 0, 1]


def test_what_a_server_lost() -> None:
    gathered = gathered_from([*a_run(2, 20)], workers=2)
    gathered.add(phase("restart", 4.0, role="ps", index=0, reason="was killed by SIGKILL"))
    gathered.add({"kind": "run", "phase": "load", "shard": 0, "epoch": 1, "version": 30})
    account = [0, 20, 15, 0, 0, 5, 20]
    gathered.add(phase("books", 5.0, shards=[{"version": 35, "accounts": {"0": account}}]))
    known = figures(gathered)
    assert known["lost"] == 5 and known["restarts"] == 1
    texts = [text for _, _, text in view(gathered, 0)["moments"]]
    assert "server 0 is back with version 30: it had 40" in texts
    assert "5 updates are lost" in texts


def test_how_a_run_ends_and_goes_on() -> None:
    gathered = gathered_from([*a_run(1, 10), phase("end", 4.0, status="failed", reason="nan")])
    assert gathered.is_over and figures(gathered)["reason"] == "nan"
    assert view(gathered, 0)["moments"][-1][1:] == ["bad", "the run is failed: nan"]
    gathered.add(phase("start", 4.0))
    assert gathered.status == "failed", "that was the start of what ended then"
    gathered.add(phase("start", 5.0))
    assert gathered.status == "running" and figures(gathered)["reason"] is None


def test_dropped_and_rejected_are_counted_by_steps() -> None:
    """Every one of several servers says so of the same gradient."""
    events = [step(0, 1, 1.0, outcome="dropped"), step(0, 2, 1.1, outcome="rejected")]
    events += [push(0, 1, 1.05, outcome="dropped", shard=shard) for shard in (0, 1)]
    shown = view(gathered_from(events, workers=1), 0)
    assert (shown["status"]["dropped"], shown["status"]["rejected"]) == (1, 1)
    assert sum(shown["fine"]["dropped"]) == sum(shown["fine"]["rejected"]) == 1


def test_bytes_are_as_they_were_unless_told_otherwise() -> None:
    carried = {"up": 100, "down": 300, "whole": 100}
    events = [step(0, 1, 1.0, **carried), step(0, 2, 1.1), step(0, 3, 1.2)]
    known = figures(gathered_from(events, workers=1))
    assert (known["up"], known["down"]) == (300, 900)


def test_nonsense_is_counted_and_does_no_harm() -> None:
    events: list[dict[str, Any]] = [{"kind": "step"}, {"kind": "unreadable"}, {"kind": "new"}]
    events += [step(0, 1, 1.0, loss=None), step(0, 2, 1.1, loss=math.inf)]
    known = figures(gathered_from(events))
    assert known["unreadable"] == 2 and known["gradients"] == 2 and known["loss"] is None


def test_memory_does_not_grow_with_the_run() -> None:
    def restarts() -> Iterator[dict[str, Any]]:
        for number in range(3 * NUM_MOMENTS):
            yield phase("restart", 2.0 + number, role="worker", index=1, reason="ended with 1")

    gathered = gathered_from([*a_run(2, 3000), *restarts()], workers=2)
    shown = view(gathered, 0)
    assert len(shown["fine"]["gradients"]) <= 240 and sum(shown["fine"]["gradients"]) == 6000
    assert len(shown["moments"]) == NUM_MOMENTS
    assert len(shown["recent"]) < 60
    assert all(len(worker._held_s) <= 512 for worker in gathered.workers.values())


def test_many_workers_are_shown_in_few_bytes() -> None:
    events = list(a_run(64, 200))
    gathered = gathered_from(events[:-500], workers=64)
    first = view(gathered, 0)
    for event in events[-500:]:
        gathered.add(event)
    gathered.tick()
    assert len(json.dumps(first, separators=(",", ":"))) < 150_000
    later = json.dumps(view(gathered, first["tick"]), separators=(",", ":"))
    assert len(later) < 30_000, "once a second"


# -- scores ----------------------------------------------------------------------------------------


def test_scores_lie_where_their_checkpoint_was() -> None:
    events = [*a_run(1, 50), phase("checkpoint", 4.0, version=20, shards=[])]
    score = {"kind": "score", "version": 20, "metric": 0.5, "at_s": 9.0}
    shown = view(gathered_from([*events, {**score, "scores": {"accuracy": 0.5, "loss": None}}]), 0)
    ((version, at_s, gradients, values),) = shown["scores"]["points"]
    assert version == 20 and values == {"accuracy": 0.5, "loss": None}
    assert at_s == pytest.approx(4.0 - 2.1, abs=0.07) and 15 <= gradients <= 22
    assert shown["scores"]["best"] == [20, 0.5]
    assert shown["status"]["score"]["values"][0] == ["accuracy", 0.5]


def test_a_script_says_what_it_is_judged_by() -> None:
    scores = Scores("loss", {})
    scores.add({"version": 3, "at_s": 1.0, "scores": {"f1": 0.4}, "higher_is_better": {"f1": True}})
    scores.add({"version": 6, "at_s": 2.0, "scores": {"f1": 0.3}, "higher_is_better": {"f1": True}})
    assert scores.metric == "f1" and scores.best() == (3, 0.4)


def test_of_many_scores_the_best_and_the_last_stay() -> None:
    scores = Scores("accuracy", {"accuracy": True})
    for version in range(1, 3 * MAX_POINTS):
        value = 0.99 if version == 7 else 0.5
        scores.add({"version": version, "metric": value, "at_s": float(version)})
    points = scores.view(0.0, int)["points"]
    assert len(points) <= MAX_POINTS
    versions = [point[0] for point in points]
    assert 7 in versions and versions[-1] == 3 * MAX_POINTS - 1
