"""Workers and evaluators that were started by hand, on machines of their own.

    python -m offbeat role worker --index 1 --cluster cluster.toml
    python -m offbeat role worker --join --cluster cluster.toml
    python -m offbeat role evaluator --cluster cluster.toml

They need no flags of the run: its configuration comes from the servers, which have it from the
master. What they have to tell goes the same way to the run's folder.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.errors import ConfigError, ConnectionClosedError, NonFiniteLossError, in_a_line
from offbeat.events import EventLog
from offbeat.job import Job
from offbeat.roles.door import job_from
from offbeat.roles.evaluator import (
    evaluate,
    load_state,
    metric_name,
    score_line,
    warning_of,
)
from offbeat.roles.worker import Worker
from offbeat.towers import find_devices
from offbeat.transport.base import CallEnd, Layout, Message, keep_trying
from offbeat.transport.sockets import EVENT_BYTES, SocketNetwork
from offbeat.transport.terms import Terms

CALL_TIMEOUT_S = 20.0
FLUSH_EVERY_S = 0.5
POLL_S = 0.5
MOST_KEPT_BYTES = 1 << 26
"""Of events, while server 0 is away."""
SMALL = Layout(num_elements=0, num_tensors=0)

Say = Callable[[str], None]


class CallSink:
    """A sink of events that ends in the run's folder, by way of server 0. Lines that cannot be sent
    are kept for the next attempt."""

    def __init__(self, network: SocketNetwork, name: str) -> None:
        self._network = network
        self._name = name
        self._kept = bytearray()
        self._source = secrets.token_hex(8)
        self._num_sent = 0
        self._end: CallEnd | None = None

    def write(self, text: str) -> None:
        if len(self._kept) < MOST_KEPT_BYTES:
            self._kept += text.encode()

    def flush(self) -> None:
        try:
            while self._kept:
                cut = len(self._kept)
                if cut > EVENT_BYTES:
                    cut = self._kept.rfind(b"\n", 0, EVENT_BYTES) + 1
                if self._end is None:
                    self._end = self._network.connect_for_calls(0, {}, SMALL, CALL_TIMEOUT_S)
                lines = torch.frombuffer(self._kept[:cut], dtype=torch.uint8)  # a copy
                who = {"name": self._name, "source": self._source}
                message = {"ask": "events", **who, "before": self._num_sent}
                self._end.call(message, {"lines": lines}, CALL_TIMEOUT_S)
                self._num_sent += cut
                del self._kept[:cut]
        except ConnectionClosedError:  # at the next flush, perhaps
            self.close()

    def close(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None


@dataclass(frozen=True, kw_only=True)
class WorkDone:
    """What a worker came to."""

    num_steps: int
    loss: float
    """Of its last batch."""
    time_s: float
    """Since the run began."""
    metric_name: str
    metric: float | None


def ask_config(
    network: SocketNetwork, who: Message, start_timeout_s: float, stop: threading.Event
) -> Message:
    """The run's configuration, as soon as server 0 knows it; says what it is waiting for."""
    where = network.addresses[0].removeprefix("tcp:")
    waits: list[bool] = []

    def ask() -> Message:
        end = network.connect_for_calls(0, {}, SMALL, CALL_TIMEOUT_S)
        try:
            told, _ = end.call({"ask": "config", **who}, {}, CALL_TIMEOUT_S)
        finally:
            end.close()
        if not told:
            if not waits:
                waits.append(True)
                network.say("waiting for the master")
            raise ConnectionClosedError("the master has not come yet")
        return told

    try:
        return keep_trying(ask, start_timeout_s, stop)
    except ConnectionClosedError as error:
        if error.refused or error.over or stop.is_set():
            raise
        raise ConnectionClosedError(
            f"no run began at {where} within {start_timeout_s:g} s (--start-timeout): {error}"
        ) from error


