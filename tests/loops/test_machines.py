"""Launched runs whose roles were started by hand: servers that are threads here, and the script of
one of the others."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import Cluster, Role, cluster, collecting
from rig import TOKEN, tls_terms
from torch import nn

import offbeat
from offbeat import place
from offbeat.api import Result
from offbeat.cli import launched, main, roles
from offbeat.cluster.bootstrap import job_from
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.scripts import run_worker_script
from offbeat.errors import ConnectionClosedError, RecipeError, RoleError, StepError
from offbeat.launching import InCluster, launch, relaunch
from offbeat.loops import seat
from offbeat.loops.loop import Loop, StoppedError
from offbeat.report.summary import summarise
from offbeat.roles.calls import Configure
from offbeat.run.events import read_events
from offbeat.scripts import describe_script
from offbeat.transport.security import OPEN, Terms

HEAD = """
import sys
import torch
from torch import nn
import offbeat

torch.manual_seed(offbeat.seed())
model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
optimizer = offbeat.distribute(model, optimizer)
"""
LOOP = """
state = offbeat.State(epoch=0)
print("begins with epoch", state.epoch, flush=True)
generator = torch.Generator().manual_seed(offbeat.rank())
for epoch in range(state.epoch, 3):
    for _ in range(10):
        x = torch.randn(8, 6, generator=generator)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        offbeat.log(loss=loss)
        optimizer.step()
    state.keep(epoch=epoch + 1)
    offbeat.log(accuracy=epoch / 10)
