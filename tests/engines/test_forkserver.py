"""The fork server: its children are like processes that were started anew, and it may die."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import LocalRun, children, leftovers, processes, wait_until_gone

import offbeat
from offbeat.cli import main
from offbeat.engines import forking, forkserver
from offbeat.engines.forkserver import Forked, ForkServer, fork_server, role_environment

TIMEOUT_S = 60.0

PROBE = """
import json, os, random, socket, sys
import numpy as np
import torch
fds = {}
for number in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{number}"):  # not the one that listdir had open
        fds[number] = os.readlink(f"/proc/self/fd/{number}")
blas = np.ones((400, 400)) @ np.ones((400, 400))
torch.set_num_threads(2)
convolution = torch.nn.Conv2d(3, 16, 5)
convolution(torch.randn(32, 3, 32, 32)).sum().backward()
found = {
    "fds": fds,
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "path": sys.path,
    "argv": sys.argv,
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
    "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    "blas": float(blas.mean()),
    "gradient": float(convolution.bias.grad.mean()),
    "main": sys.modules["__main__"].__spec__.name,
}
print(json.dumps(found), end="")
socket.socket(fileno=int(os.environ["OFFBEAT_CONTROL_FD"])).recv(1)
"""


class Child:
    """A process of `offbeat COMMAND` with a line, a log, and descriptors to pass on."""

    def __init__(self, server: ForkServer, folder: Path, *command: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.command = command
        self.line, theirs = socket.socketpair()
        data = os.open(folder / "data", os.O_CREAT | os.O_RDWR)
        lock = os.open(folder, os.O_RDONLY)
        with theirs, self.log.open("wb") as log:
            given = (theirs.fileno(), data, lock, log.fileno(), log.fileno())
            self.running = server.spawn(command, role_environment(), given)
        os.close(data)
        os.close(lock)

    @property
    def forked(self) -> Forked:
        assert self.running is not None
        return self.running

    def tell(self) -> dict[str, Any]:
        """What the probe found, which then waits for its line to break."""
        wait_for(lambda: self.log.read_text().endswith("}"), self.log.read_text)
        found: dict[str, Any] = json.loads(self.log.read_text())
        return found

    def end(self) -> int | None:
        self.line.close()
        return self.forked.wait(TIMEOUT_S)


Start = Callable[..., Child]


@pytest.fixture(scope="module")
def shared() -> Iterator[ForkServer]:
    with contextlib.closing(ForkServer()) as server:
        yield server


@pytest.fixture
def own() -> Iterator[ForkServer]:
    """For a test that does harm to it."""
    with contextlib.closing(ForkServer()) as server:
        yield server


@pytest.fixture
def start(tmp_path: Path, shared: ForkServer) -> Iterator[Start]:
    started: list[Child] = []

    def start(*command: str, server: ForkServer = shared) -> Child:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        (folder / "probe.py").write_text(PROBE)
        probe = ("train", "--engine", "inproc", "--recipe", f"{folder}/probe.py:recipe")
        started.append(Child(server, folder, *(command or probe)))
        return started[-1]

    yield start
    for child in started:
        child.line.close()
        if child.running is not None:
            child.running.kill()
            child.running.wait(TIMEOUT_S)


def wait_for(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.01)


def pid_of(server: ForkServer) -> int:
    assert server._process is not None
    return server._process.pid


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


# -- children --------------------------------------------------------------------------------------


def test_a_child_prints_to_its_log_and_its_exit_code_is_told(start: Start) -> None:
    done, wrong = start("token"), start("train", "--worker", "2")
    assert (done.end(), wrong.end()) == (0, 2)
    assert len(done.log.read_text()) > 40
    assert "did you mean '--workers'?" in wrong.log.read_text()
    assert done.forked.wait(0) == 0, "as often as one likes"
    done.forked.kill()


def test_a_child_that_was_killed_has_the_signal_for_a_code(start: Start) -> None:
    child = start()
    child.tell()
    with pytest.raises(subprocess.TimeoutExpired):
        child.forked.wait(0.01)
    child.forked.kill()
    assert child.forked.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_child_finds_what_a_process_that_was_started_anew_would(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("token").end()  # by now the fork server has been there for some time
    monkeypatch.setenv("SAID", "later \udce4")
    monkeypatch.delenv("PATH")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    expected = role_environment()
    child = start()
    found = child.tell()
    fds = {int(number): Path(path).name for number, path in found["fds"].items()}
    assert {fds.pop(number) for number in (1, 2)} == {"log"}, "its standard output and error"
    assert fds.pop(0) == "null"
    own = {int(found["environment"].pop(f"OFFBEAT_{name}_FD")) for name in ("CONTROL", "DATA")}
    names = sorted(name.partition(":")[0] for name in fds.values())
    assert names == [child.folder.name, "data", "socket"], "and nothing of anybody else's"
    assert own < set(fds)
    assert found["environment"] == expected
    assert found["folder"] == str(tmp_path)
    recipes, *path = found["path"]
    assert recipes == str(child.folder), "as for every recipe that is a file"
    assert path == [str(tmp_path), *expected["PYTHONPATH"].split(":")]
    assert found["argv"][1:] == list(child.command)
    assert found["main"] == "offbeat.__main__"
    assert found["leads"], "no Ctrl-C of the terminal's reaches it"
    assert command_line(child.forked.pid)[1:] == ["-m", "offbeat", *child.command]


def test_children_compute_with_threads_and_draw_their_own_numbers(start: Start) -> None:
    found = [start().tell() for _ in range(2)]
    for one in found:
        assert (one["blas"], one["gradient"]) == (400.0, 32 * 28 * 28)
    (python, numpy, by_torch), (other_python, other_numpy, other_torch) = (
        one["drawn"] for one in found
    )
    assert python != other_python and numpy != other_numpy
    assert by_torch == other_torch, "torch's generator begins alike in every process"


def test_an_answer_that_ctrl_c_kept_from_being_heard_is_passed_over(
    start: Start, shared: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    assert start("token").end() == 0
    with monkeypatch.context() as patch:
        patch.setattr(shared, "_hear", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shared.look_at(os.getpid())
    assert start("token").end() == 0


# -- the fork server's own end ---------------------------------------------------------------------


@pytest.mark.slow
def test_children_outlive_a_fork_server_and_another_one_takes_its_place(
    start: Start, own: ForkServer
) -> None:
    child = start(server=own)
    child.tell()
    first = pid_of(own)
    assert command_line(first)[2:] == ["offbeat", "role", "fork-server"]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        child.forked.wait(0.01)
    other = start(server=own)
    other.tell()
    assert (child.end(), other.end()) == (None, 2), "the first one's code is nobody's to know"
    os.kill(pid_of(own), signal.SIGKILL)
    assert start(server=own).running is None, "whoever dies twice dies again"
    assert own.why_not


def test_a_child_of_a_fork_server_that_is_gone_can_be_killed(start: Start, own: ForkServer) -> None:
    child = start(server=own)
    child.tell()
    own.close()
    child.forked.kill()
    assert child.forked.wait(TIMEOUT_S) is None
    assert start(server=own).running is None


@pytest.mark.slow
def test_a_fork_server_that_hangs_is_replaced(
    start: Start, own: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start("token", server=own).end() == 0
    first = pid_of(own)
    monkeypatch.setattr(forkserver, "ASK_TIMEOUT_S", 0.1)
    os.kill(first, signal.SIGSTOP)
    assert start("token", server=own).running is None
    assert "does not answer" in own.why_not
    monkeypatch.undo()
    assert first not in children("fork-server")
    assert start("token", server=own).end() == 0


@pytest.mark.slow
def test_threads_that_do_not_end_for_a_fork_make_it_unfit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run is started without it, as its logs tell."""
    thread = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    (tmp_path / "sitecustomize.py").write_text(thread)
    (tmp_path / "own.py").write_text("from helpers import toy_recipe\nrecipe = toy_recipe()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"engine": "local", "steps": 2, "quiet": True, "device": "cpu"}
    result = offbeat.train("own:recipe", run_dir=str(tmp_path / "run"), **options)
    assert result.summary["gradients"] == 4
    logs = [path.read_text() for path in (tmp_path / "run" / "logs").iterdir()]
    line = "not forked by the fork server: importing torch gave it 2 threads"
    assert len(logs) == 4 and all(log.startswith(line) for log in logs)


def test_a_fork_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    assert "cannot fork" in forking._fork()["failed"]


def test_where_it_cannot_be_started_it_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with contextlib.closing(ForkServer()) as server:
        assert start("token", server=server).running is None
        assert "cannot be started" in server.why_not


def test_there_is_one_only_where_it_is_of_use(
    own: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fork_server("inproc") as none, fork_server("local", own) as given:
        assert (none, given) == (None, own)
    with fork_server("auto") as made:
        assert made is not None, "it may mean local, and there is no time to lose"
    monkeypatch.setattr(forkserver, "CAN_FORK", False)
    with fork_server("local") as none:
        assert none is None


def test_a_command_that_fails_before_its_run_leaves_no_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = children("fork-server")
    assert main(["train", "--recipe", "no_such_module:recipe"]) == 2
    assert main(["train", "--resume", "no-such-run"]) == 2
    assert main(["compare", "--recipe", "no_such_module:recipe"]) == 2
    assert children("fork-server") == before
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_fork_server_is_no_role_that_a_person_could_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["role", "fork-server", "--ps", "127.0.0.1:1", "--worker", "127.0.0.1:2"]) == 2
    assert "unknown role 'fork-server'" in capsys.readouterr().err


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    runs: list[LocalRun] = []

    def run(*flags: str) -> LocalRun:
        runs.append(LocalRun(tmp_path, *flags))
        return runs[-1]

    yield run
    for one in runs:
        one.close()
        for pid in one.pids():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_whose_fork_server_is_killed_ends_well(run: Callable[..., LocalRun]) -> None:
    """Also where nobody may be started again: who leaves in order says so."""
    going = run("--steps", "2000", "--max-restarts", "0")
    going.wait_for_steps(10)
    (pid,) = children("fork-server", going.process.pid)
    os.kill(pid, signal.SIGKILL)
    assert going.wait() == 0, going.text()
    assert going.summary()["restarts"] == 0
    assert leftovers(going.run_dir) == []


@pytest.mark.slow
def test_who_dies_after_the_fork_server_is_started_again(run: Callable[..., LocalRun]) -> None:
    going = run("--steps", "4000")
    going.wait_for_steps(100)
    (first,) = children("fork-server", going.process.pid)
    os.kill(first, signal.SIGKILL)
    going.kill("worker --index 1")
    assert going.wait() == 0, going.text()
    assert "worker 1 is gone, as is the fork server" in going.text()
    assert going.summary()["restarts"] == 1 and going.incarnations(1) == 2


@pytest.mark.slow
def test_a_fork_server_leaves_with_the_launcher(run: Callable[..., LocalRun]) -> None:
    going = run("--steps", "20000")
    going.wait_for_steps(10)
    (pid,) = children("fork-server", going.process.pid)
    going.process.kill()
    going.process.wait()
    wait_for(lambda: pid not in [p for p, _, _ in processes()], lambda: "it is still there")
    wait_until_gone(going.run_dir)
