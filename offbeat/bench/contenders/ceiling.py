"""The ceiling: Offbeat's own workers, with servers that take everything and give nothing back."""

import dataclasses
import threading
import time

from torch import Tensor

from offbeat.bench.contenders import Part
from offbeat.bench.processes import silent_log
from offbeat.errors import ConnectionClosedError
from offbeat.roles.control import Control
from offbeat.roles.worker import Worker
from offbeat.transport import base
from offbeat.transport.base import (
    Layout,
    Message,
    Network,
    PushHeader,
    ReplyHeader,
    Slot,
    WelcomeHeader,
)


def work(part: Part) -> None:
    job, log = part.job, part.log_of(part.index)
    control = Control(None)
    control.flush = log.events.flush
    control.start()
    towers = job.make_towers(part.index, job.make_model())
    part.meet()  # some have imported torch seconds before others
    Worker(
        job,
        part.index,
        towers,
        NoNetwork(),
        log=silent_log(),
        clock=time.monotonic,
        events=log.events,
        stop=threading.Event(),
        seeds_torch=True,
    ).run()
    control.close()
    log.close()


class _NoServer(base.WorkerEnd):
    """Takes everything, and leaves the worker's parameters as they are."""

    def __init__(self, layout: Layout, params: Tensor) -> None:
        self.welcome = WelcomeHeader(version=0)
        self._reply = ReplyHeader(0, version=0)
        self._is_through = False
        self._slot = Slot.allocate(layout)
        self.reply_slot = dataclasses.replace(self._slot, values=params)

    @property
    def gradient_slot(self) -> Slot:
        return self._slot

    pushed_slot = gradient_slot

    def push(self, header: PushHeader) -> None:
        self._reply = ReplyHeader(header.sequence, version=0)

    def wait_reply(self, timeout_s: float) -> ReplyHeader:
        if self._is_through:
            raise ConnectionClosedError("there is nobody to wait for", over=True)
        return self._reply

    def beat(self) -> None:
        pass

    def finish(self, sequence: int) -> None:
        self._is_through = True

    def close(self) -> None:
        pass


class NoNetwork(Network):
    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> _NoServer:
        return _NoServer(layout, params)

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> base.CallEnd:
        raise ConnectionClosedError("there is no server here")
