"""What is read out of a run's events: who made which update, and what it was computed on."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import RunDirError
from offbeat.replaying.recorded import Committed, Point, Recorded


def load(shard: int, version: int, epoch: int = 0) -> dict[str, Any]:
    return {"kind": "run", "phase": "load", "shard": shard, "epoch": epoch, "version": version}


def push(
    shard: int, worker: int, sequence: int, base: int, made: int | None, at_s: float = 0.0
) -> dict[str, Any]:
    who = {"kind": "push", "shard": shard, "worker": worker, "incarnation": 0}
    what = {"sequence": sequence, "batch": sequence - 1, "base_version": base, "lr": 0.5}
    outcome = "dropped" if made is None else "applied"
    return {**who, **what, "outcome": outcome, "version": made, "received_s": at_s}


def rejoin(worker: int, shard: int, epoch: int, seen: int, at_s: float) -> dict[str, Any]:
    found = {"kind": "rejoin", "worker": worker, "shard": shard, "epoch": epoch}
    return {**found, "former_epoch": epoch - 1, "seen_version": seen, "version": 0, "at_s": at_s}


def read(folder: Path, num_shards: int, **files: list[dict[str, Any]]) -> Recorded:
    for name, events in files.items():
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (folder / f"{name.replace('_', '-').replace('-again', '.1')}.jsonl").write_text(lines)
    return Recorded.read(folder, num_shards)


def test_every_update_knows_its_gradients_and_what_they_were_computed_on(tmp_path: Path) -> None:
    pushes = [push(0, 1, 1, 0, 1, 0.2), push(0, 0, 1, 0, 2, 0.1), push(0, 1, 2, 1, None, 0.3)]
    step = {"kind": "step", "worker": 1, "step": 1, "loss": 2.5}
    saved = {"kind": "run", "phase": "checkpoint", "version": 2, "shards": [[2, "ab"]]}
    found = read(tmp_path, 1, ps_0=[load(0, 0), *pushes], worker_1=[step], master=[saved])
    ((life,),) = found.lives
    assert (life.begins, life.ends, life.source) == (0, 2, None)
    (first,), (second,) = life.updates[1], life.updates[2]
    assert (first.worker, first.bases, second.worker) == (1, [Point(0, 0, 0)], 0)
    assert life.rates == {1: 0.5, 2: 0.5}
    assert found.losses == {(1, 1): {2.5}} and found.checkpoints == [Committed(2, [(2, "ab")])]


def test_a_round_has_its_gradients_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    pushes = [push(0, rank, 1, 0, 1, 1.0 - rank / 10) for rank in range(3)]
    ((life,),) = read(tmp_path, 1, ps_0=[load(0, 0), *pushes]).lives
    assert [gradient.worker for gradient in life.updates[1]] == [2, 1, 0]


def test_a_gradient_is_one_at_all_servers(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        2,
        ps_0=[load(0, 0), push(0, 0, 1, 0, 1), push(0, 1, 1, 1, 2)],
        ps_1=[load(1, 0), push(1, 1, 1, 0, 1), push(1, 0, 1, 0, 2)],
    )
    (first,), (second,) = found.lives
    assert first.updates[1] == second.updates[2] and first.updates[2] == second.updates[1]
    ((gradient,),) = [first.updates[2]]
    assert gradient.bases == [Point(0, 0, 1), Point(1, 0, 0)] and gradient.num_uses == 2


def test_what_a_server_lost_the_worker_knows(tmp_path: Path) -> None:
    """Server 1 died with the gradient, and came back with an older version; the next gradient is
    of what it has then."""
    found = read(
        tmp_path,
        2,
        ps_0=[load(0, 0), push(0, 0, 1, 0, 1, 1.0), push(0, 0, 2, 1, 2, 2.0)],
        ps_1=[load(1, 0), push(1, 0, 1, 0, 1, 1.0)],
        worker_0=[rejoin(0, 1, 1, 1, 2.5), rejoin(0, 1, 2, 9, 3.5)],
        ps_1_again=[load(1, 1, 1), push(1, 0, 3, 1, 2, 3.0)],
    )
    of_first, of_second = found.lives
    ((lost,),) = [of_first[0].updates[2]]
    assert lost.bases == [Point(0, 0, 1), Point(1, 0, 1)] and lost.num_uses == 1
    assert [life.source for life in of_second] == [None, Point(1, 0, 1)]
    ((later,),) = [of_second[1].updates[2]]
    assert later.bases == [None, Point(1, 1, 1)], "it never came to server 0"


def test_a_gradient_that_is_computed_again_for_one_server_is_another_one(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        2,
        ps_0=[load(0, 0), push(0, 0, 1, 0, 1, 1.0), push(0, 0, 1, 1, None, 3.1)],
        ps_1=[load(1, 0), push(1, 0, 1, 0, 1, 1.1)],
        ps_1_again=[load(1, 0, 1), push(1, 0, 1, 0, 1, 3.0)],
        worker_0=[rejoin(0, 1, 1, 1, 2.0)],
    )
    _, (before, after) = found.lives
    ((first,), (second,)) = before.updates[1], after.updates[1]
    assert first is not second and after.source == Point(1, 0, 0)
    assert second.bases == [Point(0, 0, 1), Point(1, 1, 0)]


def test_a_gradient_that_is_pushed_to_the_next_server_is_the_same_one(tmp_path: Path) -> None:
    """Server 1 died before it had it, and came back with an older version."""
    anew = {"kind": "anew", "worker": 0, "shard": 1, "sequence": 2, "epoch": 1, "at_s": 2.6}
    anew |= {"former_epoch": 0, "base_version": 1}
    found = read(
        tmp_path,
        2,
        ps_0=[load(0, 0), push(0, 0, 1, 0, 1, 1.0), push(0, 0, 2, 1, 2, 2.0)],
        ps_1=[load(1, 0), push(1, 0, 1, 0, 1, 1.0)],
        worker_0=[rejoin(0, 1, 1, 1, 2.5), anew],
        ps_1_again=[load(1, 0, 1), push(1, 0, 2, 0, 1, 3.0)],
    )
    of_first, of_second = found.lives
    assert of_first[0].updates[2] == of_second[1].updates[1]
    ((gradient,),) = [of_first[0].updates[2]]
    assert gradient.bases == [Point(0, 0, 1), Point(1, 0, 1)] and gradient.num_uses == 2


def test_a_life_ends_where_events_are_missing(tmp_path: Path) -> None:
    pushes = [push(0, 0, 1, 0, 1), push(0, 0, 3, 2, 3)]
    ((life,),) = read(tmp_path, 1, ps_0=[load(0, 0), *pushes]).lives
    assert life.ends == 1 and not life.has(3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ps_1": [load(1, 0)]}, "had more servers once than the 1 that it ended with"),
        ({"ps_0": [push(0, 0, 1, 0, 1)]}, "events of server 0 do not say what it began with"),
        ({"ps_0": [load(0, 7)]}, "server 0 once began with version 7"),
    ],
)
def test_what_events_do_not_say_is_told(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunDirError, match=message):
        read(tmp_path, 1, **files)
