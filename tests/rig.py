"""A live server with workers that a test moves by hand."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat import SGD
from offbeat.disciplines import make_discipline
from offbeat.events import EventLog, read_events
from offbeat.flat import Manifest, TensorSpec
from offbeat.roles.server import Server
from offbeat.shard import Shard, segments_of
from offbeat.transport.base import Header, Layout
from offbeat.transport.inproc import InprocListener, InprocWorkerEnd

TIMEOUT_S = 20.0


def manifest_of(sizes: Sequence[int]) -> Manifest:
    """One-dimensional tensors of these sizes."""
    specs = []
    for index, size in enumerate(sizes):
        specs.append(
            TensorSpec(
                name=f"t{index}",
                shape=(size,),
                stride=(1,),
                dtype="float32",
                offset=sum(sizes[:index]),
                numel=size,
            )
        )
    return Manifest(tensors=tuple(specs), floats=(), ints=(), frozen=(), aliases={})


class Hand:
    """A worker whose every move is made by the test."""

    def __init__(self, link: InprocWorkerEnd, worker: int) -> None:
        self.link = link
        self.worker = worker
        self.sequence = 0
        self.version = link.welcome.reply_version

    @property
    def params(self) -> Tensor:
        return self.link.reply_slot.values

    def push(
        self, values: float | Tensor, mask: Sequence[bool] | None = None, **header: Any
    ) -> None:
        self.sequence += 1
        slot = self.link.gradient_slot
        slot.values.copy_(torch.as_tensor(values))
        slot.mask.fill_(1)
        if mask is not None:
            slot.mask.copy_(torch.tensor(mask, dtype=torch.uint8))
        given: dict[str, Any] = {"sequence": self.sequence, **header}
        self.link.push(
            Header(self.worker, 0, base_version=self.version, batch=self.sequence, **given)
        )

    def reply(self, timeout_s: float = TIMEOUT_S) -> Header:
        header = self.link.wait_reply(timeout_s)
        assert header is not None, f"worker {self.worker} got no reply in {timeout_s} s"
        self.version = header.reply_version
        return header

    def has_reply(self, within_s: float = 0.05) -> bool:
        """Whether a reply comes in this short time; only for showing that none does."""
        header = self.link.wait_reply(within_s)
        return header is not None

    def exchange(self, values: float | Tensor, **more: Any) -> Header:
        self.push(values, **more)
        return self.reply()


class Rig:
    """A server over a shard of zeros with plain SGD at lr 1, so gradients simply add up."""

    def __init__(
        self,
        folder: Path,
        discipline: str,
        num_workers: int,
        *,
        sizes: Sequence[int] = (4,),
        clock: Callable[[], float] = time.monotonic,
        discipline_options: dict[str, Any] | None = None,
        **shard_options: Any,
    ) -> None:
        self.manifest = manifest_of(sizes)
        optimizer = shard_options.pop("optimizer", SGD(lr=1.0))
        total = self.manifest.num_elements
        self.shard = Shard(
            torch.zeros(total),
            segments_of(self.manifest, optimizer, 0, total),
            optimizer,
            **shard_options,
        )
        self.listener = InprocListener()
        self.log = logging.Logger("test")
        self.log.addHandler(logging.NullHandler())
        self.events = EventLog(folder / "ps-0.jsonl")
        self.folder = folder
        self.server = Server(
            self.shard,
            make_discipline(discipline, range(num_workers), **(discipline_options or {})),
            self.listener,
            index=0,
            fingerprint="same",
            events=self.events,
            log=self.log,
            clock=clock,
        )
        self.server.start()

    def join(self, worker: int, fingerprint: str = "same", incarnation: int = 0) -> Hand:
        hello = {"worker": worker, "incarnation": incarnation, "fingerprint": fingerprint}
        layout = Layout(self.manifest.num_elements, len(self.manifest.tensors))
        return Hand(self.listener.connect(hello, layout, TIMEOUT_S), worker)

    def join_all(self, num_workers: int) -> list[Hand]:
        return [self.join(worker) for worker in range(num_workers)]

    def close(self) -> None:
        self.server.close()
        self.events.close()

    def pushes(self) -> list[dict[str, Any]]:
        self.events.flush()
        return list(read_events(self.folder))


@contextmanager
def rig(folder: Path, discipline: str, num_workers: int, **options: Any) -> Iterator[Rig]:
    made = Rig(folder, discipline, num_workers, **options)
    try:
        yield made
    finally:
        made.close()


def in_threads(*bodies: Callable[[], None]) -> None:
    """Run these at the same time; the first error any of them raised is raised here."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        threading.Event().wait(0.001)
