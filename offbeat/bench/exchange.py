"""`offbeat bench exchange`: gradient up, update, parameters back, beside two plain copies.

The server's process is `python -m offbeat.bench.exchange TRANSPORT ELEMENTS FOLDER`.
"""

import contextlib
import os
import select
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from offbeat.aliases import Segment
from offbeat.bench.processes import TIMEOUT_S, one_thread, silent_log, started, wait_for
from offbeat.bench.tables import Row
from offbeat.disciplines import ApplyReply
from offbeat.errors import RunError
from offbeat.ledger import Ledger
from offbeat.optim import SGD
from offbeat.roles.control import REPORT_EVERY_S
from offbeat.roles.server import Server
from offbeat.run.addresses import Cluster, ClusterNetwork, Home
from offbeat.run.events import EventLog
from offbeat.run.rundir import RunFolder
from offbeat.shard import Shard, ShardState
from offbeat.transport.base import (
    Layout,
    Listener,
    Message,
    Network,
    PushHeader,
)
from offbeat.transport.inproc import InprocListener, InprocNetwork
from offbeat.transport.sockets import SocketListener

EXCHANGES_PER_ROUND = 20
LR = 2.0**-10
"""A power of two: sums of updates by gradients of ones are exact, and can be checked."""
_HELLO: Message = {"worker": 0, "incarnation": 0, "fingerprint": "bench"}


def exchange(*, sizes: Sequence[float], rounds: int, transports: Sequence[str]) -> list[Row]:
    """Time exchanges of so many MB each way over each transport, in rounds that go through all of
    them."""
    with one_thread(), contextlib.ExitStack() as stack:
        cases = [(transport, size) for transport in transports for size in sizes]
        pairs = [stack.enter_context(joined(*case)) for case in cases]
        times = [[pair.time_round() for pair in pairs] for _ in range(1 + rounds)]
        for pair in pairs:
            pair.check()
    rows: list[Row] = []
    for (transport, size), found in zip(cases, zip(*times[1:], strict=True), strict=True):
        row: Row = {"transport": transport, "MB": f"{size:g}"}
        row["exchange, ms"] = [1e3 * exchange_s for exchange_s, _ in found]
        row["two copies, ms"] = [1e3 * copies_s for _, copies_s in found]
        row["ratio"] = [exchange_s / copies_s for exchange_s, copies_s in found]
        rows.append(row)
    return rows


class _Pair:
    """A worker's end that exchanges gradients of ones, and two plain copies beside it."""

    def __init__(self, network: Network, num_elements: int) -> None:
        self._gradient, self._params, *self._others = [torch.ones(num_elements) for _ in range(6)]
        layout = Layout(num_elements, 1)
        self._link = network.connect(0, _HELLO, layout, TIMEOUT_S, self._params)
        self._params = self._link.reply_slot.values  # as a worker of one server has it
        self.num_done = 0

    def close(self) -> None:
        self._link.close()

    def time_round(self) -> tuple[float, float]:
        """Mean seconds of an exchange and of two copies. They take turns, so that neither finds
        its memory in the caches because it has just been there."""
        exchange_s = copies_s = 0.0
        for _ in range(EXCHANGES_PER_ROUND):
            start_s = time.perf_counter()
            self._exchange()
            exchanged_s = time.perf_counter()
            self._others[0].copy_(self._others[1])
            self._others[2].copy_(self._others[3])
            copies_s += time.perf_counter() - exchanged_s
            exchange_s += exchanged_s - start_s
        return exchange_s / EXCHANGES_PER_ROUND, copies_s / EXCHANGES_PER_ROUND

    def check(self) -> None:
        """Every update went in, and came back."""
        if not bool((self._params == -LR * self.num_done).all()):
            raise RunError("the parameters are not what the exchanges should have made of them")

    def _exchange(self) -> None:
        """As in roles/exchange.py."""
        link, slot = self._link, self._link.gradient_slot
        slot.values.copy_(self._gradient)
        link.push(PushHeader(0, 0, self.num_done + 1, self.num_done, self.num_done))
        if link.wait_reply(TIMEOUT_S) is None:
            raise RunError(f"no reply within {TIMEOUT_S:g} s")
        self.num_done += 1


@contextlib.contextmanager
def joined(transport: str, size: float) -> Iterator[_Pair]:
    """A worker's end, joined to a server in another process; `inproc`: in threads of this one."""
    num_elements = max(1, round(size * 1e6 / 4))
    with contextlib.ExitStack() as stack:
        network: Network
        if transport == "inproc":
            listener = InprocListener()
            stack.enter_context(_open_server(listener, num_elements))
            network = InprocNetwork([listener])
        else:
            temporary = tempfile.TemporaryDirectory(prefix="offbeat-bench-")
            folder = RunFolder(Path(stack.enter_context(temporary)))
            log = folder.path / "log"
            arguments = (transport, str(num_elements), str(folder.path))
            child = stack.enter_context(started("offbeat.bench.exchange", log, *arguments))
            wait_for(folder.cluster, child, log, "the server")
            network = ClusterNetwork(Home.alone(folder))
        yield stack.enter_context(contextlib.closing(_Pair(network, num_elements)))


@contextlib.contextmanager
def _open_server(listener: Listener, num_elements: int) -> Iterator[EventLog]:
    events = EventLog(Path(os.devnull))
    server = Server(
        Shard(torch.zeros(num_elements), [Segment(0, 0, 0, num_elements)], SGD(lr=LR)),
        Ledger(ApplyReply([0])),
        listener,
        index=0,
        agreement=_HELLO,
        events=events,
        log=silent_log(),
        clock=time.monotonic,
    )
    server.start()
    try:
        params = torch.zeros(num_elements)
        server.load(ShardState(version=0, tensors={"params": params}, accounts={}))
        yield events
    finally:
        server.close()
        events.close()


def _serve(transport: str, num_elements: str, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"unix:{folder}/socket" if transport == "unix" else "tcp:127.0.0.1:0"
    listener = SocketListener(address, Layout(int(num_elements), 1))
    with _open_server(listener, int(num_elements)) as events:
        cluster = Cluster(ps=(listener.address,), epochs=(0,), incarnations=(0,), began_s=0.0)
        cluster.write(RunFolder(Path(folder)))
        while not select.select([sys.stdin], [], [], REPORT_EVERY_S)[0]:
            events.flush()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
