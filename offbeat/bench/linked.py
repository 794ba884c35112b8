"""One run whose server is at the other end of a slow link.

It is the engine `local` with all that it has, but that master and workers reach the server through
bench/link.py. What crosses the link is what would cross it in a cluster: gradients, replies,
heartbeats, and the checkpoints that the master asks for.
"""

import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.bench.cells import Network
from offbeat.bench.processes import TIMEOUT_S
from offbeat.config import TrainConfig
from offbeat.engines.forkserver import ForkServer
from offbeat.engines.local import LocalEngine
from offbeat.errors import NonFiniteLossError, RunError
from offbeat.recipes.base import directions, load_recipe, metric_name
from offbeat.report.record import Record, read_run
from offbeat.report.summary import summarise
from offbeat.run.addresses import Cluster
from offbeat.run.job import Job
from offbeat.run.making import make_job
from offbeat.run.progress import make_display
from offbeat.run.rundir import RunFolder, create_run_folder, describe_run

HOST = "127.0.0.1"
BEYOND = "beyond the link"
"""The machine that the server seems to be on."""
MOST_S = 120.0
"""So long a run may take to start, and to end once its time is over."""


@dataclass(frozen=True, kw_only=True)
class Trip:
    """A run, and how many bytes crossed the link."""

    record: Record
    up: int
    """To the server."""
    down: int
    diverged: bool = False
    """Its loss was no number any more."""


class Link:
    """bench/link.py as a process, from a port of its own to the server's."""

    def __init__(self, network: Network, to_port: int) -> None:
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "offbeat.bench.link", f"{HOST}:{to_port}"),
                *("--mbit", f"{network.mbit}", "--delay-ms", f"{network.delay_ms / 2}"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends it
        )
        self.port = self._first_port()
        self.num_bytes = (0, 0)
        """There and back; known once it is closed."""

    def _first_port(self) -> int:
        assert self._child.stdout is not None
        is_there, _, _ = select.select([self._child.stdout], [], [], TIMEOUT_S)
        line = self._child.stdout.readline() if is_there else ""
        if not line:
            self._kill()
            raise RunError("the link does not come: python -m offbeat.bench.link says no port")
        return int(json.loads(line)[0])

    def close(self) -> None:
        try:
            output, _ = self._child.communicate(timeout=TIMEOUT_S)  # its input ends
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            self._kill()
        if not output:
            raise RunError("the link, python -m offbeat.bench.link, was gone before the run was")
        there, back = json.loads(output)
        self.num_bytes = (there, back)

    def _kill(self) -> None:
        self._child.kill()
        self._child.communicate(timeout=TIMEOUT_S)


class LinkedEngine(LocalEngine):
    """Has its one server beyond a link, and ends the run when its time is over."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        *,
        server_port: int,
        link_port: int,
        limit_s: float,
        lock: int,
        forks: ForkServer | None,
    ) -> None:
        """`limit_s` counts from when everybody is there."""
        silent = make_display("", None, quiet=True)
        super().__init__(job, folder, silent, time.monotonic(), lock=lock, forks=forks)
        self._server_port = server_port
        self._link_port = link_port
        self._limit_s = limit_s
        self._ends_s: float | None = None
        self.is_hung = False
        """It had to be stopped."""

    def _write_cluster(self) -> None:
        """Nobody but the server is where the server is, so that all others take the link."""
        Cluster(
            ps=(f"tcp:{HOST}:{self._server_port}",),
            nodes=(BEYOND,),
            from_afar=(f"tcp:{HOST}:{self._link_port}",),
            epochs=tuple(server.generation for server in self._supervisor.find("ps")),
            incarnations=self._supervisor.incarnations(),
            began_s=self._began_s,
        ).write(self.folder)

    def _look(self) -> None:
        now_s = self.clock()
        if self._ends_s is None and self._all_are_there():
            self._ends_s = now_s + self._limit_s
        if self._ends_s is not None and now_s > self._ends_s:
            self._end_well()
        if now_s > (self._ends_s or 0.0) + MOST_S and not self.is_hung:
            self.is_hung = True
            self.stop()

    def _all_are_there(self) -> bool:
        needed = [p for member, p in self._processes.items() if member.is_needed]
        return all(process.status.get("ready") for process in needed)

    def _end_well(self) -> None:
        """As when a score is good enough: the last checkpoint is scored too."""
        if not self.folder.enough.exists() and not self.folder.state.exists():
            reason = f"its {self._limit_s:g} s are over"
            self.folder.write_json(self.folder.enough, {"reason": reason})


def train_over(
    network: Network, config: TrainConfig, forks: ForkServer | None, *, limit_s: float
) -> Trip:
    """Train for so long, once everybody is there, or until it is through."""
    job = make_job(config, load_recipe(config.recipe))
    folder = create_run_folder(job.config)
    described = describe_run(
        job.config,
        resolved=job.resolved,
        metric=metric_name(job.recipe),
        metrics=directions(job.recipe),
        job=dataclasses.asdict(job.facts),
    )
    folder.write_json(folder.config, described)
    with folder.locked() as lock, _link_to(network) as (link, port):
        engine = LinkedEngine(
            job,
            folder,
            server_port=port,
            link_port=link.port,
            limit_s=limit_s,
            lock=lock,
            forks=forks,
        )
        with contextlib.suppress(NonFiniteLossError):  # which is what came of it
            engine.run()
    folder.write_json(folder.summary, summarise(folder.path))
    if engine.is_hung:
        raise RunError(f"the run did not end within {MOST_S:g} s; its logs are in {folder.logs}")
    if engine.interrupted:
        raise KeyboardInterrupt  # the engine took it for a wish to end that run well
    up, down = link.num_bytes
    diverged = any(isinstance(failure, NonFiniteLossError) for failure in engine.failures)
    return Trip(record=read_run(folder.path), up=up, down=down, diverged=diverged)


@contextlib.contextmanager
def _link_to(network: Network) -> Iterator[tuple[Link, int]]:
    """A link, and the port that the server is to listen at."""
    with socket.create_server((HOST, 0)) as free:
        port = int(free.getsockname()[1])
    with contextlib.closing(Link(network, port)) as link:
        yield link, port
