"""A server by hand, the master that comes to it and the evaluator: what they say to each other, one
call at a time, and what happens when one of them is gone at the wrong moment."""

import contextlib
import dataclasses
import logging
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clusters import Cluster, Proxy, cluster, finish
from helpers import toy_job, toy_recipe
from rig import TOKEN, rig, wait_until
from scripted import ScriptedNetwork, ScriptedServer, a_master, run_master
from test_cluster import quickly  # noqa: F401 - a fixture for all of these

import offbeat
from offbeat.accounts import Account
from offbeat.cli import commands, main, roles
from offbeat.cluster import bootstrap
from offbeat.cluster.bootstrap import Bootstrap
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.hosts import TF_VARIABLE, Hosts
from offbeat.cluster.remote import NO_PAYLOAD, CallSink, ServersSource
from offbeat.config import make_config
from offbeat.engines.cluster import CollectingEnd, MasterNetwork
from offbeat.engines.succession import Succession
from offbeat.errors import ConfigError, ConnectionClosedError, NonFiniteLossError, OffbeatError
from offbeat.roles import evaluator, worker
from offbeat.roles.calls import Call, Events, Status
from offbeat.roles.control import CONTROL_VARIABLE
from offbeat.roles.evaluator import Evaluator, FolderSource
from offbeat.roles.master import Patience
from offbeat.run.making import make_job
from offbeat.run.rundir import RunFolder
from offbeat.transport.base import CallEnd
from offbeat.transport.security import OPEN, TOKEN_VARIABLE, Terms, load_terms
from offbeat.transport.sockets import connect_for_calls

T = 10.0


def configure(made: Cluster, epoch: int = 0, **options: Any) -> tuple[Bootstrap, dict[str, Any]]:
    """Server 0, told of a run by nobody in particular, and what it was told."""
    made.start_servers()
    wait_until(lambda: 0 in made.bootstraps, "it is there")
    config = make_config({"workers": 2, "recipe": "toy:recipe", **options})
    job = make_job(config, toy_recipe(epochs=15), elastic=True)
    message = {
        "ask": "configure",
        "run": "r",
        "life": "l",
        "epochs": [epoch],
        "elapsed_s": 0.0,
        "config": {**job.config.to_json(), "threads": 1},
        "facts": dataclasses.asdict(job.facts),
        "agreement": job.agreement,
    }
    server = made.bootstraps[0]
    server.answer(message, {})
    return server, message


def load(server: Bootstrap, settled: dict[int, tuple[int, int]]) -> None:
    assert server.serving is not None
    job = server.serving.job
    accounts = {worker: Account(*at) for worker, at in settled.items()}
    state = dataclasses.replace(job.initial_state(0, job.make_model()), accounts=accounts)
    server.serving.server.load(state)


# -- events, on their way to the master ------------------------------------------------------------


