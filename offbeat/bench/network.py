"""`offbeat bench network`: payloads there and back between two processes, over TCP on loopback.

Offbeat's transport, without and with TLS, beside torch.distributed's gloo and pyzmq: between the
same two processes, in rounds that go through all of them. What is sent lies ready on both sides,
and is not copied before; nor is what came.

The flags are in cli/flags.py. The other process is
`python -m offbeat.bench.network FOLDER ELEMENTS NAME...`.
"""

import contextlib
import datetime
import importlib.util
import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, distributed

from offbeat.bench.processes import TIMEOUT_S, one_thread, started, wait_for
from offbeat.bench.tables import Row
from offbeat.errors import ConfigError, RunError
from offbeat.transport.base import Layout, PushHeader, ReplyHeader, ServerEnd, WelcomeHeader
from offbeat.transport.security import Terms
from offbeat.transport.sockets import SocketListener, connect
from offbeat.transport.wire import as_bytes

BYTES_PER_ROUND = 2e8
"""So many go each way in a round, but of small payloads no more than MAX_EXCHANGES."""
MAX_EXCHANGES = 50
QUESTION, ANSWER = 1.0, 2.0
"""What the payloads hold."""


class Way(ABC):
    """A way for a payload to another process, and for another one back. One object on either side;
    what is sent lies ready."""

    def __init__(self, folder: Path, num_elements: int) -> None:
        self.folder = folder
        self.num_elements = num_elements

    @abstractmethod
    def listen(self) -> str:
        """The other process: make ready, and say where."""

    @abstractmethod
    def greet(self) -> None:
        """The other process: take this one in, as it connects."""

    @abstractmethod
    def connect(self, address: str) -> None:
        """This process."""

    @abstractmethod
    def exchange(self) -> Tensor:
        """This process: send, and return what came back."""

    @abstractmethod
    def answer(self) -> Tensor:
        """The other process: return what came, once the answer is sent."""

    @abstractmethod
    def close(self) -> None: ...


class Offbeat(Way):
    def terms(self) -> Terms:
        return Terms()

    def listen(self) -> str:
        layout = Layout(self.num_elements, 1)
        self._listener = SocketListener("tcp:127.0.0.1:0", layout, self.terms())
        self._end: ServerEnd | None = None
        return self._listener.address

    def greet(self) -> None:
        self._end = self._listener.accept(TIMEOUT_S)
        assert self._end is not None
        self._end.read_hello(TIMEOUT_S)
        self._end.reply_slot.values.fill_(ANSWER)
        self._end.welcome(WelcomeHeader(version=0))

    def connect(self, address: str) -> None:
        layout = Layout(self.num_elements, 1)
        self._link = connect(address, {}, layout, TIMEOUT_S, self.terms())
        for _ in range(2):  # both slots
            self._link.gradient_slot.values.fill_(QUESTION)
            self._push()

    def _push(self) -> None:
        self._link.push(PushHeader(0, 0, 1, 0, 0))
        if self._link.wait_reply(TIMEOUT_S) is None:
            raise RunError("no reply")

    def exchange(self) -> Tensor:
        self._push()
        return self._link.reply_slot.values

    def answer(self) -> Tensor:
        assert self._end is not None
        header = self._end.receive(TIMEOUT_S)
        assert header is not None
        self._end.send(ReplyHeader(header.sequence, version=0))
        return self._end.gradient_slot(header).values

    def close(self) -> None:
        for end in ("_link", "_end", "_listener"):
            if getattr(self, end, None) is not None:
                getattr(self, end).close()


class OffbeatTls(Offbeat):
    def terms(self) -> Terms:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(self.folder / "cert.pem", self.folder / "key.pem")
        client = ssl.create_default_context(cafile=str(self.folder / "cert.pem"))
        return Terms(server_tls=server, client_tls=client)


