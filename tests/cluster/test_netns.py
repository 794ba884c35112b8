"""Hosts with addresses of their own: network namespaces, joined by veth pairs and a bridge.

Needs the right to make them; skipped with a plain message where it is missing.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import DROPPING
from processes import RECIPE_FILE

import offbeat
from offbeat.config import DISCIPLINES
from offbeat.report.summary import summarise
from offbeat.run.events import read_events

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
PORT = 7000
NETWORK = "10.213.77"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Host:
    """A machine: a namespace with one address, and a folder."""

    def __init__(self, name: str, number: int, prefix: str, folder: Path) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.folder = folder / name
        self.folder.mkdir()
        self._space = f"{prefix}-{name}"
        self._plug = f"{prefix[:6]}{number}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.helpers: list[subprocess.Popen[bytes]] = []
        """Those that do not end by themselves."""

    def create(self, bridge: str) -> None:
        ip("netns", "add", self._space)
        ip("link", "add", self._plug, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        ip("link", "set", self._plug, "master", bridge, "up")
        ip("-n", self._space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self._space, "link", "set", "eth0", "up")
        ip("-n", self._space, "link", "set", "lo", "up")

    def destroy(self) -> None:
        for process in self.processes + self.helpers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=20)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self._space)

    def set_link(self, up: bool) -> None:
        """Pull the plug, or put it back: nobody is told."""
        ip("link", "set", self._plug, "up" if up else "down")

    def limit(self, rate: str) -> None:
        """Both ways."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "300ms"]
        for where in (
            ["tc", "qdisc", "add", "dev", self._plug],
            ["ip", "netns", "exec", self._space, "tc", "qdisc", "add", "dev", "eth0"],
        ):
            subprocess.run([*where, *shape], check=True, capture_output=True, timeout=20)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        output = (self.folder / "out.txt").open("ab")
        with output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._space, sys.executable, *arguments],
                cwd=self.folder,
                stdin=subprocess.PIPE,  # a link ends with it
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def text(self) -> str:
        return (self.folder / "out.txt").read_text()


