"""Roles by address as real processes: the master's death, Ctrl-C, and a worker that comes back."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import RECIPE_FILE

from offbeat.report.summary import summarise
from offbeat.run.events import read_events

TIMEOUT_S = 90.0


class ByHand:
    """One server, a master and one worker, each started by its own command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        (folder / "recipes.py").write_text(RECIPE_FILE)
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        self._hosts = ["--ps", f"127.0.0.1:{port}", "--worker", "a:1", "--master", "b:1"]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start_command(*arguments, *self._hosts)

    def start_command(self, *arguments: str, **more: str) -> subprocess.Popen[bytes]:
        """`more`: of its environment."""
        with (self.folder / f"{len(self.processes)}-{arguments[0]}.out").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", "role", *arguments],
                cwd=self.folder,
                env={**os.environ, **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.processes.append(process)
        return process

    def start_master(self, *flags: str) -> subprocess.Popen[bytes]:
        options = ["--recipe", "recipes.py:momentum", "--run-dir", "run", "--threads", "1"]
        return self.start("master", *options, *flags)

    def num_pushes(self) -> int:
        return sum(event["kind"] == "push" for event in read_events(self.run_dir / "events"))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain until {what}\n{self.text()}"
            threading.Event().wait(0.05)

    def text(self) -> str:
        files = sorted(self.folder.glob("*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in files)

    def codes(self, *processes: subprocess.Popen[bytes]) -> list[int]:
        return [process.wait(TIMEOUT_S) for process in processes]

    def applied(self) -> Counter[tuple[int, int]]:
        return Counter(
            (event["worker"], event["sequence"])
            for event in read_events(self.run_dir / "events")
            if event["kind"] == "push" and event["outcome"] == "applied"
        )

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def byhand(tmp_path: Path) -> Iterator[ByHand]:
    with contextlib.closing(ByHand(tmp_path)) as made:
        yield made


@pytest.mark.slow
def test_ctrl_c_at_the_master_ends_the_run_in_order(byhand: ByHand) -> None:
    server, worker = byhand.start("ps"), byhand.start("worker", "--threads", "1")
    master = byhand.start_master("--epochs", "100000")
    byhand.wait_until(lambda: byhand.num_pushes() > 50, "it is under way")
    os.kill(master.pid, signal.SIGINT)
    assert byhand.codes(master, worker, server) == [130, 0, 0], byhand.text()
    summary = summarise(byhand.run_dir)
    assert summary["status"] == "interrupted" and summary["updates"] > 50
    assert "Traceback" not in byhand.text()


@pytest.mark.slow
def test_a_master_that_was_killed_is_resumed(byhand: ByHand) -> None:
    server, worker = byhand.start("ps"), byhand.start("worker", "--threads", "1")
    master = byhand.start_master("--epochs", "400", "--checkpoint-every", "200")
    byhand.wait_until(lambda: byhand.num_pushes() > 300, "it is under way")
    master.kill()
    master.wait()
    again = byhand.start("master", "--resume", "run", "--threads", "1")
    assert byhand.codes(again, worker, server) == [0, 0, 0], byhand.text()
    summary = summarise(byhand.run_dir)
    assert summary["status"] == "finished" and summary["updates"] == 2 * 400 * 12
    assert summary["test_accuracy"] > 0.85
    assert max(byhand.applied().values()) == 1, "something was applied twice"


@pytest.mark.slow
def test_a_worker_that_was_killed_comes_back_and_goes_on(byhand: ByHand) -> None:
    server, worker = byhand.start("ps"), byhand.start("worker", "--threads", "1")
    master = byhand.start_master("--epochs", "400")
    byhand.wait_until(lambda: byhand.num_pushes() > 300, "it is under way")
    worker.kill()
    worker.wait()
    again = byhand.start("worker", "--threads", "1")
    assert byhand.codes(again, master, server) == [0, 0, 0], byhand.text()
    applied = byhand.applied()
    assert set(applied) == {(w, n) for w in (0, 1) for n in range(1, 4801)}
    assert set(applied.values()) == {1}


@pytest.mark.slow
def test_a_server_that_was_stopped_and_started_again(byhand: ByHand) -> None:
    server, worker = byhand.start("ps"), byhand.start("worker", "--threads", "1")
    slowly = ("--epochs", "150", "--slow-worker", "0:20x,1:20x")  # longer than a server stays
    master = byhand.start_master(*slowly, "--checkpoint-every", "50")
    byhand.wait_until(lambda: byhand.num_pushes() > 300, "it is under way")
    os.kill(server.pid, signal.SIGINT)
    assert byhand.codes(server) == [130], byhand.text()
    again = byhand.start("ps")
    assert byhand.codes(master, worker, again) == [0, 0, 0], byhand.text()
    summary = summarise(byhand.run_dir)
    assert summary["status"] == "finished" and summary["test_accuracy"] > 0.85


TRAINS = ["--recipe", "recipes.py:momentum", "--run-dir", "run", "--threads", "1", "--epochs", "20"]


def finished(byhand: ByHand, *, workers: int) -> None:
    assert byhand.codes(*byhand.processes) == [0] * len(byhand.processes), byhand.text()
    summary = summarise(byhand.run_dir)
    assert summary["status"] == "finished" and len(summary["workers"]) == workers
    assert "Traceback" not in byhand.text()


@pytest.mark.slow
def test_the_tasks_of_a_slurm_step_are_one_run(byhand: ByHand) -> None:
    """Each started by the same command, as srun does; two servers, a master and two workers."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": "5"}
    for task in range(5):
        flags = ["--servers", "2", "--port", port, *TRAINS]
        byhand.start_command("auto", *flags, **step, SLURM_PROCID=str(task))
    finished(byhand, workers=3)


@pytest.mark.slow
def test_pods_are_one_run(byhand: ByHand) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    known = {"OFFBEAT_PS": f"127.0.0.1:{port}", "OFFBEAT_NUM_WORKERS": "2"}
    byhand.start_command("auto", **known, OFFBEAT_ROLE="ps", HOSTNAME="offbeat-ps-0")
    for index in "01":
        byhand.start_command("auto", **known, OFFBEAT_ROLE="worker", JOB_COMPLETION_INDEX=index)
    byhand.start_command("auto", *TRAINS, **known, OFFBEAT_ROLE="master", HOSTNAME="m-x7k2p")
    finished(byhand, workers=3)