class Gloo(Way):
    def listen(self) -> str:
        return ""

    def greet(self) -> None:
        self._join(1, ANSWER)

    def connect(self, address: str) -> None:
        self._join(0, QUESTION)

    def _join(self, rank: int, value: float) -> None:
        self._mine: Tensor = torch.full((self.num_elements,), value)
        self._theirs: Tensor = torch.zeros(self.num_elements)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{self.folder.resolve() / 'store'}",
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )

    def exchange(self) -> Tensor:
        distributed.send(self._mine, 1)
        distributed.recv(self._theirs, 1)
        return self._theirs

    def answer(self) -> Tensor:
        distributed.recv(self._theirs, 0)
        distributed.send(self._mine, 0)
        return self._theirs

    def close(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()


class Zmq(Way):
    """Without copies: what comes is used where zmq has put it."""

    def _open(self, kind: str, value: float) -> Any:
        import zmq

        self._mine = torch.full((self.num_elements,), value)
        self._context = zmq.Context()
        made = self._context.socket(getattr(zmq, kind))
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, int(1e3 * TIMEOUT_S))
        return made

    def listen(self) -> str:
        self._socket = self._open("REP", ANSWER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        return f"tcp://127.0.0.1:{port}"

    def greet(self) -> None:
        return

    def connect(self, address: str) -> None:
        self._socket = self._open("REQ", QUESTION)
        self._socket.connect(address)

    def exchange(self) -> Tensor:
        self._socket.send(as_bytes(self._mine), copy=False)
        return self._receive()

    def answer(self) -> Tensor:
        found = self._receive()
        self._socket.send(as_bytes(self._mine), copy=False)
        return found

    def _receive(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that nobody may write there
            return torch.frombuffer(self._socket.recv(copy=False).buffer, dtype=torch.float32)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


WAYS: dict[str, type[Way]] = {"tcp": Offbeat, "gloo": Gloo, "pyzmq": Zmq, "tls": OffbeatTls}


def network(*, sizes: Sequence[float], rounds: int, ways: Sequence[str]) -> list[Row]:
    """Time exchanges of so many MB each way, by each way."""
    if "pyzmq" in ways and importlib.util.find_spec("zmq") is None:
        raise ConfigError("pyzmq is not installed: pip install 'offbeat[bench]', or leave it out")
    rows: list[Row] = []
    for size in sizes:
        times = _time_size(max(1, round(size * 1e6 / 4)), rounds, ways)
        for name in ways:
            row: Row = {"way": name, "MB": f"{size:g}"}
            row["there and back, ms"] = [1e3 * t for t in times[name]]
            if "tcp" in ways:
                both = zip(times[name], times["tcp"], strict=True)
                row["times tcp's"] = [theirs / ours for theirs, ours in both]
            rows.append(row)
    return rows


def _time_size(num_elements: int, rounds: int, ways: Sequence[str]) -> dict[str, list[float]]:
    count = max(1, min(MAX_EXCHANGES, round(BYTES_PER_ROUND / (4 * num_elements))))
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name, one_thread():
        folder = Path(name)
        if "tls" in ways:
            _make_certificate(folder)
        with _other_process(folder, num_elements, ways) as (orders, addresses):
            here = {way: WAYS[way](folder, num_elements) for way in ways}
            with contextlib.ExitStack() as stack:
                for way, made in here.items():
                    _order(orders, f"greet {way}")
                    if isinstance(made, Offbeat):
                        _order(orders, f"{way} 2")
                    made.connect(addresses[way])
                    stack.callback(made.close)
                for number in range(rounds + 1):
                    for way, made in here.items():
                        _order(orders, f"{way} {count}")
                        start_s = time.perf_counter()
                        for _ in range(count):
                            found = made.exchange()
                        took_s = (time.perf_counter() - start_s) / count
                        check(way, found, ANSWER)
                        if number:  # the first round warms up
                            times[way].append(took_s)
    return times


def check(way: str, found: Tensor, value: float) -> None:
    if not bool((found == value).all()):
        raise RunError(f"{way} did not bring what was sent")


def _order(orders: IO[bytes], line: str) -> None:
    orders.write(line.encode() + b"\n")
    orders.flush()


@contextlib.contextmanager
def _other_process(
    folder: Path, num_elements: int, ways: Sequence[str]
) -> Iterator[tuple[IO[bytes], dict[str, str]]]:
    log, ready = folder / "log", folder / "ready.json"
    arguments = (str(folder), str(num_elements), *ways)
    with started("offbeat.bench.network", log, *arguments) as child:
        wait_for(ready, child, log, "the other process")
        assert child.stdin is not None
        yield child.stdin, json.loads(ready.read_text())


def _make_certificate(folder: Path) -> None:
    names = ["-subj", "/CN=offbeat bench", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    try:
        subprocess.run([*command, *names, *files], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"no certificate for TLS can be made with openssl ({error}); leave tls out"
        ) from error


def _serve(folder: Path, num_elements: int, ways: Sequence[str]) -> None:
    """The other process: does what it is told, line by line."""
    torch.set_num_threads(1)
    made: dict[str, Any] = {name: WAYS[name](folder, num_elements) for name in ways}
    addresses = {name: way.listen() for name, way in made.items()}
    temporary = folder / "ready.tmp"
    temporary.write_text(json.dumps(addresses))
    temporary.replace(folder / "ready.json")
    for line in sys.stdin:
        first, _, second = line.strip().partition(" ")
        if first == "greet":
            made[second].greet()
        else:
            for _ in range(int(second)):
                found = made[first].answer()
            check(first, found, QUESTION)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
