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
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offbeat.cluster.bootstrap import job_from
from offbeat.errors import (
    ConfigError,
    ConnectionClosedError,
    NonFiniteLossError,
    StepError,
    in_a_line,
)
from offbeat.recipes.base import metric_name
from offbeat.roles.calls import (
    AskConfig,
    Call,
    Configure,
    Leave,
    Newest,
    SendEvents,
    TellFailure,
)
from offbeat.roles.context import Context, Records, Say, SentRecords
from offbeat.roles.evaluator import CheckpointSource, Found, Look
from offbeat.roles.run import Role, make_role, run_role
from offbeat.roles.scoring import Scoring
from offbeat.run.job import Job
from offbeat.transport.base import CallEnd, Layout, Message, keep_trying
from offbeat.transport.security import Terms
from offbeat.transport.sockets import EVENT_BYTES, SocketNetwork

CALL_TIMEOUT_S = 20.0
FLUSH_EVERY_S = 0.5
POLL_S = 0.5
MAX_KEPT_BYTES = 1 << 26
"""Of events, while server 0 is away."""
NO_PAYLOAD = Layout(num_elements=0, num_tensors=0)
"""Of connections for calls, and of a server that was not told yet what it serves."""


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
        if len(self._kept) < MAX_KEPT_BYTES:
            self._kept += text.encode()

    def flush(self) -> None:
        try:
            while self._kept:
                cut = len(self._kept)
                if cut > EVENT_BYTES:
                    cut = self._kept.rfind(b"\n", 0, EVENT_BYTES) + 1
                if self._end is None:
                    self._end = self._network.connect_for_calls(0, {}, NO_PAYLOAD, CALL_TIMEOUT_S)
                lines = torch.frombuffer(self._kept[:cut], dtype=torch.uint8)  # a copy
                call = SendEvents(self._name, self._source, self._num_sent, lines)
                self._end.call(call.message(), call.tensors(), CALL_TIMEOUT_S)
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
    scores: Mapping[str, float]
    """Empty: nobody asked."""
    reason: str
    """Why it has left, as the servers put it."""

    @property
    def is_over(self) -> bool:
        """Whether the run came to its end; else it may go on when its master is back."""
        return self.reason == "the run is finished"


def ask_config(
    network: SocketNetwork, call: AskConfig, start_timeout_s: float, stop: threading.Event
) -> Message:
    """The run's configuration, as soon as server 0 knows it; says what it is waiting for."""
    where = network.addresses[0].removeprefix("tcp:")
    waits: list[bool] = []

    def ask() -> Message:
        told, _ = _call(network, 0, NO_PAYLOAD, call)
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
    call = AskConfig(join=True) if rank is None else AskConfig(rank)
    told = ask_config(network, call, start_timeout_s, stop)
    rank, incarnation = int(told["rank"]), int(told["incarnation"])
    job, network, clock = _enter(network, told, local)
    say(f"worker {rank} of {job.config.recipe}, {job.config.discipline}")
    model = job.make_model()
    records = SentRecords(log, lambda name: CallSink(network, name))
    context = Context(
        job=job,
        records=records,
        clock=clock,
        stop=stop,
        say=show,
        network=network,
        states=states_of(Configure.read(told, {}).run),
        generation=incarnation,
        model=model,
        connect_timeout_s=start_timeout_s,
    )
    role = make_role(context, "worker", rank)
    if (failure := _run(role, records, network)) is not None:
        raise failure if stop.is_set() else with_patience(failure, start_timeout_s)
    done = role.progress()
    say(f"worker {rank} is through after {done['steps']} steps")
    found: Mapping[str, float] = {}
    if scores and job.test is not None:
        scoring = Scoring(job.recipe, job.test, job.devices(rank)[0], log.warning)
        found = scoring.score(model.module).values
    return WorkDone(
        num_steps=done["steps"],
        loss=math.nan if done["loss"] is None else done["loss"],
        time_s=clock(),
        metric_name=metric_name(job.recipe),
        scores=found,
        reason=done["reason"],
    )


def _run(role: Role, records: SentRecords, network: SocketNetwork) -> BaseException | None:
    """What the worker failed with, if it did; the master is told of a loss that is no number."""
    with Flushing(records):
        try:
            role.run()
        except StepError as error:
            if isinstance(error.__cause__, NonFiniteLossError):
                _tell_of_failure(network, in_a_line(error.__cause__))
            return error.__cause__
    return None


