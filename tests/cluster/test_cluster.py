"""Runs whose roles find each other by address: every promise of one machine, over TCP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import Cluster, Proxy, Role, cluster, finish
from helpers import DROPPING, toy_recipe
from rig import TOKEN, tls_terms, wait_until

import offbeat
from offbeat.cli import main, roles
from offbeat.cli.roles import check
from offbeat.cluster import bootstrap, remote
from offbeat.cluster import relay as relaying
from offbeat.cluster.relay import Relay
from offbeat.config import DISCIPLINES, make_config
from offbeat.errors import ConnectionClosedError, OffbeatError, RecipeError, RoleError
from offbeat.flat import PROTOCOL
from offbeat.roles.master import Patience
from offbeat.run.events import read_events
from offbeat.run.job import disagreement
from offbeat.run.making import make_job
from offbeat.transport.security import OPEN, Terms
from offbeat.transport.sockets import connect, connect_for_calls

T = 10.0


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FLUSH_EVERY_S", 0.02)
    monkeypatch.setattr(remote, "POLL_S", 0.02)
    monkeypatch.setattr(bootstrap, "CONFIG_WAIT_S", 0.2)
    monkeypatch.setattr(roles, "CHECK_TIMEOUT_S", 1.0)


def most_are_slow(*values: str, but: str) -> list[Any]:
    """All of them for the long tests, one for the short ones."""
    return [v if v == but else pytest.param(v, marks=pytest.mark.slow) for v in values]


def check_all_in(made: Cluster, steps: dict[int, int], servers: int, discipline: str = "") -> None:
    """Every gradient of every worker is in every shard, once, or was dropped there."""
    expected = {
        (shard, worker, sequence)
        for shard in range(servers)
        for worker, count in steps.items()
        for sequence in range(1, count + 1)
    }
    applied = made.applied()
    assert set(applied.values()) == {1}
    if discipline in DROPPING:
        assert set(applied) <= expected and not set(applied) & made.dropped()
        expected -= made.dropped()
    assert set(applied) == expected


@pytest.mark.parametrize("discipline", most_are_slow(*DISCIPLINES, but="sync"))
def test_every_discipline_trains_over_tcp(discipline: str, tmp_path: Path) -> None:
    with cluster(tmp_path, servers=2, workers=3, discipline=discipline, lr=0.3) as made:
        result = finish(made, made.start_all())
        assert result.summary["status"] == "finished"
        assert result.summary["engine"] == "cluster"
        assert result.summary["gradients"] == 3 * 15 * 8
        assert (result.test_accuracy or 0) > 0.85
        check_all_in(made, dict.fromkeys(range(3), 15 * 8), 2, discipline)
        if discipline == "sync":
            assert result.staleness.max == 0
        assert not (made.run_dir / "cluster.json").exists()


def test_a_discipline_of_ones_own_trains_over_tcp(tmp_path: Path) -> None:
    own = f"{Path(__file__).parents[2] / 'examples' / 'drop_stale.py'}:DropStale:0"
    with cluster(tmp_path, servers=1, workers=3, discipline=own) as made:
        summary = finish(made, made.start_all()).summary
        assert summary["status"] == "finished" and summary["staleness"]["max"] == 0
        (row,) = summary["kept"]
        assert row["gradients"] == 3 * 15 * 8 == row["applied"] + row["dropped"]


def test_sync_over_tcp_gives_the_bits_of_threads(tmp_path: Path) -> None:
    options = {"discipline": "sync", "servers": 2, "workers": 2}
    with cluster(tmp_path, **options) as made:
        there = offbeat.load(finish(made, made.start_all()).run_dir)
    here = offbeat.train(
        "toy:recipe", engine="inproc", quiet=True, threads=1, run_dir=tmp_path / "r", **options
    ).state_dict()
    for name, tensor in here.items():
        assert torch.equal(there[name], tensor)


def test_with_token_and_tls_and_the_token_is_nowhere(tmp_path: Path) -> None:
    terms = tls_terms()
    with cluster(tmp_path, servers=1, workers=2, terms=terms) as made:
        result = finish(made, made.start_all())
        assert result.summary["gradients"] == 2 * 15 * 12
        lines = "\n".join(line for role in made.roles for line in role.lines)
    assert TOKEN.decode() not in lines
    for path in made.run_dir.rglob("*"):
        assert path.is_dir() or TOKEN not in path.read_bytes(), path


def test_whoever_comes_early_waits_and_says_for_whom(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=2, workers=2, recipe="toy:short") as made:
        for listener in made.listeners:
            listener.close()  # nobody is there yet
        worker, evaluator = made.start_worker(1), made.start_evaluator()
        master = made.start_master()
        where = made.hosts.ps[0]
        for role in (worker, evaluator):
            wait_until(lambda role=role: role.lines, "it says that it waits")  # type: ignore[misc]
            assert role.lines == [f"waiting for server 0 at {where}"]
        made.listeners = [made.listen(f"tcp:{address}") for address in made.hosts.ps]
        made.start_servers()
        assert finish(made, master).summary["gradients"] == 2 * 5 * 12


def test_others_are_told_the_recipe_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On their machines it lies elsewhere; where it is on its own the master keeps for itself."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from helpers import toy_recipe\nown = toy_recipe()\n")
    with cluster(tmp_path, servers=1, workers=2, recipe="mine.py:own") as made:
        finish(made, made.start_all())
        told = made.servers_message()
    assert told["config"]["recipe"] == "mine.py:own" and str(tmp_path) not in json.dumps(told)
    kept = json.loads((made.run_dir / "config.json").read_text())
    assert kept["recipe_file"]["path"] == str(tmp_path / "mine.py")
    assert kept["resolved"]["devices"] == ["cpu", None], "those of others are not known here"


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=2) as made:
        made.start_timeout_s = 0.5
        made.start_servers()
        for role in (made.servers[0], made.start_worker(1), made.start_evaluator()):
            with pytest.raises(ConnectionClosedError, match="--start-timeout"):
                role.wait()


@pytest.mark.slow
@pytest.mark.parametrize("discipline", most_are_slow("sync", "bounded", but="sync"))
def test_a_worker_that_never_comes_is_left_out(discipline: str, tmp_path: Path) -> None:
    with cluster(tmp_path, servers=2, workers=3, discipline=discipline) as made:
        made.start_timeout_s = 2.0
        made.start_servers()
        made.start_worker(1)
        result = finish(made, made.start_master())
        assert result.summary["status"] == "finished"
        check_all_in(made, {0: 120, 1: 120}, 2)


@pytest.mark.parametrize("discipline", most_are_slow("sync", "apply-reply", but="sync"))
def test_a_worker_that_leaves_for_good_takes_nobody_along(discipline: str, tmp_path: Path) -> None:
    options = {"discipline": discipline, "worker_timeout": 1.0}
    with cluster(tmp_path, servers=2, workers=3, **options) as made:
        made.start_servers()
        leaving, staying = made.start_worker(1), made.start_worker(2)
        master = made.start_master()
        wait_until(lambda: made.run_dir.exists() and made.num_updates() > 40, "it is under way")
        leaving.stop.set()
        leaving.wait()
        result = finish(made, master)
        assert result.summary["status"] == "finished"
        assert staying.lines[-1] == "worker 2 is through after 120 steps"
        counts = [worker["gradients"] for worker in result.summary["workers"]]
        assert counts[0] == counts[2] == 120 and 0 < counts[1] < 120


@pytest.mark.slow
@pytest.mark.parametrize("discipline", most_are_slow("sync", "lock-free", but="lock-free"))
def test_a_server_that_is_started_again_gets_its_shard_back(
    discipline: str, tmp_path: Path
) -> None:
    options = {"discipline": discipline, "checkpoint_every": 20, "epochs": 40}
    with cluster(tmp_path, servers=2, workers=2, **options) as made:
        master = made.start_all()
        wait_until(lambda: made.newest_checkpoint() >= 20, "there is something to go on from")
        made.restart_server(1)
        result: Any = master.wait()
        assert result.summary["status"] == "finished"
        assert (result.test_accuracy or 0) > 0.85
        loads = [e for e in read_events(made.run_dir / "events") if e.get("phase") == "load"]
        assert [(e["shard"], e["epoch"]) for e in loads] in (
            [(0, 0), (1, 0), (1, 1)],
            [(1, 0), (1, 1), (0, 0)],
        )
        assert loads[-1]["version"] > 0 or loads[1]["version"] > 0


def test_a_server_that_promises_has_all_it_answered_on_its_own_disk(tmp_path: Path) -> None:
    options = {"discipline": "apply-reply", "checkpoint_every": 1000, "epochs": 10}
    with cluster(tmp_path, servers=2, workers=2, ack="durable", **options) as made:
        made.journals = tmp_path / "disks"
        master = made.start_all()
        wait_until(lambda: made.version(1) >= 20, "something was answered")
        made.restart_server(1)
        result: Any = master.wait()
        kept = result.summary["kept"]
        assert [row["lost"] for row in kept] == [0, 0]
        assert {row["applied"] for row in kept} == {result.summary["gradients"]}
        again = [e for e in read_events(made.run_dir / "events") if e.get("again")]
        assert len(again) >= 20 and {e["shard"] for e in again} == {1}
        assert not list(made.journals.glob("*/*/*")), "all of it is in the last checkpoint"


def test_a_server_without_a_disk_for_its_journal_says_so(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1, ack="durable") as made:
        made.start_servers()
        with pytest.raises(RoleError, match=r"nowhere to keep its journal.*--journal-dir"):
            made.start_master().wait()


@pytest.mark.slow
def test_a_server_that_is_started_again_does_not_wait_for_who_is_gone(tmp_path: Path) -> None:
    options = {"discipline": "sync", "worker_timeout": 1.0, "checkpoint_every": 10}
    with cluster(tmp_path, servers=2, workers=3, epochs=40, **options) as made:
        made.start_servers()
        leaving = made.start_worker(1)
        made.start_worker(2)
        master = made.start_master()
        wait_until(lambda: made.newest_checkpoint() >= 10, "it is under way")
        leaving.stop.set()
        leaving.wait()
        made.restart_server(1)
        assert master.wait().summary["status"] == "finished"


def test_patience_with_workers_that_nobody_starts_again() -> None:
    now, said = [0.0], list[str]()
    patience = Patience(3, start_s=10, absent_s=5, say=said.append, now=lambda: now[0])
    now[0] = 100.0
    patience.begin()
    patience.look({0, 1}, set())
    assert patience.given_up() == set() and not patience.is_done()
    now[0] = 111.0
    assert patience.given_up() == {2} and "worker 2 did not come" in said[-1]
    patience.look({0, 1, 2}, set())
    assert patience.given_up() == set(), "it came after all, and is waited for"
    patience.look({0, 2}, set())
    assert said[-1] == "worker 1 is gone; the others go on"
    now[0] = 117.0
    assert patience.given_up() == {1}
    patience.look({0, 1, 2}, set())
    assert said[-1] == "worker 1 is back" and patience.given_up() == set()
    patience.look({1}, {2})
    now[0] = 200.0
    assert patience.given_up() == set() and not patience.is_done(), "rank 0 is never given up"
    patience.look(set(), {0, 2})
    assert not patience.is_done()
    now[0] = 206.0
    assert patience.is_done()


# -- elastic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "discipline", most_are_slow("apply-reply", "lock-free", "bounded", but="apply-reply")
)
def test_workers_join_and_leave_and_the_schedule_stays_right(
    discipline: str, tmp_path: Path
) -> None:
    options = {"discipline": discipline, "split": "shared", "recipe": "toy:scheduled"}
    with cluster(tmp_path, servers=2, workers=2, epochs=40, **options) as made:
        master = made.start_all()
        wait_until(lambda: made.run_dir.exists() and made.num_updates() > 100, "it is under way")
        first, second = made.start_worker(None), made.start_worker(None)
        wait_until(lambda: {2, 3} <= {worker for _, worker, _ in made.applied()}, "they help")
        first.stop.set()
        first.wait()
        result = finish(made, master)
        total = 2 * 40 * 24
        overshoot = 8 if discipline == "lock-free" else 0
        assert total <= result.summary["updates"] <= total + overshoot
        assert abs(result.summary["gradients"] - total) <= 8, "up to two of each worker are cut off"
        assert (result.test_accuracy or 0) > 0.85
        ranks = {worker["rank"] for worker in result.summary["workers"]}
        assert ranks == {0, 1, 2, 3}, "each who joined has a rank of its own"
        assert "through" in second.lines[-1]


@pytest.mark.parametrize("options", [{"split": "disjoint"}, {"discipline": "sync"}])
def test_nobody_joins_where_the_work_is_shared_out(options: dict[str, Any], tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=2, **{"split": "shared", **options}) as made:
        master = made.start_all()
        with pytest.raises(ConnectionClosedError, match="nobody can join this run"):
            made.start_worker(None).wait()
        made.roles.pop()
        finish(made, master)


# -- broken connections ----------------------------------------------------------------------------


@pytest.fixture
def proxies() -> Iterator[list[Proxy]]:
    made: list[Proxy] = []
    yield made
    for proxy in made:
        proxy.close()


@pytest.mark.parametrize("discipline", most_are_slow(*DISCIPLINES, but="reply-apply"))
def test_a_worker_whose_connections_break_goes_on(
    discipline: str, tmp_path: Path, proxies: list[Proxy]
) -> None:
    with cluster(tmp_path, servers=2, workers=2, discipline=discipline, epochs=40) as made:
        proxies += [Proxy(address) for address in made.hosts.addresses]
        made.start_servers()
        worker = made.start_worker(1, tuple(proxy.address for proxy in proxies))
        master = made.start_master()
        for number in range(6):
            reached = 40 * (number + 1)
            wait_until(
                lambda reached=reached: made.run_dir.exists() and made.num_updates() > reached,  # type: ignore[misc]
                "it is under way",
            )
            proxies[number % 2].cut()
        result = finish(made, master)
        assert any("looking for it" in line for line in worker.lines), "nothing broke"
        applied = made.applied()
        assert set(applied.values()) == {1}, "something was applied twice"
        mine = {(s, w, n) for s, w, n in applied if w == 1}
        if discipline == "sync":  # a round may have closed without it
            assert len(mine) > 2 * 480 - 20
        elif discipline in DROPPING:
            assert len(mine) + len({push for push in made.dropped() if push[1] == 1}) == 2 * 480
        else:
            assert len(mine) == 2 * 480, "a gradient was lost"
        assert result.summary["status"] == "finished"


def test_sparse_gradients_survive_connections_that_break(
    tmp_path: Path, proxies: list[Proxy]
) -> None:
    options = {"recipe": "sparse:recipe", "discipline": "apply-reply", "epochs": 20}
    with cluster(tmp_path, servers=2, workers=2, **options) as made:
        proxies += [Proxy(address) for address in made.hosts.addresses]
        made.start_servers()
        worker = made.start_worker(1, tuple(proxy.address for proxy in proxies))
        master = made.start_master()
        for number in range(4):
            reached = 40 * (number + 1)
            wait_until(
                lambda reached=reached: made.run_dir.exists() and made.num_updates() > reached,  # type: ignore[misc]
                "it is under way",
            )
            proxies[number % 2].cut()
        result = finish(made, master)
        assert any("looking for it" in line for line in worker.lines), "nothing broke"
        applied = made.applied()
        assert set(applied.values()) == {1}, "something was applied twice"
        assert len(applied) == 2 * 2 * 20 * 6, "a gradient was lost"
        assert result.summary["status"] == "finished"


# -- handshakes ------------------------------------------------------------------------------------


def test_a_mismatch_is_refused_with_the_difference_and_the_server_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=2, epochs=40) as made:
        made.start_servers()
        master = made.start_master()
        wait_until(lambda: any("serving from" in x for x in made.servers[0].lines), "it serves")
        job = make_job(make_config({"workers": 2, "recipe": "toy:recipe"}), toy_recipe())
        ours = {"worker": 1, "incarnation": 9, **job.agreement}
        for change, message in [
            ({"protocol": 7}, f"the protocol's version is {PROTOCOL} there, 7 here"),
            ({"num_shards": 3}, "the number of servers is 1 there, 3 here"),
            ({"optimizer": "Nothing()"}, r"the optimizer is .* there, Nothing\(\) here"),
            (
                {"model": [["a", [2], "float32"]]},
                r"the model has 0.weight .* there, a \[2\] float32 here",
            ),
            ({}, "the model: its tensors"),
        ]:
            hello = {**ours, **change, "fingerprint": "another"}
            with pytest.raises(ConnectionClosedError, match=message):
                connect(made.hosts.addresses[0], hello, job.layout(0), T)
        made.start_worker(1)
        finish(made, master)


def test_a_recipe_that_differs_between_machines_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path, servers=1, workers=2) as made:
        made.start_servers()
        monkeypatch.setattr(
            bootstrap,
            "load_recipe",
            lambda name, **more: toy_recipe(model=lambda: torch.nn.Linear(6, 3)),
        )
        master = made.start_master()
        with pytest.raises(OffbeatError, match=r"not the master's: the model has 0.weight"):
            master.wait()
        made.servers[0].stop.set()


def test_what_differs_is_said_in_words() -> None:
    ours = make_job(make_config({}), toy_recipe()).agreement
    assert disagreement(ours, ours) == ""
    assert "nothing more here" in disagreement(
        {**ours, "model": [*ours["model"], ["z", [1], "float32"]], "fingerprint": "x"}, ours
    )
    assert disagreement({}, ours).startswith("the protocol's version is None there")


def test_a_server_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=2, epochs=40) as made:
        master = made.start_all()
        wait_until(lambda: made.run_dir.exists() and made.num_updates() > 10, "it is under way")
        made.run_dir = tmp_path / "other"
        other = made.start_master()
        with pytest.raises(OffbeatError, match="serves another run: toy:recipe"):
            other.wait()
        made.roles.remove(other)
        made.run_dir = tmp_path / "run"
        finish(made, master)


def test_a_run_under_way_is_not_changed_by_its_master(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=2, epochs=60) as made:
        master = made.start_all()
        wait_until(lambda: made.run_dir.exists() and made.num_updates() > 10, "it is under way")
        run = json.loads((made.run_dir / "cluster.json").read_text())["run"]
        message = {**made.servers_message(), "run": run, "life": "another"}
        message["config"] = {**message["config"], "epochs": 70}
        end = connect_for_calls(made.hosts.addresses[0], {}, remote.NO_PAYLOAD, T)
        with pytest.raises(ConnectionClosedError, match="with epochs 60 instead of 70"):
            end.call(message, {}, T)
        end.close()
        finish(made, master)


@pytest.mark.slow
def test_a_worker_with_another_cluster_file_is_told_so(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=2, workers=2, epochs=60) as made:
        made.start_servers()
        master = made.start_master()
        with pytest.raises(ConnectionClosedError, match="there is no rank 7"):
            made.start_worker(7).wait()
        made.roles.pop()
        with pytest.raises(OffbeatError, match="the run has 2 servers, this cluster 1"):
            made.start_worker(1, made.hosts.addresses[:1]).wait()
        made.roles.pop()
        with pytest.raises(ConnectionClosedError, match="this is server 1, not 0"):
            made.start_worker(1, made.hosts.addresses[::-1]).wait()
        made.roles.pop()
        made.start_worker(1)
        assert finish(made, master).summary["status"] == "finished"


def test_nonsense_in_a_call_is_its_senders_affair(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1, epochs=40) as made:
        master = made.start_all()
        wait_until(lambda: any("serving from" in x for x in made.servers[0].lines), "it serves")
        for message in (
            {"ask": "dinner"},
            {"ask": "load", "state": {}},
            {"ask": "configure"},
            {},
        ):
            end = connect_for_calls(made.hosts.addresses[0], {}, remote.NO_PAYLOAD, T)
            with pytest.raises(ConnectionClosedError):
                end.call(message, {}, T)
            end.close()
        finish(made, master)


# -- evaluator, checks, events ---------------------------------------------------------------------


@pytest.mark.slow
def test_an_evaluator_scores_each_checkpoint_once_and_the_last(tmp_path: Path) -> None:
    options = {"recipe": "toy:scheduled", "checkpoint_every": 50, "epochs": 60}
    with cluster(tmp_path, servers=2, workers=2, **options) as made:
        evaluator = made.start_evaluator()
        result = finish(made, made.start_all())
        scores = [line for line in evaluator.lines if "precision @ 1 = " in line]
        versions = [int(line.split()[1].strip(":")) for line in scores]
        assert versions == sorted(set(versions)) and versions[-1] == result.summary["updates"]
        assert f"precision @ 1 = {result.test_accuracy:.3f}, " in scores[-1], "of the EMA"
        kept = [e for e in read_events(made.run_dir / "events") if e["kind"] == "score"]
        assert {e["version"] for e in kept} >= set(versions)


def test_check_tells_who_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(tmp_path, servers=2, workers=2, epochs=60, terms=Terms(token=TOKEN)) as made:
        made.servers = [made.serve(0, made.listeners[0])]
        assert not check(made.hosts, made.terms)
        out = capsys.readouterr().out
        assert "ps 0" in out and "waiting for the master" in out
        assert "ps 1" in out and "not reachable" in out
        made.servers.append(made.serve(1, made.listeners[1]))
        assert check(made.hosts, made.terms), "nobody is missing"
        made.start_worker(1)
        master = made.start_master()
        wait_until(
            lambda: made.run_dir.exists() and {rank for _, rank, _ in made.applied()} == {0, 1},
            "both are at work",
        )
        capsys.readouterr()
        assert check(made.hosts, made.terms)
        out = capsys.readouterr().out
        assert "serving toy:recipe" in out and "fingerprint" in out
        assert "worker 0  connected" in out and "master  connected" in out
        assert not check(made.hosts, OPEN), "without the token nobody answers"
        assert "asks for a token" in capsys.readouterr().out
        finish(made, master)


def text(found: dict[str, torch.Tensor]) -> bytes:
    return b"".join(bytes(part.tolist()) for part in found.values())


def test_events_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "MAX_KEPT_BYTES", 30)
    monkeypatch.setattr(relaying, "EVENT_BYTES", 12)
    relay = Relay()
    for number in range(4):
        relay.add("worker-1", f"line {number}\nand\n".encode())
    assert relay.num_lost == 2 * 11
    taken, got = b"", None
    while found := relay.take(got)[1]:
        assert text(found).endswith(b"\n") and len(text(found)) <= 12
        taken += text(found)
        got = relay.take()[0]
    assert taken == b"line 0\nand\nline 1\nand\n"


def test_events_come_once_whatever_answer_is_lost() -> None:
    relay = Relay()
    relay.add("worker-1", b"a\nb\n", "x", 0)
    relay.add("worker-1", b"a\nb\n", "x", 0)  # the answer to it was lost
    relay.add("worker-1", b"b\nc\n", "x", 2)  # and so was this one's beginning
    relay.add("worker-1", b"d\n", "another life of it", 0)
    first, lines = relay.take()
    assert text(lines) == b"a\nb\nc\nd\n"
    relay.add("worker-1", b"e\n", "x", 6)
    assert relay.take() == (first, lines), "it did not say that it has them"
    assert relay.take(["another server", 1]) == (first, lines)
    second, lines = relay.take(first)
    assert text(lines) == b"e\n" and second != first
    assert relay.take(second)[1] == {}


# -- eval ------------------------------------------------------------------------------------------


def test_eval_scores_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "r")
    result = offbeat.train("toy:scheduled", engine="inproc", quiet=True, run_dir=run)
    before = sorted(path for path in Path(run).rglob("*"))
    assert main(["eval", run]) == main(["eval", run, "--once"]) == 0
    line = f"precision @ 1 = {result.test_accuracy:.3f}, loss = {result.test_loss:.3f}"
    assert capsys.readouterr().out.splitlines() == [line, line]
    assert main(["eval", run, "--follow"]) == 0
    assert capsys.readouterr().out == f"version {result.summary['updates']}: {line}\n"
    assert before == sorted(path for path in Path(run).rglob("*")), "it only looks"
    assert offbeat.evaluate(run) == result.test_accuracy


@pytest.mark.slow
def test_eval_follows_a_run(tmp_path: Path) -> None:
    lines: list[str] = []
    run = tmp_path / "r"
    training = Role(
        "training",
        lambda role: offbeat.train(
            "toy:recipe", engine="inproc", quiet=True, run_dir=run, epochs=150, checkpoint_every=50
        ),
    )
    wait_until(lambda: any((run / "checkpoints").glob("0*")), "it is under way")
    offbeat.evaluate(run, follow=True, say=lines.append)
    result = training.wait()
    versions = [int(line.split()[1].strip(":")) for line in lines]
    assert versions == sorted(set(versions)) and versions[-1] == result.summary["updates"]
    assert len(versions) >= 2


def test_eval_leaves_when_nobody_is_at_work(tmp_path: Path) -> None:
    run = tmp_path / "r"
    offbeat.train("toy:recipe", engine="inproc", quiet=True, run_dir=run)
    (run / "state.json").unlink()  # as if its process had been killed
    lines: list[str] = []
    offbeat.evaluate(run, follow=True, say=lines.append)
    assert len(lines) == 1


def test_eval_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "is that a run?" in capsys.readouterr().err
    without = offbeat.train(
        toy_recipe(data=lambda config: (toy_recipe().data(config)[0], None)),
        quiet=True,
        run_dir=tmp_path / "r",
    )
    with pytest.raises(RecipeError, match="no test data"):
        offbeat.evaluate(
            without.run_dir,
            recipe=toy_recipe(data=lambda config: (toy_recipe().data(config)[0], None)),
        )