def run_worker(
    addresses: tuple[str, ...],
    terms: Terms,
    rank: int | None,
    *,
    start_timeout_s: float,
    log: logging.Logger,
    stop: threading.Event,
    say: Say,
    local: Mapping[str, Any],
    show: Say = lambda line: None,
    scores: bool = False,
) -> WorkDone:
    """Be the worker of this rank, or (None) one more than the cluster lists, until the run is over.
    `local`: options that are this machine's own. `show` is for the lines that --log-every asks for.
    `scores`: find out how well it does in the end."""
    network = SocketNetwork(addresses, terms, say)
    who: Message = {"join": True} if rank is None else {"rank": rank}
    told = ask_config(network, who, start_timeout_s, stop)
    rank, incarnation = int(told["rank"]), int(told["incarnation"])
    job, network, clock = _enter(network, told, local)
    say(f"worker {rank} of {job.config.recipe}, {job.config.discipline}")
    sink = CallSink(network, f"worker-{rank}")
    events = EventLog(sink)
    worker = Worker(
        job,
        rank,
        job.make_towers(rank, job.make_model()),
        network,
        events=events,
        log=log,
        clock=clock,
        stop=stop,
        incarnation=incarnation,
        seeds_torch=True,
        say=show,
        connect_timeout_s=start_timeout_s,
    )
    with _Flushing(events):
        try:
            worker.run()
        except NonFiniteLossError as error:
            with contextlib.suppress(ConnectionClosedError):  # then the run has other troubles
                _tell_of_failure(network, in_a_line(error))
            raise
        except ConnectionClosedError as error:
            if error.refused or error.over or stop.is_set():
                raise
            raise ConnectionClosedError(
                f"{error}; that was all within {start_timeout_s:g} s (--start-timeout)"
            ) from error
    say(f"worker {rank} is through after {worker.stats.num_steps} steps")
    metric = None
    if scores and job.test is not None:
        module, device = worker.towers.model.module, worker.towers.first_device
        metric, _ = evaluate(module, job.recipe, job.test, device)
    return WorkDone(
        num_steps=worker.stats.num_steps,
        loss=worker.stats.loss,
        time_s=clock(),
        metric_name=metric_name(job.recipe),
        metric=metric,
    )


def run_evaluator(
    addresses: tuple[str, ...],
    terms: Terms,
    *,
    start_timeout_s: float,
    log: logging.Logger,
    stop: threading.Event,
    say: Say,
    local: Mapping[str, Any],
) -> None:
    """Score each newest checkpoint once, the last one too: the servers have it, until the run is
    over and a little longer."""
    network = SocketNetwork(addresses, terms, say)
    told = ask_config(network, {}, start_timeout_s, stop)
    job, network, clock = _enter(network, told, local)
    if job.test is None:
        say("the recipe has no test data: there is nothing to score")
        return
    events = EventLog(CallSink(network, "evaluator-0"))
    scorer = _RemoteScorer(job, network, events, clock, say)
    with _Flushing(events):
        try:
            while not keep_trying(scorer.score_newest, start_timeout_s, stop):
                if stop.wait(POLL_S):
                    break
        finally:
            scorer.leave()