"""
SCRIPT = HEAD + LOOP


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a script's process is changed by."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(seat, "taken", None)
    monkeypatch.setattr(place, "_of_process", [place.Place()])
    yield
    torch.set_num_threads(threads)


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def endpoint_of(made: Cluster) -> Endpoint:
    return Endpoint(hosts=made.hosts, terms=made.terms, start_timeout_s=made.start_timeout_s)


def options_of(made: Cluster, **more: Any) -> dict[str, Any]:
    decided = roles.decided_by(made.hosts, {})
    return {"threads": 1, "run_dir": str(made.run_dir), "worker_timeout": 2.0, **decided, **more}


def run_master(
    made: Cluster,
    text: str,
    say: Callable[[str], None] = lambda line: None,
    stop: threading.Event | None = None,
    **options: Any,
) -> Result:
    """Its script in this thread."""
    script = write(made.folder, text)
    master = InCluster(endpoint_of(made), stop or threading.Event())
    return launch(script, ["--x"], options_of(made, **options), say=say, master=master)


@pytest.mark.parametrize("terms", ["open", "token", "tls"])
def test_a_master_alone_comes_to_what_its_script_alone_does(
    terms: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"open": OPEN, "token": Terms(token=TOKEN)}
    with cluster(tmp_path, servers=2, workers=1, terms=known.get(terms) or tls_terms()) as made:
        made.start_servers()
        said: list[str] = []
        result = run_master(made, SCRIPT + "assert sys.argv[1:] == ['--x']\n", said.append, seed=3)
        for server in made.servers:
            server.wait()
    summary = result.summary
    assert (summary["status"], summary["gradients"], summary["engine"]) == (
        "finished",
        30,
        "cluster",
    )
    assert summary["test_accuracy"] == 0.2 and any("test accuracy 0.2" in line for line in said)
    assert not (made.run_dir / "cluster.json").exists()
    kept = offbeat.load(made.run_dir)
    monkeypatch.setattr(seat, "taken", None)
    found: dict[str, Any] = {}
    exec(SCRIPT.replace("offbeat.seed()", "3"), found)
    for name, tensor in found["model"].state_dict().items():
        assert torch.equal(tensor, kept[name]), name


def test_a_state_is_asked_for_as_often_as_anybody_likes(tmp_path: Path) -> None:
    """Beside the books, which connect to the servers and remember what they got."""
    text = HEAD + (
        "for _ in range(40):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(4, 6)).sum().backward()\n"
        "    optimizer.step()\n"
        "    state = optimizer.state_dict()['state']\n"
        "assert state[0]['step'] == 40\n"
    )
    with cluster(tmp_path, servers=2, workers=1) as made:
        made.start_servers()
        assert run_master(made, text).summary["status"] == "finished"
        for server in made.servers:
            server.wait()


OWN_CLASS = HEAD.replace(
    "torch.optim.AdamW(model.parameters(), lr=0.05)", "Own(model.parameters(), lr=0.05)"
).replace("torch.manual_seed", "class Own(torch.optim.SGD):\n    pass\n\ntorch.manual_seed")


def test_a_server_has_the_class_out_of_its_own_copy_of_the_script(tmp_path: Path) -> None:
    own = tmp_path / "elsewhere"
    own.mkdir()
    with cluster(tmp_path, servers=1, workers=1) as made:
        made.script = write(own, OWN_CLASS + LOOP)
        made.start_servers()
        assert run_master(made, OWN_CLASS + LOOP).summary["gradients"] == 30
        made.servers[0].wait()


def test_a_server_without_the_script_says_how_it_is_started(tmp_path: Path) -> None:
    with cluster(tmp_path, servers=1, workers=1) as made:
        made.start_servers()
        with pytest.raises(RoleError, match=r"offbeat launch --role ps train\.py"):
            run_master(made, OWN_CLASS + LOOP)


class MastersLoop:
    """A master whose loop is driven by a thread of the test: a process has one script."""

    def __init__(self, made: Cluster, num_steps: int) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self._made = made
        self._num_steps = num_steps
        self.role = Role("master", self._run)

    def _run(self, role: Role) -> Result:
        script = write(self._made.folder, SCRIPT)
        master = InCluster(endpoint_of(self._made), role.stop)
        return launch(script, [], options_of(self._made), say=role.lines.append, master=master)

    def instead_of_the_script(self, here: seat.Seat, *_: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loop = Loop(here, model, optimizer)
        with contextlib.closing(loop), contextlib.suppress(StoppedError):
            loop.join()
            self.begun.set()
            for _ in range(self._num_steps):
                model(torch.ones(4, 6)).square().sum().backward()
                loop.step()
            self.may_end.wait(30)
            loop.finish()


@pytest.fixture
def with_a_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Cluster, MastersLoop]]:
    with cluster(tmp_path, servers=2, workers=2) as made:
        made.start_servers()
        loops: list[MastersLoop] = []
        monkeypatch.setattr(
            "offbeat.engines.scripted.run_script",
            lambda *arguments: loops[0].instead_of_the_script(*arguments),
        )
        ready = threading.Event()
        monkeypatch.setattr("offbeat.launching.create_run_folder", _waiting(ready))
        loops.append(MastersLoop(made, 5))
        made.roles.append(loops[0].role)
        ready.set()
        yield made, loops[0]
        loops[0].may_end.set()


def _waiting(ready: threading.Event) -> Callable[..., Any]:
    from offbeat.run.rundir import create_run_folder

    def create(*arguments: Any) -> Any:
        assert ready.wait(30)
        return create_run_folder(*arguments)

    return create


def work(made: Cluster, text: str, stop: threading.Event | None = None) -> list[str]:
    """As worker 1, in this thread; returns its log."""
    script = describe_script(write(made.folder, text, "workers.py"), [])  # the master reads its own
    log = collecting(role := Role("log", lambda role: None))
    stop = stop or threading.Event()
    run_worker_script(endpoint_of(made), 1, script, log=log, stop=stop, local={"threads": 1})
    return role.lines


def test_a_worker_takes_part_and_goes_on_where_it_was(
    with_a_master: tuple[Cluster, MastersLoop], capsys: pytest.CaptureFixture[str]
) -> None:
    made, master = with_a_master
    with pytest.raises(StepError, match=r"at step 20: ValueError: a bad epoch \(workers.py"):
        work(made, SCRIPT + "    if epoch: raise ValueError('a bad epoch')\n")
    assert "ValueError: a bad epoch" in capsys.readouterr().err
    seat.taken = None
    master.may_end.set()
    work(made, SCRIPT)
    assert capsys.readouterr().out == "begins with epoch 2\n"
    result = master.role.wait()
    assert result.summary["status"] == "finished"
    for shard in result.summary["kept"]:
        assert shard["applied"] == shard["gradients"] == 35
    steps = [e["step"] for e in read_events(made.run_dir / "events", "worker-1*")]
    assert sorted(steps) == list(range(1, 31))
    assert not result.test_scores, "a worker's scores are none"


@pytest.mark.slow
def test_a_worker_is_stopped_and_the_others_go_on(
    with_a_master: tuple[Cluster, MastersLoop],
) -> None:
    made, master = with_a_master
    stop = threading.Event()
    threading.Thread(target=lambda: (master.begun.wait(30), stop.set())).start()
    work(made, HEAD + "while True: optimizer.step()\n", stop)
    master.may_end.set()
    assert master.role.wait().summary["status"] == "finished"


def test_a_worker_with_another_model_is_refused(
    with_a_master: tuple[Cluster, MastersLoop],
) -> None:
    made, master = with_a_master
    with pytest.raises(ConnectionClosedError, match=r"0.weight \[5, 6\].*0.weight \[4, 6\]"):
        work(
            made, SCRIPT.replace("Linear(6, 5), nn.BatchNorm1d(5)", "Linear(6, 4), nn.Linear(4, 5)")
        )
    master.role.stop.set()
    master.may_end.set()
    assert master.role.wait().summary["status"] == "interrupted"


def test_ctrl_c_at_the_master_keeps_what_there_is_and_it_goes_on(tmp_path: Path) -> None:
    stop = threading.Event()

    def stop_when_scored(line: str) -> None:
        if "test accuracy" in line:
            stop.set()

    with cluster(tmp_path, servers=2, workers=1) as made:
        made.start_servers()
        text = SCRIPT.replace("range(10)", "range(10 if not epoch else 1000000)")
        result = run_master(made, text, stop_when_scored, stop)
        assert result.interrupted and result.summary["updates"] > 10
        for index in range(2):
            made.servers[index].wait()
            made.servers[index] = made.serve(index, made.listen(f"tcp:{made.hosts.ps[index]}"))
        write(tmp_path, SCRIPT.replace("range(10)", f"range({result.summary['updates']})"))
        seat.taken = None
        master = InCluster(endpoint_of(made), threading.Event())
        said: list[str] = []
        options = {k: v for k, v in options_of(made).items() if k != "run_dir"}
        again = relaunch(made.run_dir, options, say=said.append, master=master)
    assert again.summary["status"] == "finished"
    assert again.summary["updates"] == 10 + 2 * result.summary["updates"]
    assert any("has changed since the start" in line for line in said)


def test_a_script_that_fails_fails_the_run_and_lets_the_servers_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(tmp_path, servers=1, workers=1) as made:
        made.start_servers()
        with pytest.raises(RoleError, match=r"the master failed at step 30: KeyError: 'x'"):
            run_master(made, SCRIPT + "{}['x']\n")
        made.servers[0].wait()
    assert capsys.readouterr().err.count("KeyError") == 1
    assert json.loads((made.run_dir / "summary.json").read_text())["status"] == "failed"


def test_roles_of_recipes_and_of_scripts_do_not_mix(tmp_path: Path) -> None:
    told = Configure(
        run="r",
        life="l",
        config={"recipe": "train.py", "servers": 1},
        facts={},
        agreement={},
        epochs=[0],
        elapsed_s=0.0,
        loop={},
    )
    with pytest.raises(RecipeError, match=r"offbeat launch --role worker train\.py"):
        job_from(told, with_data=True)
    assert Configure.read(told.message(), {}) == told


# -- the command -----------------------------------------------------------------------------------

CLUSTER = ["--ps", "127.0.0.1:7000", "--worker", "a:1,a:2", "--master", "b:1"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (CLUSTER, "which role? ps, master, worker"),
        (["--worker", "4"], "'4' is no address"),
        (["--role", "worker"], "--role belongs to a cluster"),
        (["--index", "1"], "--index belongs to a cluster"),
        (["--token-file", "token.txt"], "--token-file belongs to a cluster"),
        ([*CLUSTER, "--role", "boss"], "unknown role 'boss'"),
        ([*CLUSTER, "--role", "evaluator"], "its script scores itself"),
        ([*CLUSTER, "--role", "worker", "--index", "2"], "there is no worker 2"),
        ([*CLUSTER, "--role", "worker", "--keep", "2"], "--keep is for the master"),
        ([*CLUSTER, "--role", "ps", "--threads", "2"], "--threads is for the master"),
        ([*CLUSTER, "--role", "master", "--bind", "x"], "a master listens nowhere"),
        ([*CLUSTER, "--role", "master", "--journal-dir", "x"], "a master keeps no journal"),
        (["--journal-dir", "x"], "--journal-dir belongs to a cluster"),
        ([*CLUSTER, "--role", "master", "--workers", "7"], "the cluster has 3 workers, not 7"),
        ([*CLUSTER, "--role", "master", "--kill-worker", "1@3"], "needs the engine local"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *flags, write(tmp_path, SCRIPT)]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("kind", "index", "expected"),
    [("chief", 0, ("master",)), ("worker", 1, ("worker", 2)), ("ps", 0, ("ps", 0))],
)
def test_tf_config_says_which_role_it_is(
    kind: str,
    index: int,
    expected: tuple[Any, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {"ps": ["127.0.0.1:7000"], "worker": ["a:1", "a:2"], "chief": ["b:1"]}
    task = {"cluster": addresses, "task": {"type": kind, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    called: list[tuple[Any, ...]] = []
    result = Result(tmp_path, summarised())
    monkeypatch.setattr(launched, "master", lambda *a: called.append(("master",)) or result)
    monkeypatch.setattr(launched, "work", lambda e, rank, *a: called.append(("worker", rank)))
    monkeypatch.setattr(roles, "serve", lambda e, index, **a: called.append(("ps", index)))
    assert main(["launch", write(tmp_path, SCRIPT), "--their", "flags"]) == 0
    assert called == [expected]


def summarised() -> dict[str, Any]:
    known = {"gradients": 1, "total_time_s": 1.0, "test_scores": {}, "staleness": {"mean": None}}
    return {"status": "finished", "rejected": 0, **known}


# -- real processes --------------------------------------------------------------------------------

TIMEOUT_S = 90.0
LONG = SCRIPT.replace("range(state.epoch, 3)", "range(state.epoch, 100)")


class ByHand:
    """Each role started by a command of its own, as on machines of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        write(folder, LONG)
        (folder / "token.txt").write_text("a token that nobody can guess\n")
        (folder / "token.txt").chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        text = f'ps = ["127.0.0.1:{port}"]\nworker = ["a:1"]\nmaster = "b:1"\n'
        (folder / "cluster.toml").write_text(text)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, *flags: str) -> subprocess.Popen[bytes]:
        where = ["--cluster", "cluster.toml", "--token-file", "token.txt", "--role", role]
        with (self.folder / f"{len(self.processes)}-{role}.out").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", "launch", *where, *flags, "train.py"],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.processes.append(process)
        return process

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain until {what}\n{self.text()}"
            threading.Event().wait(0.05)

    def num_steps(self, rank: int) -> int:
        return sum(1 for _ in read_events(self.run_dir / "events", f"worker-{rank}*"))

    def text(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    def codes(self, *processes: subprocess.Popen[bytes]) -> list[int]:
        return [process.wait(TIMEOUT_S) for process in processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def byhand(tmp_path: Path) -> Iterator[ByHand]:
    with contextlib.closing(ByHand(tmp_path)) as made:
        yield made


@pytest.mark.slow
def test_a_worker_that_was_killed_is_started_again_by_hand(byhand: ByHand) -> None:
    server, worker = byhand.start("ps"), byhand.start("worker", "--threads", "1")
    master = byhand.start("master", "--threads", "1", "--run-dir", "run")
    byhand.wait_until(lambda: byhand.num_steps(1) > 50, "it is under way")
    worker.kill()
    worker.wait()
    again = byhand.start("worker", "--threads", "1")
    assert byhand.codes(again, master, server) == [0, 0, 0], byhand.text()
    summary = summarise(byhand.run_dir)
    assert summary["status"] == "finished" and summary["test_accuracy"] == 9.9
    (shard,) = summary["kept"]
    assert shard["applied"] == shard["gradients"] == 2000
    text = byhand.text()
    assert text.count("begins with epoch 0") == 2 and text.count("begins with epoch ") == 3
    assert "Traceback" not in text


@pytest.mark.slow
def test_ctrl_c_at_the_master_ends_everybody_in_order(byhand: ByHand) -> None:
    server, worker = byhand.start("ps"), byhand.start("worker", "--threads", "1")
    master = byhand.start("master", "--threads", "1", "--run-dir", "run")
    byhand.wait_until(lambda: byhand.num_steps(1) > 50, "it is under way")
    os.kill(master.pid, signal.SIGINT)
    assert byhand.codes(master, worker, server) == [130, 0, 0], byhand.text()
    summary = summarise(byhand.run_dir)
    assert summary["status"] == "interrupted" and not summary["not_kept"]
    again = "go on with: offbeat launch --cluster cluster.toml --role master --resume run"
    assert again in byhand.text()
    assert "Traceback" not in byhand.text()
