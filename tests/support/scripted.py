"""Servers that answer the master as a test says, and a master to ask them."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offbeat.roles.calls import Status
from offbeat.roles.master import Master
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.run.rundir import RunFolder
from offbeat.transport.base import CallEnd, Network

NUM_ELEMENTS = 73
"""Of the toy recipe's model, all at one server."""


class ScriptedServer(CallEnd):
    """Answers the master's wishes with the versions that a test gives."""

    def __init__(self, versions: list[int]) -> None:
        self.versions = versions
        self.version = 0
        self.asked: list[int] = []
        self.reason = ""

    def call(self, message: Any, tensors: Any, timeout_s: float) -> tuple[Any, Any]:
        match message["ask"]:
            case "status":
                done = [0] if not self.versions else []
                status = {"version": self.version, "epoch": 0, "loaded": True, "finished": done}
                status |= {"present": [], "awaited": []}
                return {**status, "ready": bool(self.asked), "staleness": []}, {}
            case "want":
                self.asked.append(message["version"])
            case "take":
                if self.versions:
                    self.version = self.versions.pop(0)
                return {"version": self.version, "accounts": {}}, {
                    "params": torch.zeros(NUM_ELEMENTS)
                }
            case "finish":
                self.reason = message["reason"]
        return {}, {}

    def close(self) -> None:
        pass


class ScriptedNetwork(Network):
    def __init__(self, servers: list[ScriptedServer]) -> None:
        self.servers = servers

    def connect(self, *args: Any) -> Any:
        raise AssertionError

    def connect_for_calls(self, shard: int, *args: Any) -> CallEnd:
        return self.servers[shard]


@contextlib.contextmanager
def a_master(folder: RunFolder, job: Job, network: Network, **options: Any) -> Iterator[Master]:
    folder.checkpoints.mkdir(exist_ok=True)
    with contextlib.closing(EventLog(folder.path / "master.jsonl")) as events:
        yield Master(
            job,
            network,
            folder,
            job.make_model(),
            events=events,
            log=logging.Logger("test"),
            clock=time.monotonic,
            stop=threading.Event(),
            connect_timeout_s=0.1,
            **options,
        )


def run_master(
    folder: RunFolder,
    job: Job,
    servers: list[ScriptedServer],
    watch: Callable[[Sequence[Status]], None] = lambda statuses: None,
) -> str:
    with a_master(folder, job, ScriptedNetwork(servers), watch=watch) as master:
        return master.run()
