"""Workers that add up what each of them has, with no server between them: torch's process group,
of gloo; and of NCCL for what lies on GPUs, where every worker has one of its own.

They find each other at an address that whoever starts them makes up: `file:PATH` on one machine,
`tcp:HOST:PORT` on several, where rank 0 is at HOST. gloo goes by the interface that the variable
GLOO_SOCKET_IFNAME names, and so does NCCL; on one machine by loopback, unless that says otherwise.
Nobody waits here without looking whether it is to stop. Used by roles/peers.py:

    group = Group("file:/tmp/meeting", rank=0, size=2, check=lambda: None)
    group.meet(timeout_s=60)
    group.begin([vector]); group.wait()     # `vector` is the sum of everybody's
    group.hand_out(message, tensors)        # rank 0's; everybody else does `group.take_over()`
    group.close()

NCCL does not notice that somebody is gone, and waits; gloo does, at once. So with every sum on the
GPUs there has to be one in the CPU's memory.
"""

import contextlib
import datetime
import ipaddress
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
NCCL_INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
BOTH = "cpu:gloo,cuda:nccl"
WITHOUT_WATCH = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Or torch would end the process where NCCL fails, and ask the store every second for those who
have failed."""
SPIN_S, PAUSE_S = 0.005, 0.0005
"""When everybody has begun, a GPU's part is a matter of microseconds, of milliseconds for a large
model: so long it is looked again and again whether it is done, then now and then."""


class Group:
    """One per process, since torch has one. One thread uses it."""

    def __init__(
        self,
        meeting: str,
        *,
        rank: int,
        size: int,
        check: Callable[[], None],
        gpu: torch.device | None = None,
    ) -> None:
        """`check` raises what is to end a wait. `gpu`: this worker's own, where NCCL adds up what
        lies there; None: gloo adds up everything."""
        self._meeting = meeting
        self._rank = rank
        self._size = size
        self._check = check
        self._gpu = gpu
        self._under_way: list[dist.Work] = []
        """gloo's."""
        self._on_gpus: list[dist.Work] = []
        """And NCCL's."""

    def meet(self, timeout_s: float) -> None:
        """Until all are there; a ConnectionClosedError names those who do not come. A ConfigError
        says that NCCL does not work."""
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
        if self._gpu is not None:
            _prepare_nccl()
        backend = "gloo" if self._gpu is None else BOTH
        with _told():
            dist.init_process_group(
                backend, store=store, rank=self._rank, world_size=self._size, timeout=TIMEOUT
            )
        if self._gpu is not None:
            self._try(self._gpu)

    def _try(self, gpu: torch.device) -> None:
        """NCCL connects in the first sum, and says only then what is in its way."""
        try:
            self.begin([torch.ones(1, device=gpu)])
            self.wait()
        except ConnectionClosedError as error:
            if error.over:
                raise
            raise ConfigError(
                f"NCCL cannot add up on the workers' GPUs ({_reason(error.__cause__ or error)}): "
                f"say --server-device cpu, and gloo does it in the CPU's memory"
            ) from error

    def begin(self, sums: Sequence[Tensor], largest: Tensor | None = None) -> None:
        """Begin to make each of `sums` the sum of everybody's, and `largest` the maximum; all are
        the group's until `wait` returns. What gloo adds up comes last, where NCCL has a part."""
        if largest is not None:
            self._begin(largest, dist.ReduceOp.MAX)
        for tensor in sums:
            self._begin(tensor, dist.ReduceOp.SUM)

    def _begin(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> None:
        with _told():
            work = dist.all_reduce(tensor, how, async_op=True)
        self._note(work, is_on_gpu=tensor.is_cuda and self._gpu is not None)

    def _note(self, work: dist.Work | None, *, is_on_gpu: bool = False) -> None:
        assert work is not None, "this process is in the group"
        (self._on_gpus if is_on_gpu else self._under_way).append(work)

    def wait(self) -> None:
        """Until all that was begun is done. Raises a ConnectionClosedError when somebody is gone,
        and what `check` does."""
        self._wait_for_gloo()
        while self._on_gpus:  # everybody has begun
            self._wait_for_nccl(self._on_gpus[0])
            self._on_gpus.pop(0)

    def _wait_for_nccl(self, work: dist.Work) -> None:
        """It could wait by itself, but not for a while: it gives up for good then."""
        began_s = time.monotonic()
        while not _is_done(work):
            self._check()
            waited_s = time.monotonic() - began_s
            if waited_s > TIMEOUT.total_seconds():
                raise ConnectionClosedError(f"NCCL was not through with a sum within {TIMEOUT}")
            if waited_s > SPIN_S:
                threading.Event().wait(PAUSE_S)
        with _told():
            work.wait()  # which raises what went wrong, and is over at once

    def _wait_for_gloo(self) -> None:
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

    # -- the end -------------------------------------------------------------------------------

    def begin_to_part(self) -> None:
        """Everybody has begun its last sum, and waits for this, too, before it leaves. NCCL may be
        through with a sum here, and still be sending what others need for it; gloo is not."""
        if self._gpu is not None:
            self.begin([torch.ones(1)])

    def close(self) -> None:
        """Leave; whoever waits for this one is told. What is still under way is left to the end of
        the process, which is near: torch would wait for it here. What has failed is not under way,
        and is taken down here: a process that leaves it to its end dies of it, where NCCL is."""
        if not dist.is_initialized():
            return
        self._under_way = [work for work in self._under_way if not work.is_completed()]
        if self._gpu is not None:
            self._abort(self._gpu)
        elif not self._under_way:
            dist.destroy_process_group()

    def _abort(self, gpu: torch.device) -> None:
        """Not in order, as that waits for the others: what waits on the GPU for somebody who is
        gone would keep this process from ending."""
        if self._under_way:  # which is gloo's, and goes with the process
            dist.distributed_c10d._get_default_group()._get_backend(gpu).abort()
        else:
            dist.distributed_c10d._abort_process_group()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What torch raises in here becomes a ConnectionClosedError."""
    try:
        yield
    except RuntimeError as error:
        raise _closed(error) from error


def _is_done(work: dist.Work) -> bool:
    with _told():
        return work.is_completed()


def _closed(error: RuntimeError) -> ConnectionClosedError:
    return ConnectionClosedError(f"another worker is gone ({_reason(error)})")


def _reason(error: BaseException) -> str:
    """In a line, without the place in gloo's source, and its advice; of NCCL's its last words."""
    _, _, last = str(error).partition("Last error:\n")
    if last.strip():
        return last.strip().partition("\n")[0]
    first = str(error).partition("\n")[0].partition(". ")[0].rpartition("] ")
    return first[2] or str(error)


def _prepare_nccl() -> None:
    for name, value in WITHOUT_WATCH.items():
        os.environ.setdefault(name, value)
    if interface := os.environ.get(INTERFACE_VARIABLE):
        os.environ.setdefault(NCCL_INTERFACE_VARIABLE, interface)


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