def with_patience(error: BaseException, start_timeout_s: float) -> BaseException:
    """The same, and how long a server was waited for, where that is the reason."""
    if not isinstance(error, ConnectionClosedError) or error.refused or error.over:
        return error
    return ConnectionClosedError(
        f"{error}; that was all within {start_timeout_s:g} s (--start-timeout)"
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
    told = ask_config(network, AskConfig(), start_timeout_s, stop)
    job, network, clock = _enter(network, told, local)
    if job.test is None:
        say("the recipe has no test data: there is nothing to score")
        return
    model = job.make_model()
    records = SentRecords(log, lambda name: CallSink(network, "evaluator-0"))
    source = ServersSource(
        job, network, model.frozen(), stop=stop, clock=clock, timeout_s=start_timeout_s
    )
    context = Context(
        job=job, records=records, clock=clock, stop=stop, say=say, model=model, source=source
    )
    with Flushing(records):
        run_role(context, "evaluator", 0)


class ServersSource(CheckpointSource):
    """The newest checkpoint as the servers have it, each its part."""

    def __init__(
        self,
        job: Job,
        network: SocketNetwork,
        frozen: dict[str, torch.Tensor],
        *,
        stop: threading.Event,
        clock: Callable[[], float],
        timeout_s: float,
    ) -> None:
        """`frozen`: what does not train, which no server has. Servers that are away are looked for
        until `timeout_s` have passed."""
        self.pause_s = POLL_S
        self.job = job
        self._network = network
        self._frozen = frozen
        self._stop = stop
        self._clock = clock
        self._timeout_s = timeout_s
        self._name = secrets.token_hex(8)
        self._may_differ = not job.config.chosen.kind.exact
        self._newest = -1
        """The version that was found last."""

    def look(self) -> Look:
        parts, is_last = keep_trying(self._ask, self._timeout_s, self._stop, self._clock)
        if parts is None:
            return Look(None, is_last)
        self._newest, values, buffers = parts
        empty = torch.zeros(0)
        floats, ints = buffers.get("floats", empty), buffers.get("ints", empty.long())
        state = self.job.manifest.state_dict(values, floats, ints, self._frozen)
        return Look(Found(self._newest, state), is_last)

    def _last(self) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]] | None:
        """The last checkpoint, whatever its shards' versions are: where a server was started anew
        they differ."""
        found = [self._call(shard, Newest(-1)) for shard in range(len(self.job.slices))]
        if any("version" not in message for message, _ in found):
            return None
        values = torch.cat([tensors["values"] for _, tensors in found])
        return int(found[0][0]["version"]), values, found[0][1]

    def leave(self) -> None:
        """Tell the servers that nobody needs to stay for this evaluator."""
        for shard in range(len(self.job.slices)):
            with contextlib.suppress(ConnectionClosedError):  # it is gone already
                self._call(shard, Leave(self._name))

    def _call(self, shard: int, call: Call) -> tuple[Message, dict[str, torch.Tensor]]:
        return _call(self._network, shard, self.job.layout(shard), call)

    def _ask(self) -> tuple[tuple[int, torch.Tensor, dict[str, torch.Tensor]] | None, bool]:
        """The shards' parts of the newest checkpoint, if all have the same one and it is new."""
        found, over = [], False
        for shard in range(len(self.job.slices)):
            message, tensors = self._call(shard, Newest(self._newest, self._name))
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


class Flushing:
    """Events are sent on from time to time, and in the end."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._records.close()

    def _run(self) -> None:
        while not self._done.wait(FLUSH_EVERY_S):
            self._records.flush()


def _enter(
    network: SocketNetwork, told: Message, local: Mapping[str, Any]
) -> tuple[Job, SocketNetwork, Callable[[], float]]:
    """The run's job on this machine, the network with the run's own timeout, and its clock."""
    run = Configure.read(told, {})
    began_s = time.monotonic() - run.elapsed_s
    check_servers(run, network)
    job = job_from(run, with_data=True, **local)
    if job.config.threads is None:  # a machine of one's own has all its cores for one worker
        config = dataclasses.replace(job.config, threads=os.cpu_count())
        job = dataclasses.replace(job, config=config)
    terms = dataclasses.replace(network.terms, peer_timeout_s=job.config.worker_timeout)
    entered = SocketNetwork(network.addresses, terms, network.say)
    return job, entered, lambda: time.monotonic() - began_s


def states_of(run: str) -> Path:
    """Where the workers of this machine keep what no server of the run has."""
    return Path("runs") / f"cluster-{run}" / "states"


def check_servers(run: Configure, network: SocketNetwork) -> None:
    if (servers := int(run.config["servers"])) != len(network.addresses):
        raise ConfigError(
            f"the run has {servers} servers, this cluster {len(network.addresses)}; do all "
            f"machines have the same cluster file?"
        )


def _tell_of_failure(network: SocketNetwork, line: str) -> None:
    with contextlib.suppress(ConnectionClosedError):  # then the run has other troubles
        _call(network, 0, NO_PAYLOAD, TellFailure(line))


def _call(
    network: SocketNetwork, shard: int, layout: Layout, call: Call
) -> tuple[Message, dict[str, torch.Tensor]]:
    """Over a connection for this call alone."""
    end = network.connect_for_calls(shard, {}, layout, CALL_TIMEOUT_S)
    try:
        return end.call(call.message(), call.tensors(), CALL_TIMEOUT_S)
    finally:
        end.close()
