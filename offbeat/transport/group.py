"""Workers that add up what each of them has, with no server between them: torch's process group,
of gloo, for what lies in the CPU's memory.

They find each other at an address that whoever starts them makes up: `file:PATH` on one machine,
`tcp:HOST:PORT` on several, where rank 0 is at HOST. gloo goes by the interface that the variable
GLOO_SOCKET_IFNAME names; on one machine by loopback, unless that says otherwise. Nobody waits here
without looking whether it is to stop. Used by roles/peers.py:

    group = Group("file:/tmp/meeting", rank=0, size=2, check=lambda: None)
    group.meet(timeout_s=60)
    group.begin(vector); group.wait()       # `vector` is the sum of everybody's
    group.hand_out(message, tensors)        # rank 0's; everybody else does `group.take_over()`
    group.close()
"""

import contextlib
import datetime
import ipaddress
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.transport.base import Message

POLL_S = 0.2
"""How often somebody who waits looks whether it is to stop."""
ARRIVAL_POLL_S = 0.02
TIMEOUT = datetime.timedelta(minutes=30)
"""The last resort, and torch's own: who dies is noticed at once, and a step may take its time."""
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Group:
    """One per process, since torch has one. One thread uses it."""

    def __init__(self, meeting: str, *, rank: int, size: int, check: Callable[[], None]) -> None:
        """`check` raises what is to end a wait."""
        self._meeting = meeting
        self._rank = rank
        self._size = size
        self._check = check
        self._under_way: list[dist.Work] = []

    def meet(self, timeout_s: float) -> None:
        """Until all are there; a ConnectionClosedError names those who do not come."""
        store = _open_store(self._meeting, is_host=self._rank == 0, timeout_s=timeout_s)
        store.set(str(self._rank), "here")
        names = [str(rank) for rank in range(self._size)]
        deadline_s = time.monotonic() + timeout_s
        while missing := [name for name in names if not store.check([name])]:
            self._check()
            if time.monotonic() > deadline_s:
                raise ConnectionClosedError(
                    f"worker {', '.join(missing)} did not come within {timeout_s:g} s"
                )
            threading.Event().wait(ARRIVAL_POLL_S)
        if _is_here(self._meeting):
            os.environ.setdefault(INTERFACE_VARIABLE, LOOPBACK)
        with _told():
            dist.init_process_group(
                "gloo", store=store, rank=self._rank, world_size=self._size, timeout=TIMEOUT
            )

    def begin(self, total: Tensor, largest: Tensor | None = None) -> None:
        """Begin to make `total` the sum of everybody's, and `largest` the maximum; both are the
        group's until `wait` returns."""
        self._begin(total, dist.ReduceOp.SUM)
        if largest is not None:
            self._begin(largest, dist.ReduceOp.MAX)

    def _begin(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> None:
        with _told():
            self._note(dist.all_reduce(tensor, how, async_op=True))

    def _note(self, work: dist.Work | None) -> None:
        assert work is not None, "this process is in the group"
        self._under_way.append(work)

    def wait(self) -> None:
        """Until all that was begun is done. Raises a ConnectionClosedError when somebody is gone,
        and what `check` does."""
        while self._under_way:
            work = self._under_way[0]
            try:
                work.wait(datetime.timedelta(seconds=POLL_S))
            except RuntimeError as error:
                if work.is_completed():
                    raise _closed(error) from error
                self._check()
                continue
            self._under_way.pop(0)

    # -- what rank 0 has -----------------------------------------------------------------------

    def hand_out(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """From rank 0 to everybody, who does `take_over`."""
        kinds = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
        text = json.dumps({"message": message, "tensors": kinds}).encode()
        said = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._send(torch.tensor([said.numel()]))
        self._send(said)
        for tensor in tensors.values():
            self._send(_bytes_of(tensor.cpu().contiguous()))

    def take_over(self) -> tuple[Message, dict[str, Tensor]]:
        """What rank 0 has handed out; the tensors are the caller's."""
        length = torch.zeros(1, dtype=torch.int64)
        self._send(length)
        said = torch.empty(int(length.item()), dtype=torch.uint8)
        self._send(said)
        found = json.loads(bytes(said.tolist()))
        tensors = {}
        for name, (kind, shape) in found["tensors"].items():
            dtype = getattr(torch, kind.removeprefix("torch."))
            tensors[name] = torch.empty(shape, dtype=dtype)
            self._send(_bytes_of(tensors[name]))
        return found["message"], tensors

    def _send(self, tensor: Tensor) -> None:
        if tensor.numel():
            with _told():
                self._note(dist.broadcast(tensor, 0, async_op=True))
            self.wait()

    def close(self) -> None:
        """Leave; whoever waits for this one is told. What is still under way is left to the end of
        the process, which is near: torch would wait for it here."""
        if dist.is_initialized() and not self._under_way:
            dist.destroy_process_group()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What torch raises in here becomes a ConnectionClosedError."""
    try:
        yield
    except RuntimeError as error:
        raise _closed(error) from error


def _closed(error: RuntimeError) -> ConnectionClosedError:
    """Without the place in gloo's source, and its advice."""
    first = str(error).partition("\n")[0].partition(". ")[0].rpartition("] ")
    return ConnectionClosedError(f"another worker is gone ({first[2] or error})")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _open_store(meeting: str, *, is_host: bool, timeout_s: float) -> Any:
    kind, _, where = meeting.partition(":")
    if kind == "file":
        return dist.FileStore(where, -1)  # type: ignore[attr-defined]
    host, _, port = where.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit():
        raise ConfigError(f"workers meet at file:PATH or tcp:HOST:PORT, not at {meeting!r}")
    timeout = datetime.timedelta(seconds=timeout_s)
    with _told():
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=is_host, timeout=timeout, wait_for_workers=False
        )


def _is_here(meeting: str) -> bool:
    """Whether all of them are on this machine, so that nobody else need hear them."""
    kind, _, where = meeting.partition(":")
    host = where.rpartition(":")[0].strip("[]")
    try:
        return kind == "file" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