class Net:
    """2 servers, 3 workers, a master and an evaluator, each on a host of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bridge = f"ob{secrets.token_hex(2)}"
        names = ["ps-0", "ps-1", "master", "worker-0", "worker-1", "worker-2", "evaluator"]
        self.hosts = {
            name: Host(name, number, self._bridge, folder)
            for number, name in enumerate(names, start=1)
        }
        self.run_dir = self.hosts["master"].folder / "run"
        self.recipes = folder / "recipes.py"
        self.recipes.write_text(RECIPE_FILE)
        self.token = secrets.token_urlsafe(32)
        self.serve_port = PORT
        """Where servers listen; others come to PORT."""

    def create(self) -> None:
        ip("link", "add", self._bridge, "type", "bridge")
        ip("link", "set", self._bridge, "up")
        for host in self.hosts.values():
            host.create(self._bridge)

    def destroy(self) -> None:
        for host in self.hosts.values():
            host.destroy()
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", self._bridge)

    def role(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        host = self.hosts[name]
        role, _, index = name.partition("-")
        file = host.folder / "cluster.toml"
        servers, workers = (
            [f"{self.hosts[f'{kind}-{i}'].address}:{PORT}" for i in range(count)]
            for kind, count in (("ps", 2), ("worker", 3))
        )
        file.write_text(
            f'ps = {servers}\nworker = {workers}\nmaster = "{self.hosts["master"].address}:1"\n'
        )
        command = ["-m", "offbeat", "role", role, "--index", index or "0", "--cluster", str(file)]
        if role == "ps" and self.serve_port != PORT:
            command += ["--bind", f"{host.address}:{self.serve_port}"]
        if role in ("worker", "evaluator"):
            command += ["--device", "cpu"]
        if role == "worker":
            command += ["--threads", "1"]
        return host.start(*command, *flags, OFFBEAT_TOKEN=self.token)

    def start(self, *flags: str, recipe: str = "recipe") -> None:
        for name in self.hosts:
            if name != "master":
                self.role(name)
        options = ["--recipe", f"{self.recipes}:{recipe}", "--run-dir", "run", "--threads", "1"]
        self.role("master", *options, "--device", "cpu", *flags)

    def wait_for_pushes(self, count: int) -> None:
        self.wait_until(lambda: self.num_pushes() >= count, f"{count} pushes")

    def num_pushes(self) -> int:
        return sum(event["kind"] == "push" for event in read_events(self.run_dir / "events"))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.text()}"
            threading.Event().wait(0.1)

    def wait(self, *but: str) -> dict[str, Any]:
        """Everybody ends by himself, and well."""
        for name, host in self.hosts.items():
            if name not in but:
                (process,) = host.processes
                try:
                    assert process.wait(TIMEOUT_S) == 0, f"{name}\n{self.text()}"
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"{name} does not end\n{self.text()}") from None
        return summarise(self.run_dir)

    def text(self) -> str:
        return "\n".join(f"--- {name}\n{host.text()}" for name, host in self.hosts.items())

    def check_applied_once(self) -> dict[int, int]:
        """How many gradients of each worker are in every shard."""
        counts: dict[int, set[tuple[int, int]]] = {}
        for event in read_events(self.run_dir / "events"):
            if event["kind"] == "push" and event["outcome"] == "applied":
                seen = counts.setdefault(event["worker"], set())
                key = (event["shard"], event["sequence"])
                assert key not in seen, "applied twice"
                seen.add(key)
        return {worker: len(seen) // 2 for worker, seen in counts.items()}


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command here: it comes with iproute2")
    made = Net(tmp_path)
    try:
        try:
            made.create()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no right to make network namespaces here: {error.stderr.decode()}")
        yield made
    finally:
        made.destroy()


def one_machine(folder: Path, discipline: str, recipes: Path, *, epochs: int) -> float:
    """What the same recipe reaches with as many workers in one process."""
    result = offbeat.train(
        f"{recipes}:recipe",
        discipline=discipline,
        workers=4,
        servers=2,
        epochs=epochs,
        engine="inproc",
        quiet=True,
        device="cpu",
        run_dir=folder / "here",
    )
    return result.test_accuracy or 0.0


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_each_discipline_trains_on_hosts_of_their_own(discipline: str, net: Net) -> None:
    net.start("--discipline", discipline, "--epochs", "60", "--checkpoint-every", "100")
    summary = net.wait()
    assert summary["status"] == "finished"
    in_all = net.check_applied_once()
    assert discipline in DROPPING or in_all == dict.fromkeys(range(4), 60 * 6)
    here = one_machine(net.folder, discipline, net.recipes, epochs=60)
    assert abs(summary["test_accuracy"] - here) <= 0.05 and here > 0.85
    assert "precision @ 1" in net.hosts["evaluator"].text()
    for name, host in net.hosts.items():
        made = {path.name for path in host.folder.iterdir()} - {"out.txt", "cluster.toml"}
        assert made == ({"run"} if name == "master" else set()), "the run's folder is the master's"
        assert net.token not in host.text()
    for path in net.run_dir.rglob("*"):
        assert path.is_dir() or net.token.encode() not in path.read_bytes()


@pytest.mark.parametrize("discipline", ["sync", "apply-reply"])
def test_a_link_that_is_down_for_5_s(discipline: str, net: Net) -> None:
    net.start("--discipline", discipline, "--epochs", "1000", "--eval-every", "2000")
    net.wait_for_pushes(200)
    host = net.hosts["worker-1"]
    host.set_link(False)
    began_s = time.monotonic()
    net.wait_until(lambda: time.monotonic() - began_s > 5, "5 s")
    host.set_link(True)
    summary = net.wait()
    assert summary["status"] == "finished"
    assert net.check_applied_once() == dict.fromkeys(range(4), 6000), "nobody lost anything"


@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_a_link_that_is_down_for_good(discipline: str, net: Net) -> None:
    flags = ["--discipline", discipline, "--epochs", "1000", "--worker-timeout", "3"]
    net.start(*flags, "--eval-every", "2000")
    net.wait_for_pushes(200)
    net.hosts["worker-1"].set_link(False)
    summary = net.wait("worker-1")
    assert summary["status"] == "finished"
    counts = net.check_applied_once()
    assert [counts[rank] for rank in (0, 1, 3)] == [6000] * 3 and 0 < counts[2] < 6000
    assert "worker 2 is gone" in net.hosts["master"].text()


def test_100_megabits(net: Net) -> None:
    for host in net.hosts.values():
        host.limit("100mbit")
    net.start("--discipline", "lock-free", "--epochs", "30", recipe="wide")
    summary = net.wait()
    assert summary["status"] == "finished"
    assert net.check_applied_once() == dict.fromkeys(range(4), 30 * 6)


def test_100_ms_of_latency(net: Net) -> None:
    net.serve_port = PORT + 1
    for name in ("ps-0", "ps-1"):
        host = net.hosts[name]
        there = f"{host.address}:{PORT + 1}"
        host.start("-m", "offbeat.bench.link", there, "--at", str(PORT), "--delay-ms", "50")
        host.helpers.append(host.processes.pop())
    net.start("--discipline", "apply-reply", "--epochs", "10")
    summary = net.wait()
    assert summary["status"] == "finished"
    assert net.check_applied_once() == dict.fromkeys(range(4), 60)
    exchanges = [worker["exchange_s"] / worker["gradients"] for worker in summary["workers"]]
    assert min(exchanges) > 0.09, "the latency was there"


def test_the_hosts_are_apart(net: Net) -> None:
    """A token is asked for, whoever comes from another machine."""
    net.role("ps-0")
    first = net.hosts["ps-0"]
    net.wait_until(lambda: "listens at" in first.text(), "the server")
    stranger = net.hosts["worker-0"]
    flags = ["--ps", f"{first.address}:{PORT}", "--worker", "a:1,b:2"]
    process = stranger.start("-m", "offbeat", "role", "worker", "--index", "1", *flags)
    assert process.wait(TIMEOUT_S) == 1
    assert "asks for a token" in stranger.text()
