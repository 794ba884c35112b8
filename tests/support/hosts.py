"""Hosts with addresses of their own: network namespaces, joined by veth pairs and a bridge.

Needs the right to make them: `made` says why it cannot be done where it is missing.
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

from processes import RECIPE_FILE

from offbeat.engines.forkserver import role_environment
from offbeat.report.summary import summarise
from offbeat.run.events import read_events

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
                env=role_environment() | environment,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def text(self) -> str:
        return (self.folder / "out.txt").read_text()


class Net:
    """Servers, workers, a master and an evaluator, each on a host of its own; `workers` beside the
    master."""

    def __init__(
        self,
        folder: Path,
        *,
        servers: int = 2,
        workers: int = 3,
        evaluates: bool = True,
        source: str = RECIPE_FILE,
    ) -> None:
        self.folder = folder
        self._counts = (("ps", servers), ("worker", workers))
        self._bridge = f"ob{secrets.token_hex(2)}"
        names = [f"{kind}-{index}" for kind, count in self._counts for index in range(count)]
        names += ["master"] + ["evaluator"] * evaluates
        self.hosts = {
            name: Host(name, number, self._bridge, folder)
            for number, name in enumerate(names, start=1)
        }
        self.run_dir = self.hosts["master"].folder / "run"
        self.recipes = folder / "recipes.py"
        self.recipes.write_text(source)
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
            for kind, count in self._counts
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
        servers = dict(self._counts)["ps"]
        return {worker: len(seen) // servers for worker, seen in counts.items()}


class NoHostsError(Exception):
    """Why there can be none here."""


@contextlib.contextmanager
def made(net: Net) -> Iterator[Net]:
    """Its hosts are there for as long as the block lasts."""
    if shutil.which("ip") is None:
        raise NoHostsError("there is no ip command here: it comes with iproute2")
    try:
        try:
            net.create()
        except subprocess.CalledProcessError as error:
            why = error.stderr.decode().strip()
            raise NoHostsError(f"no right to make network namespaces here: {why}") from error
        yield net
    finally:
        net.destroy()
