"""A cluster whose roles are threads here, connected by TCP; and a proxy that breaks connections."""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offbeat.api import Result, train_config
from offbeat.cluster.bootstrap import Bootstrap
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.hosts import Hosts
from offbeat.cluster.remote import NO_PAYLOAD, run_evaluator, run_worker
from offbeat.config import make_config
from offbeat.run.events import read_events
from offbeat.transport.security import OPEN, Terms
from offbeat.transport.sockets import SocketListener

START_TIMEOUT_S = 30.0


class Role:
    """A role in a thread of its own."""

    def __init__(self, name: str, body: Callable[["Role"], Any]) -> None:
        self.stop = threading.Event()
        self.leave = threading.Event()
        """For servers: told by a scheduler."""
        self.lines: list[str] = []
        self.result: Any = None
        self.error: Exception | None = None
        self._body = body
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self._body(self)
        except Exception as error:
            self.error = error

    def wait(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive(), f"{self.thread.name} does not end: {self.lines}"
        if self.error is not None:
            raise self.error
        return self.result


class Cluster:
    def __init__(
        self, folder: Path, *, servers: int, workers: int, terms: Terms = OPEN, **options: Any
    ) -> None:
        """`workers`: the master among them."""
        self.folder = folder
        self.run_dir = folder / "run"
        self.terms = terms
        self.options = {"recipe": "toy:recipe", "threads": 1, "quiet": True, **options}
        self.start_timeout_s = START_TIMEOUT_S
        self.listeners = [self.listen("tcp:127.0.0.1:0") for _ in range(servers)]
        self.hosts = Hosts(
            ps=tuple(listener.address[4:] for listener in self.listeners),
            worker=tuple(f"nowhere:{n + 1}" for n in range(workers - 1)),
            master="nowhere:1",
        )
        self.bootstraps: dict[int, Bootstrap] = {}
        self.journals: Path | None = None
        """Where the servers' own disks are, each with a folder of its own."""
        self.script: str | None = None
        """What servers are started with, of a launched run."""
        self.servers: list[Role] = []
        self.roles: list[Role] = []

    def listen(self, address: str) -> SocketListener:
        return SocketListener(address, NO_PAYLOAD, self.terms)

    def _role(self, name: str, body: Callable[[Role], Any]) -> Role:
        role = Role(name, body)
        self.roles.append(role)
        return role

    def start_servers(self) -> None:
        self.servers = [
            self.serve(index, listener) for index, listener in enumerate(self.listeners)
        ]

    def restart_server(self, index: int) -> None:
        self.servers[index].stop.set()
        self.servers[index].wait()
        self.servers[index] = self.serve(index, self.listen(f"tcp:{self.hosts.ps[index]}"))

    def serve(self, index: int, listener: SocketListener) -> Role:
        def body(role: Role) -> None:
            self.bootstraps[index] = Bootstrap(
                listener,
                index,
                collecting(role),
                start_timeout_s=self.start_timeout_s,
                stop=role.stop,
                leave=role.leave,
                script=self.script,
                journal=None if self.journals is None else self.journals / str(index),
            )
            self.bootstraps[index].run()

        return self._role(f"ps-{index}", body)

    def start_master(self) -> Role:
        endpoint = Endpoint(
            hosts=self.hosts, terms=self.terms, start_timeout_s=self.start_timeout_s
        )
        decided = {
            "servers": len(self.hosts.ps),
            "workers": self.hosts.num_workers,
            "engine": "cluster",
            "run_dir": str(self.run_dir),
        }
        config = make_config(self.options, decided)
        return self._role("master", lambda role: train_config(config, endpoint=endpoint))

    def start_worker(self, rank: int | None, addresses: tuple[str, ...] | None = None) -> Role:
        return self._role(
            f"worker-{rank}",
            lambda role: run_worker(
                addresses or self.hosts.addresses,
                self.terms,
                rank,
                start_timeout_s=self.start_timeout_s,
                log=collecting(role),
                stop=role.stop,
                say=role.lines.append,
                local={},
            ),
        )

    def start_evaluator(self) -> Role:
        return self._role(
            "evaluator",
            lambda role: run_evaluator(
                self.hosts.addresses,
                self.terms,
                start_timeout_s=self.start_timeout_s,
                log=collecting(role),
                stop=role.stop,
                say=role.lines.append,
                local={},
            ),
        )

    def start_all(self) -> Role:
        self.start_servers()
        for rank in range(1, self.hosts.num_workers):
            self.start_worker(rank)
        return self.start_master()

    def num_updates(self) -> int:
        """Of the events that have come to the run's folder."""
        return sum(event["kind"] == "push" for event in read_events(self.run_dir / "events"))

    def servers_message(self, index: int = 0) -> dict[str, Any]:
        """What the master told a server."""
        run = self.bootstraps[index].serving
        assert run is not None
        return run.told.message()

    def version(self, index: int) -> int:
        """How far a server is."""
        made = self.bootstraps.get(index)
        return 0 if made is None or made.serving is None else made.serving.server.shard.version

    def newest_checkpoint(self) -> int:
        found = (self.run_dir / "checkpoints").glob("0*")
        return max((int(path.name) for path in found), default=-1)

    def applied(self) -> Counter[tuple[int, int, int]]:
        """How often each (shard, worker, sequence) was applied."""
        return Counter(
            (event["shard"], event["worker"], event["sequence"])
            for event in read_events(self.run_dir / "events")
            if event["kind"] == "push" and event["outcome"] == "applied"
        )

    def dropped(self) -> set[tuple[int, int, int]]:
        """Which ones a server did not want."""
        return {
            (event["shard"], event["worker"], event["sequence"])
            for event in read_events(self.run_dir / "events")
            if event["kind"] == "push" and event["outcome"] == "dropped"
        }

    def end(self) -> None:
        for role in self.roles:
            role.stop.set()
        for role in self.roles:
            role.thread.join(60)
        for listener in self.listeners:
            listener.close()


@contextmanager
def cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    made = Cluster(folder, **options)
    try:
        yield made
    finally:
        made.end()


def finish(made: Cluster, master: Role) -> Result:
    """Everybody ends by himself, and well."""
    result: Result = master.wait()
    for role in made.roles:
        role.wait()
    return result


def collecting(role: Role) -> logging.Logger:
    """A log that ends in the role's lines."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            role.lines.append(record.getMessage())

    log = logging.Logger(role.thread.name)
    log.addHandler(Handler())
    return log


class Proxy:
    """Passes bytes on to an address, until it is told to cut all connections."""

    def __init__(self, address: str) -> None:
        self._target = _place_of(address)
        self._door = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._broken: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self.address = f"tcp:127.0.0.1:{self._door.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._door.accept()
            except OSError:
                return
            try:
                theirs = socket.create_connection(self._target)
            except OSError:
                ours.close()
                continue
            for end in (ours, theirs):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((ours, theirs))
            for source, target in ((ours, theirs), (theirs, ours)):
                thread = threading.Thread(
                    target=self._pass_on, args=(source, target), name="proxy", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def move(self, address: str) -> None:
        """From now on somebody else is there."""
        self._target = _place_of(address)
        self.cut()

    def cut(self) -> None:
        """Break every connection, wherever it is in a frame. They are closed in the end only: as
        long as a thread may read, another connection must not get their numbers."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self._broken += pairs
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for pair in self._broken:
            for end in pair:
                end.close()


def _place_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return host, int(port)