class Scripted(CallEnd):
    """Answers calls as a test says."""

    def __init__(self, *answers: tuple[Any, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    def call(self, message: Any, tensors: Any, timeout_s: float) -> tuple[Any, Any]:
        self.asked.append(message["ask"])
        return self.answers.pop(0) if self.answers else ({}, {})

    def close(self) -> None:
        pass


def lines(text: str) -> dict[str, torch.Tensor]:
    return {"worker-1": torch.tensor(list(text.encode()), dtype=torch.uint8)}


def test_the_master_collects_until_there_is_no_more_and_takes_nothing_twice() -> None:
    def fetched(number: int, text: str = "") -> tuple[Any, Any]:
        return {"number": ["s", number], "failures": []}, lines(text) if text else {}

    end = Scripted(
        ({}, {}),
        ({"present": [1]}, {}),
        fetched(2, "a\n"),
        ({"present": [1]}, {}),
        fetched(2, "a\n"),  # again: the answer was lost
        ({"present": []}, {}),
        fetched(3, "b\n"),
        ({"present": []}, {}),
        fetched(4),
    )
    kept: list[bytes] = []
    remembered: list[list[Any]] = []
    got: list[Any] = []
    collecting = CollectingEnd(
        end,
        lambda events: kept.extend(bytes(t.tolist()) for t in events.lines.values()),
        got,
        lambda: remembered.append(list(got)),
    )
    collecting.call({"ask": "finish", "reason": ""}, {}, T)
    assert kept == [b"a\n", b"b\n"]
    assert remembered == [["s", 2], ["s", 3]]
    assert end.asked == ["finish", *["status", "fetch_events"] * 4, "release"]


def test_events_of_an_odd_name_are_neither_taken_nor_written(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1) as made:
        server, _ = configure(made)
        ask = {"ask": "events", "name": "../../x", "source": "s", "before": 0}
        with pytest.raises(ConnectionClosedError, match="nobody here is called"):
            server.answer(ask, {"lines": torch.zeros(1, dtype=torch.uint8)})
    network = MasterNetwork.__new__(MasterNetwork)
    network._files, network._folder = {}, RunFolder(tmp_path)
    with pytest.raises(ConnectionClosedError, match="events of"):
        network._collect(Events([], {"../../x": torch.zeros(1, dtype=torch.uint8)}, []))


def test_events_that_could_not_be_sent_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    class Network:
        def connect_for_calls(self, *args: Any) -> CallEnd:
            if not sent:
                sent.append(b"")
                raise ConnectionClosedError("server 0 is away")
            end = Scripted()
            monkeypatch.setattr(
                end, "call", lambda m, tensors, t: sent.append(bytes(tensors["lines"].tolist()))
            )
            return end

    sink = CallSink(Network(), "worker-1")  # type: ignore[arg-type]
    sink.write("a\n")
    sink.flush()
    sink.write("b\n")
    sink.flush()
    assert sent == [b"", b"a\nb\n"]


# -- who stays how long ----------------------------------------------------------------------------


def test_a_server_stays_until_the_master_lets_it_go(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1) as made:
        server, _ = configure(made)
        with contextlib.closing(
            connect_for_calls(made.hosts.addresses[0], {}, NO_PAYLOAD, T)
        ) as end:
            end.call({"ask": "finish", "reason": "the run is finished"}, {}, T)
            wait_until(
                lambda: server.serving is not None and server.serving.server.is_stopping,
                "it is over",
            )
            status, _ = end.call({"ask": "status"}, {}, T)
            assert status["present"] == [] and made.servers[0].thread.is_alive()
            end.call({"ask": "release"}, {}, T)
        made.servers[0].wait()
        assert server.reason == "the run is finished"


def test_a_server_stays_for_an_evaluator_until_it_leaves(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1) as made:
        server, _ = configure(made)
        server.answer({"ask": "newest", "after": -1, "who": "e"}, {})
        server.answer({"ask": "finish", "reason": "over"}, {})
        server.answer({"ask": "newest", "after": -1, "who": "late"}, {})
        server.answer({"ask": "release"}, {})
        made.servers[0].thread.join(0.2)
        assert made.servers[0].thread.is_alive()
        server.answer({"ask": "leave", "who": "e"}, {})
        made.servers[0].wait()


def test_a_server_that_is_told_to_leave_stays_for_the_masters_last_word(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1) as made:
        server, _ = configure(made)
        made.servers[0].leave.set()
        wait_until(lambda: "told to leave" in " ".join(made.servers[0].lines), "it is told")
        status, _ = server.answer({"ask": "status"}, {})
        assert not status["loaded"] and made.servers[0].thread.is_alive()
        server.answer({"ask": "finish", "reason": "the run is interrupted"}, {})
        server.answer({"ask": "release"}, {})
        made.servers[0].wait()
        assert server.reason == "the run is interrupted"


@pytest.mark.parametrize("is_serving", [False, True])
def test_a_server_that_is_told_to_leave_alone_does_not_stay_for_long(
    is_serving: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "LEAVE_S", 0.2 if is_serving else 1000.0)
    with cluster(tmp_path, servers=1, workers=1) as made:
        if is_serving:
            configure(made)
        else:
            made.start_servers()
        made.servers[0].leave.set()
        made.servers[0].wait()
        assert made.bootstraps[0].reason == "it was stopped"


def test_a_server_does_not_outlive_its_master_for_long(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1) as made:
        made.start_timeout_s = 0.5
        server, message = configure(made)
        server.answer({"ask": "failed", "line": "nan"}, {})
        own = {**message["config"], "keep": 7, "checkpoint_every": 3}
        server.answer({**message, "life": "m", "config": own}, {})  # another master took over
        assert server.failures == [], "those were told to the former one"
        with pytest.raises(ConnectionClosedError, match="nothing was heard of the master"):
            made.servers[0].wait()


def test_no_incarnation_of_a_worker_comes_twice_whoever_dies(tmp_path: Path) -> None:
    """The other servers may have heard of later ones than server 0 knows."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    given: list[int] = []
    for life in range(3):  # each master dies when it has told a server what to be, and so does that
        mine = Succession.begin(folder, 1, incarnation=200_000)  # a checkpoint has 199,999
        assert mine.incarnation == 200_000 + life
        with cluster(tmp_path, servers=1, workers=2) as made:
            server, _ = configure(made, epoch=mine.epochs[0])
            load(server, {1: (7, 5)})
            told = [server.answer({"ask": "config", "rank": 1}, {})[0] for _ in range(2)]
            given += [each["incarnation"] for each in told]
    assert given == sorted(set(given)) and given[0] > 200_000


def test_a_master_that_goes_on_knows_what_servers_have_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = Succession.begin(folder, 2)
    assert (first.epochs, first.incarnation) == ([0, 0], 0)
    first.remember(1, 4)
    first.got[1] = ["a", 3]
    first.write()
    second = Succession.begin(folder, 2, incarnation=1)
    assert (second.run, second.got) == (first.run, {1: ["a", 3]})
    assert second.epochs == [1, 6] and second.incarnation == 1
    assert Succession.begin(folder, 3).epochs == [7, 7, 7], "cut anew: above all that ever were"


def test_who_comes_back_or_joins_after_a_restart_is_somebody_new(tmp_path: Path) -> None:
    """A server that was started anew does not know who had joined before."""
    options = {"split": "shared", "discipline": "apply-reply"}
    with cluster(tmp_path, servers=1, workers=1) as made:
        server, _ = configure(made, epoch=1, **options)
        load(server, {1: (200_000, 5)})
        first, again = (server.answer({"ask": "config", "rank": 1}, {})[0] for _ in range(2))
        assert 200_000 < first["incarnation"] < again["incarnation"]
        other, _ = server.answer({"ask": "config", "rank": 0}, {})
        assert other["incarnation"] > 1 << 16, "above any that the life before gave"
        joined = [server.answer({"ask": "config", "join": True}, {})[0]["rank"] for _ in range(2)]
        assert joined == [1002, 1003]


# -- waiting ---------------------------------------------------------------------------------------


def test_a_master_without_servers_gives_up(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1) as made:
        for listener in made.listeners:
            listener.close()
        made.start_timeout_s = 0.3
        with pytest.raises(OffbeatError, match="nobody answers"):
            made.start_master().wait()


def test_a_worker_says_whom_it_waits_for(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=2, workers=2) as made:
        made.start_servers()
        worker = made.start_worker(1)
        wait_until(lambda: worker.lines == ["waiting for the master"], "it says so")


def test_a_worker_says_that_another_server_than_the_first_is_missing(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=2, workers=2) as made:
        made.listeners[1].close()
        made.servers = [made.serve(0, made.listeners[0])]
        wait_until(lambda: 0 in made.bootstraps, "it is there")
        made.listeners[1:] = []
        master = made.start_master()
        wait_until(lambda: made.bootstraps[0].serving is not None, "the run is known")
        server = made.bootstraps[0]
        assert server.serving is not None
        load(server, {})
        worker = made.start_worker(1)
        where = made.hosts.ps[1]
        wait_until(lambda: f"waiting for server 1 at {where}" in worker.lines, "it says so")
        made.listeners.append(made.listen(f"tcp:{where}"))
        made.servers.append(made.serve(1, made.listeners[1]))
        finish(made, master)
        assert "server 1 is here" in worker.lines


def test_a_worker_knows_that_the_run_is_over(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=2, epochs=5) as made:
        made.start_servers()
        worker = made.start_worker(1)
        finish(made, made.start_master())
        assert worker.result.is_over and worker.result.num_steps == 5 * 12


# -- a second master -------------------------------------------------------------------------------


def test_a_master_that_is_refused_disturbs_nobody(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=2, epochs=60, discipline="apply-reply") as made:
        master = made.start_all()
        wait_until(lambda: made.run_dir.exists() and made.num_updates() > 20, "it is under way")
        other = Cluster.__new__(Cluster)
        other.__dict__.update(made.__dict__)
        other.run_dir = tmp_path / "other"
        with pytest.raises(OffbeatError, match="serves another run"):
            other.start_master().wait()
        made.roles = [role for role in made.roles if role.error is None]
        summary = finish(made, master).summary
        joined = [line for line in made.servers[0].lines if "worker 0" in line and "joined" in line]
        assert len(joined) == 1, "rank 0 of the other one never came"
        assert summary["gradients"] == summary["updates"] == 2 * 60 * 12


def test_a_master_is_stopped_while_a_server_is_away(tmp_path: Path) -> None:
    """The first Ctrl-C is enough, though nobody is left who could tell rank 0 that it is over."""
    with cluster(tmp_path, servers=1, workers=1, epochs=500) as made:
        made.start_servers()
        result: list[Any] = []
        stopped = threading.Event()

        def interrupt() -> None:
            wait_until(lambda: made.run_dir.exists() and made.num_updates() > 20, "it is under way")
            made.servers[0].stop.set()
            made.servers[0].wait()
            signal.raise_signal(signal.SIGINT)
            stopped.set()

        helper = threading.Thread(target=interrupt)
        helper.start()
        endpoint = Endpoint(hosts=made.hosts, terms=OPEN, start_timeout_s=600)
        options = {**made.options, "run_dir": str(made.run_dir)}
        result.append(roles.master(endpoint, options, {}, None))
        helper.join(T)
        assert stopped.is_set()
        assert result[0].interrupted


# -- connections that break ------------------------------------------------------------------------


def test_what_is_pushed_again_is_the_same_gradient_and_nothing_counts_as_lost(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"discipline": "apply-reply", "servers": 2, "workers": 1}
    with cluster(tmp_path, **options, epochs=10) as made:
        proxies = [Proxy(address) for address in made.hosts.addresses]
        made.hosts = dataclasses.replace(made.hosts, ps=tuple(p.address[4:] for p in proxies))
        made.start_servers()
        master = made.start_master()
        for number in range(1, 7):
            wait_until(
                lambda n=number: made.run_dir.exists() and made.num_updates() > 40 * n, "so far"
            )
            proxies[number % 2].cut()
        result = finish(made, master)
        there = offbeat.load(result.run_dir)
        for proxy in proxies:
            proxy.close()
    assert result.summary["lost_updates"] == 0, "the servers lived on"
    here = offbeat.train(
        "toy:recipe",
        engine="inproc",
        quiet=True,
        threads=1,
        epochs=10,
        run_dir=tmp_path / "r",
        **options,
    ).state_dict()
    assert all(torch.equal(there[name], tensor) for name, tensor in here.items())


def test_the_others_do_the_work_of_one_who_left(tmp_path: Path) -> None:
    options = {"discipline": "apply-reply", "split": "shared", "epochs": 20}
    with cluster(tmp_path, servers=1, workers=2, **options) as made:
        made.start_servers()
        leaving = made.start_worker(1)
        master = made.start_master()
        wait_until(
            lambda: made.run_dir.exists() and any(w == 1 for _, w, _ in made.applied()), "it works"
        )
        leaving.stop.set()
        assert finish(made, master).summary["updates"] == 2 * 20 * 24


def test_a_loss_that_is_no_number_is_told_to_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise NonFiniteLossError("the loss became nan in worker 1")

    with cluster(tmp_path, servers=1, workers=2) as made:
        server, _ = configure(made)
        load(server, {})
        monkeypatch.setattr(worker.Worker, "run", fail)
        with pytest.raises(NonFiniteLossError):
            made.start_worker(1).wait()
        assert len(server.failures) == 1 and "became nan" in server.failures[0]


# -- the evaluator ---------------------------------------------------------------------------------


def part(version: int | None, over: bool = False) -> tuple[Any, Any]:
    if version is None:
        return {"over": over}, {}
    return {"over": over, "version": version}, {"values": torch.zeros(1)}


def a_source(**options: Any) -> ServersSource:
    """Of a cluster with two servers, who are reached by nothing."""
    nothing: Any = None
    return ServersSource(
        toy_job(servers=2, **options),
        nothing,
        {},
        stop=threading.Event(),
        clock=time.monotonic,
        timeout_s=T,
    )


@pytest.mark.parametrize(
    ("discipline", "first", "second", "version", "is_last"),
    [
        ("sync", [part(8)], [part(8)], 8, False),
        ("sync", [part(8)], [part(9)], None, False),
        ("lock-free", [part(8)], [part(9)], 8, False),
        ("sync", [part(8)], [part(None)], None, False),
        ("sync", [part(None, True)], [part(None, True)], None, True),
        ("apply-reply", [part(8, True)] * 2, [part(9, True)] * 2, 8, True),
        # server 0 was asked before it had the last one
        ("sync", [part(None), part(9, True)], [part(9, True)] * 2, 9, True),
    ],
)
def test_which_checkpoint_an_evaluator_scores(
    discipline: str, first: Any, second: Any, version: int | None, is_last: bool
) -> None:
    answers = {0: list(first), 1: list(second)}
    source = a_source(discipline=discipline)
    source._call = lambda shard, message: answers[shard].pop(0)  # type: ignore[method-assign]
    found, last = source._ask()
    assert (found and found[0], last) == (version, is_last)


def test_what_an_evaluator_is_given_is_the_moving_average(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 1, ema_decay=0.5) as made:
        hand = made.join(0)
        hand.exchange(1.0)
        made.snapshot()
        _, found = made.server.answer({"ask": "newest", "after": -1}, {})
        assert made.shard.ema is not None
        assert found["values"].tolist() == made.shard.ema.tolist() != made.shard.params.tolist()
        hand.link.close()


def test_an_evaluator_passes_over_what_was_pruned(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (folder.checkpoints / "00000007").mkdir(parents=True)
    look = FolderSource(folder, 1, log=logging.Logger("x")).look()
    assert (look.found, look.is_last) == (None, False)


# -- the master ------------------------------------------------------------------------------------


class ServerAhead(ScriptedServer):
    """Has shards as large as the job's."""

    def __init__(self, versions: list[int], version: int, num_elements: int) -> None:
        super().__init__(versions)
        self.version = version
        self.params = torch.zeros(num_elements)

    def call(self, message: Any, tensors: Any, timeout_s: float) -> tuple[Any, Any]:
        answer, found = super().call(message, tensors, timeout_s)
        return answer, {"params": self.params} if found else found


def test_the_last_checkpoint_of_a_resumed_master_is_what_the_servers_have(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    job = toy_job(servers=1, workers=1)
    for versions, version in (([0], 0), ([], 40)):  # the second finds a server that is ahead
        server = ServerAhead(versions, version, job.manifest.num_elements)
        assert run_master(folder, job, [server]) == "finished"
    assert folder.read_json(folder.state)["last_checkpoint"] == "00000040"


def test_a_worker_that_is_silent_is_silent_for_tcp_too(tmp_path: Path) -> None:
    endpoint = Endpoint(
        hosts=Hosts(ps=("127.0.0.1:1",), master="x:1"), terms=Terms(), start_timeout_s=1.0
    )
    nothing: Any = None
    job, folder = toy_job(worker_timeout=7.0), RunFolder(tmp_path)
    mine = Succession.begin(folder, 1)
    network = MasterNetwork(endpoint, job, folder, mine, lambda: 0.0, nothing, None)
    assert network.terms.peer_timeout_s == 7.0


# -- the command -----------------------------------------------------------------------------------


def test_a_process_of_an_engine_does_not_look_at_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TF_VARIABLE, "{")
    monkeypatch.setenv(CONTROL_VARIABLE, "9")
    monkeypatch.setattr(commands, "_role_of_engine", lambda known: 7)
    assert main(["role", "ps", "--run-dir", "r"]) == 7


def test_a_server_never_shows_the_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN)
    file.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
    flags = ["--ps", where, "--worker", "127.0.0.1:1", "--token-file", str(file)]
    assert main(["role", "ps", *flags, "--start-timeout", "0.2"]) == 1
    shown = "".join(capsys.readouterr())
    assert TOKEN.decode() not in shown
    assert f"chmod 600 {file}" in shown and "no master came" in shown


def test_an_evaluator_goes_back_to_what_it_skipped_if_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    model = toy_job().make_model()

    def load(path: Path) -> Any:
        weights = model.module.state_dict()
        return SimpleNamespace(version=int(path.name), state_dict=lambda ema: weights)

    monkeypatch.setattr(evaluator, "load_checkpoint", load)
    for eval_skipped, expected in ((False, [30]), (True, [30, 10, 20])):
        job, folder = toy_job(eval_skipped=eval_skipped), RunFolder(tmp_path)
        for version in (0, 10, 20, 30):
            (folder.checkpoints / f"{version:08}").mkdir(parents=True, exist_ok=True)
        folder.write_state("finished", "00000030")
        source = FolderSource(folder, 5, log=logging.Logger("x"), has_skipped=eval_skipped)
        scored.clear()
        looking_on = Evaluator(
            job,
            model.module,
            source,
            stop=threading.Event(),
            scored=lambda version, metric: scored.append(version),
            warn=lambda line: None,
            clock=time.monotonic,
        )
        looking_on.run()
        assert scored == expected
        assert looking_on.latest is not None and looking_on.latest[0] == 30


# -- what else went unnoticed when it was taken out ------------------------------------------------


def test_a_shards_schedule_is_as_long_as_the_run() -> None:
    job = toy_job(epochs=5)
    assert job.make_shard(0).total_updates == job.facts.total_updates == 2 * 5 * 12
    elastic = make_job(
        make_config({"workers": 3, "split": "shared", "epochs": 5}), toy_recipe(), elastic=True
    )
    assert elastic.facts.elastic and elastic.make_shard(0).total_updates == elastic.budget
    half_way: Any = SimpleNamespace(version=30, applied=lambda: {0: (0, 30)})
    assert elastic.total_updates_after(half_way) == elastic.budget, "whoever made the first half"


def test_a_server_does_not_wait_for_those_who_are_through_but_stays_with_them(
    tmp_path: Path,
) -> None:
    with rig(tmp_path, "sync", 2) as made:
        hand, through = made.join_all(2)
        hand.push(1.0)
        through.exchange(1.0)
        assert hand.reply().version == 1
        hand.push(1.0)
        through.link.finish(1)
        assert hand.reply().version == 2
        assert made.server.ledger.finished == {1} and made.server.ledger.members.keys() == {0, 1}
        through.sequence = 0  # it does again what another server lost
        assert through.exchange(1.0).status == "duplicate"
        hand.link.close()


def test_a_worker_that_was_through_and_comes_again_is_not(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 1) as made:
        made.join(0).link.finish(0)
        wait_until(lambda: made.server.ledger.finished == {0}, "it is through")
        again = made.join(0, incarnation=1)
        assert made.server.ledger.finished == set()
        again.link.close()


class DiesAtLast(ServerAhead):
    """Gone when it is asked for its last snapshot, and back at the next attempt."""

    died = False

    def call(self, message: Any, tensors: Any, timeout_s: float) -> tuple[Any, Any]:
        if message["ask"] == "take" and not self.versions and not self.died:
            self.died = True
            raise ConnectionClosedError("gone")
        return super().call(message, tensors, timeout_s)


class DiesBeforeItIsLetGo(ServerAhead):
    """Gone when it is told that the run is over; its successor is there at the next attempt."""

    num_told = 0

    def call(self, message: Any, tensors: Any, timeout_s: float) -> tuple[Any, Any]:
        if message["ask"] == "finish":
            self.num_told += 1
            if self.num_told == 1:
                raise ConnectionClosedError("gone")
        return super().call(message, tensors, timeout_s)


def test_the_successor_of_a_server_that_died_after_the_last_checkpoint_is_let_go(
    tmp_path: Path,
) -> None:
    """Or it would wait for a shard for ever, and with it all those who look for it."""
    job = toy_job(servers=1, workers=1)
    server = DiesBeforeItIsLetGo([0, 12], 0, job.manifest.num_elements)
    assert run_master(RunFolder(tmp_path), job, [server]) == "finished"
    assert (server.num_told, server.reason) == (2, "the run is finished")


def test_a_server_that_dies_at_the_last_moment_is_asked_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    job = toy_job(servers=1, workers=1)
    server = DiesAtLast([0, 12], 0, job.manifest.num_elements)
    assert run_master(folder, job, [server]) == "finished"
    assert server.died
    assert folder.read_json(folder.state)["last_checkpoint"] == "00000012"


def test_a_master_that_was_never_let_in_lets_nobody_go(tmp_path: Path) -> None:
    asked: list[str] = []

    class Refusing(ScriptedNetwork):
        def connect_for_calls(self, shard: int, *args: Any) -> CallEnd:
            asked.append("connect")
            raise ConnectionClosedError("serves another run", refused=True)

    job = toy_job(servers=1, workers=1)
    with (
        a_master(RunFolder(tmp_path), job, Refusing([])) as master,
        pytest.raises(ConnectionClosedError, match="another run"),
    ):
        master.run()
    assert asked == ["connect"], "it did not come again to end somebody else's run"


def test_an_evaluator_leaves_every_server() -> None:
    asked: list[tuple[int, str]] = []
    source = a_source()

    def ask(shard: int, call: Call) -> tuple[Any, Any]:
        asked.append((shard, call.ask))
        raise ConnectionClosedError("gone already")

    source._call = ask  # type: ignore[method-assign]
    source.leave()
    assert asked == [(0, "leave"), (1, "leave")]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"version": "0.0.1"}, "different versions of Offbeat"),
        ({"run": "other", "fingerprint": "f" * 64}, "they serve different runs"),
    ],
)
def test_servers_that_do_not_fit_together_are_told(
    changes: dict[str, Any],
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    about = {"version": roles.__version__, "torch": "2", "run": "r", "fingerprint": "e" * 64}
    about |= {"recipe": "toy", "updates": 3, "present": [0], "finished": [1]}
    ends = [Scripted((about, {})), Scripted(({**about, **changes}, {}))]
    monkeypatch.setattr(roles, "connect_for_calls", lambda *args: ends.pop(0))
    where = Hosts(ps=("a:1", "b:1"), worker=("c:1",), master="d:1")
    assert roles.check(where, OPEN) == (line is None)
    shown = capsys.readouterr().out
    assert line is None or line in shown
    assert "worker 0  through" in shown


def test_who_is_stopped_while_waiting_was_interrupted() -> None:
    def wait() -> None:
        with roles.console("x") as (_, stop):
            stop.set()
            raise ConnectionClosedError("nobody came")

    with pytest.raises(KeyboardInterrupt):
        wait()


def test_a_token_has_sixteen_characters_at_least() -> None:
    assert load_terms({TOKEN_VARIABLE: "x" * 16}).token == b"x" * 16
    with pytest.raises(ConfigError, match="too short"):
        load_terms({TOKEN_VARIABLE: "x" * 15})
    with pytest.raises(ConfigError, match="it is empty"):
        load_terms({TOKEN_VARIABLE: " "})


def test_an_elastic_run_is_over_when_its_updates_are_in_and_not_before(tmp_path: Path) -> None:
    options = {"workers": 2, "servers": 2, "split": "shared", "epochs": 5}
    job = make_job(make_config(options), toy_recipe(), elastic=True)
    assert job.budget is not None
    said: list[str] = []
    patience = Patience(2, start_s=0.0, absent_s=0.0, say=said.append, now=time.monotonic)
    with a_master(RunFolder(tmp_path), job, ScriptedNetwork([]), patience=patience) as master:
        pass  # it is only asked what it thinks of the servers

    def is_done(first: int, second: int, present: set[int], finished: set[int]) -> bool:
        return master._is_done(
            [
                Status(
                    version=version,
                    epoch=0,
                    loaded=True,
                    finished=frozenset(finished),
                    present=frozenset(present),
                    awaited=frozenset(),
                    ready=False,
                    staleness=[],
                )
                for version in (first, second)
            ]
        )

    whole = job.budget
    assert is_done(whole, whole, {0, 1}, set())
    assert not is_done(whole, whole - 1, {0}, set()), "the other shard follows"
    assert is_done(whole, whole - 1, set(), set()), "unless nobody is left who could push"
    assert not is_done(whole - 1, whole - 1, set(), {0, 1}), "others may come, and join"
