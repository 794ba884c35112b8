"""Ray clusters of several nodes, all of them this machine, and runs on them.

`python rays.py` is a process of its own that has the cluster, so that nothing of it is in the
tests: it writes the address and the nodes as a line of JSON, and obeys lines: add CPUS, kill NODE.
"""

import contextlib
import functools
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from processes import TIMEOUT_S, LocalRun, free_ports, processes

CPUS_EACH = 2
NUM_NODES = 3
SOON_MISSED = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""How soon a cluster notices that a node is gone."""


class RayNodes:
    """The cluster, from the tests' side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.address = ""
        self.nodes: dict[str, int] = {}
        self._odd: set[str] = set()
        self._read()

    def add(self, num_cpus: int = CPUS_EACH) -> str:
        """One more node; those of another size are there until `heal`."""
        before = set(self.nodes)
        self._say(f"add {num_cpus}")
        (added,) = set(self.nodes) - before
        self._odd |= {added} if num_cpus != CPUS_EACH else set()
        return added

    def kill(self, node: str) -> None:
        """The node's raylet, by SIGKILL: its actors die with it. Returns when that was noticed."""
        self._say(f"kill {node}")

    def heal(self) -> None:
        """Have the same nodes as in the beginning, or such as these."""
        for node in self._odd & set(self.nodes):
            self.kill(node)
        while len(self.nodes) < NUM_NODES:
            self.add()

    @contextlib.contextmanager
    def apart(self, folder: Path) -> Iterator[None]:
        """One more node, to which something else lies where this folder is."""
        start = f"ray start --address {self.address} --num-cpus {CPUS_EACH} --block"
        ray = shlex.quote(str(Path(sys.executable).parent)) + "/" + start
        command = f"mount -t tmpfs none {shlex.quote(str(folder))} && exec {ray}"
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._say("count 2")
            yield
        finally:
            process.terminate()  # it ends what it has started
            process.wait(30)

    def head(self) -> str:
        return next(iter(self.nodes))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.address, self.nodes = told["address"], told["nodes"]


@contextlib.contextmanager
def taking_jobs() -> Iterator[Mapping[str, str]]:
    """A cluster of one node to which jobs can be submitted by whoever has this in its environment;
    what is installed with this Python comes first there."""
    port, dashboard, agent = free_ports(3)
    start = ["ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus", "4"]
    start += ["--port", str(port), "--dashboard-port", str(dashboard)]
    start += ["--dashboard-agent-listen-port", str(agent)]
    address = f"http://127.0.0.1:{dashboard}"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_API_SERVER_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
    }
    process = subprocess.Popen(
        start,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: _takes_jobs(address), "jobs are taken")
        yield environment
    finally:
        process.terminate()  # it ends what it has started
        process.wait(TIMEOUT_S)


def _takes_jobs(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/api/jobs/", timeout=5).close()
    except urllib.error.HTTPError as error:
        return error.code == HTTPStatus.UNAUTHORIZED  # it answers those who show the token
    except OSError:
        return False
    return True


class RayRun(LocalRun):
    """`offbeat train --engine ray`, with its output and its roles' processes, among which there is
    an evaluator only where `flags` say so: each of them takes seconds to start."""

    def __init__(self, folder: Path, nodes: RayNodes, *flags: str, **more: Any) -> None:
        where = ("--engine", "ray", "--ray-address", nodes.address, "--eval-every", "0")
        super().__init__(folder, *where, *flags, **more)

    def placed(self) -> dict[str, dict[str, Any]]:
        """Where each role is, or was last: by its name."""
        found = {}
        for event in self.events("run"):
            if event["phase"] == "placed":
                found[f"{event['role']}-{event['index']}"] = event
        return found

    def pids(self, role: str = "") -> list[int]:
        return [event["pid"] for name, event in self.placed().items() if name.startswith(role)]

    def wait_until_placed(self, *names: str) -> None:
        self.wait_until(lambda: set(names) <= set(self.placed()), f"{names} were placed")


def actors() -> list[int]:
    """Processes of roles, of any run."""
    return [pid for pid, _, command in processes() if command.startswith("ray::RoleActor")]


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def _serve() -> None:
    import logging

    from ray.cluster_utils import Cluster

    logging.disable(logging.CRITICAL)
    quiet = {"include_dashboard": False, "object_store_memory": 100 << 20}
    head = {"num_cpus": CPUS_EACH, **quiet, "_system_config": SOON_MISSED}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {cluster.head_node.node_id: cluster.head_node}

    def add(num_cpus: int) -> None:
        node = cluster.add_node(num_cpus=num_cpus, object_store_memory=100 << 20)
        nodes[node.node_id] = node

    def tell() -> None:
        known = {name: _raylet(node) for name, node in nodes.items()}
        print(json.dumps({"address": cluster.address, "nodes": known}), flush=True)

    sys.stdout, stdout = sys.stderr, sys.stdout
    for _ in range(NUM_NODES - 1):
        add(CPUS_EACH)
    cluster.wait_for_nodes()
    sys.stdout = stdout
    tell()
    for line in sys.stdin:
        sys.stdout = sys.stderr
        verb, _, name = line.strip().partition(" ")
        if verb == "add":
            add(int(name))
        elif verb == "count":
            wait_for(functools.partial(_has, cluster, int(name)), "it came")
        else:
            os.kill(_raylet(nodes[name]), signal.SIGKILL)
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
            wait_for(functools.partial(_lacks, cluster, name), "its death was noticed")
        sys.stdout = stdout
        tell()
    cluster.shutdown()


def _has(cluster: Any, count: int) -> bool:
    return sum(node["Alive"] for node in cluster.global_state.node_table()) >= count


def _lacks(cluster: Any, name: str) -> bool:
    table = cluster.global_state.node_table()
    return not any(node["Alive"] for node in table if node["NodeID"] == name)


def _raylet(node: Any) -> int:
    (process,) = node.all_processes["raylet"]
    return int(process.process.pid)


if __name__ == "__main__":
    _serve()