class _RemoteScorer:
    def __init__(
        self,
        job: Job,
        network: SocketNetwork,
        events: EventLog,
        clock: Callable[[], float],
        say: Say,
    ) -> None:
        self.job = job
        self._network = network
        self._events = events
        self._clock = clock
        self._say = say
        self._model = job.make_model()
        self._frozen = self._model.frozen()
        self._device = find_devices(job.config.devices or job.config.device, 0)[0]
        self._name = secrets.token_hex(8)
        self._may_differ = not job.config.chosen.kind.exact
        self._scored = -1

    def score_newest(self) -> bool:
        """Score what the servers have, if it is new; returns whether that was the last."""
        parts, is_last = self._ask()
        if parts is None:
            return is_last
        version, values, buffers = parts
        module = self._model.module
        empty = torch.zeros(0)
        state = self.job.manifest.state_dict(
            values,
            buffers.get("floats", empty),
            buffers.get("ints", empty.long()),
            self._frozen,
        )
        load_state(module, state)
        module.to(self._device)
        assert self.job.test is not None
        metric, count = evaluate(module, self.job.recipe, self.job.test, self._device)
        self._scored = version
        self._events.record(
            "score", version=version, metric=metric, count=count, at_s=self._clock()
        )
        self._events.flush()
        self._say(f"version {version}: {score_line(self.job.recipe, metric)}")
        if warning := warning_of(self.job.recipe, version, metric):
            self._say(f"warning: {warning}")
        return is_last

    def _last(self) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]] | None:
        """The last checkpoint, whatever its shards' versions are: where a server was started anew
        they differ."""
        found = [
            self._call(shard, {"ask": "newest", "after": -1})
            for shard in range(len(self.job.slices))
        ]
        if any("version" not in message for message, _ in found):
            return None
        values = torch.cat([tensors["values"] for _, tensors in found])
        return int(found[0][0]["version"]), values, found[0][1]

    def leave(self) -> None:
        """Tell the servers that nobody needs to stay for this evaluator."""
        for shard in range(len(self.job.slices)):
            with contextlib.suppress(ConnectionClosedError):  # it is gone already
                self._call(shard, {"ask": "leave", "who": self._name})

    def _call(self, shard: int, message: Message) -> tuple[Message, dict[str, torch.Tensor]]:
        layout = self.job.layout(shard)
        end = self._network.connect_for_calls(shard, {}, layout, CALL_TIMEOUT_S)
        try:
            return end.call(message, {}, CALL_TIMEOUT_S)
        finally:
            end.close()

    def _ask(self) -> tuple[tuple[int, torch.Tensor, dict[str, torch.Tensor]] | None, bool]:
        """The shards' parts of the newest checkpoint, if all have the same one and it is new."""
        found, over = [], False
        for shard in range(len(self.job.slices)):
            message, tensors = self._call(
                shard, {"ask": "newest", "after": self._scored, "who": self._name}
            )
            over = over or bool(message["over"])  # then all of them have the last one
            found.append((message.get("version"), tensors))
        if over and any(version is not None for version, _ in found):
            return self._last(), True
        versions = {version for version, _ in found}
        newest = found[0][0]
        if newest is None or None in versions or (len(versions) > 1 and not self._may_differ):
            return None, over and versions == {None}
        values = torch.cat([tensors["values"] for _, tensors in found])
        return (int(newest), values, found[0][1]), over


class _Flushing:
    """Events are sent on from time to time, and in the end."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._events.close()

    def _run(self) -> None:
        while not self._done.wait(FLUSH_EVERY_S):
            self._events.flush()


def _enter(
    network: SocketNetwork, told: Message, local: Mapping[str, Any]
) -> tuple[Job, SocketNetwork, Callable[[], float]]:
    """The run's job on this machine, the network with the run's own timeout, and its clock."""
    began_s = time.monotonic() - float(told["elapsed_s"])
    if (servers := int(told["config"]["servers"])) != len(network.addresses):
        raise ConfigError(
            f"the run has {servers} servers, this cluster {len(network.addresses)}; do all "
            f"machines have the same cluster file?"
        )
    job = job_from(told, with_data=True, **local)
    if job.config.threads is None:  # a machine of one's own has all its cores for one worker
        config = dataclasses.replace(job.config, threads=os.cpu_count())
        job = dataclasses.replace(job, config=config)
    terms = dataclasses.replace(network.terms, peer_timeout_s=job.config.worker_timeout)
    entered = SocketNetwork(network.addresses, terms, network.say)
    return job, entered, lambda: time.monotonic() - began_s


def _tell_of_failure(network: SocketNetwork, line: str) -> None:
    end = network.connect_for_calls(0, {}, SMALL, CALL_TIMEOUT_S)
    try:
        end.call({"ask": "failed", "line": line}, {}, CALL_TIMEOUT_S)
    finally:
        end.close()
