"""The engine `cluster`: the master's side of a run whose roles were started by hand, on machines of
their own.

The master tells every server what the run is, before anything else is asked of it, and keeps what
servers, workers and evaluators have for the run's folder, which lives here. Called by the api, for
`offbeat role master --cluster cluster.toml`.
"""

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.relay import SOURCES
from offbeat.engines.base import score_of
from offbeat.engines.succession import Succession
from offbeat.engines.threads import ThreadEngine
from offbeat.errors import ConnectionClosedError, NonFiniteLossError
from offbeat.flat import FlatModel
from offbeat.recipes.base import metric_name
from offbeat.roles.calls import AskStatus, Configure, Events, FetchEvents, Finish, Release, is_a
from offbeat.roles.context import Context, Progress
from offbeat.roles.master import CALL_TIMEOUT_S, POLL_S, Patience
from offbeat.run.event_files import EventFile
from offbeat.run.job import Job
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder
from offbeat.transport.base import CallEnd, Layout, Message
from offbeat.transport.sockets import SocketNetwork

DRAIN_S = 5.0
"""How long a master whose run is over waits for the workers' last words."""


class ClusterEngine(ThreadEngine):
    """The master and rank 0, and then the evaluator: rank 0 needs the machine until it is through.
    `replicas`: a model for each of these two."""

    def __init__(
        self,
        job: Job,
        replicas: Sequence[FlatModel],
        folder: RunFolder,
        display: Display,
        clock: Callable[[], float],
        *,
        endpoint: Endpoint,
        threads: int | None,
        incarnation: int = 0,
    ) -> None:
        """`threads`: of each worker, where the user said how many. `incarnation` is new to the
        run's checkpoints, where there are any."""
        super().__init__(job, folder, display, clock)
        mine = Succession.begin(folder, len(endpoint.hosts.addresses), incarnation)
        network = MasterNetwork(endpoint, job, folder, mine, clock, display.notice, threads)
        network.failed = self._failed_elsewhere
        rank_0, of_evaluator = replicas
        context = Context(
            job=job,
            records=self._records,
            clock=clock,
            stop=self._stop,
            say=display.notice,
            network=network,
            folder=folder,
            states=folder.states,
            generation=mine.incarnation,
            model=rank_0,
            summaries=self._summaries,
            orders=self._orders,
            connect_timeout_s=endpoint.start_timeout_s,
            patience=Patience(
                job.config.workers,
                start_s=endpoint.start_timeout_s,
                absent_s=job.config.worker_timeout,
                say=display.notice,
                now=clock,
            ),
        )
        self._master = self._make(context, "master")
        self._evaluators = []
        if job.test is not None:
            looking_on = dataclasses.replace(context, stop=self._give_up, model=of_evaluator)
            self._evaluators.append(self._make(looking_on, "evaluator"))

    def _go(self) -> None:
        self._master.start()
        self._watch(self._master.is_alive)
        self._let_go()
        for evaluator in self._evaluators:
            evaluator.start()
            self._watch(evaluator.is_alive)

    def _ranks_here(self) -> Collection[int]:
        return (0,)  # the others are somebody else's processes

    def _failed_elsewhere(self, line: str) -> None:
        """A worker's loss is no number any more: the run is to stop."""
        if not self._stop.is_set():
            self.failures.append(NonFiniteLossError(line))
            self.stop()

    def status(self) -> Status:
        evaluator = next(iter(self._progress("evaluator")), {})
        return status_of_master(self.job, self.clock(), self._master.progress(), evaluator)


def status_of_master(job: Job, at_s: float, master: Progress, scored: Progress) -> Status:
    """Most workers are elsewhere: what they did is known by the servers' versions. `scored`: how
    far whoever scores is."""
    num_gradients = master["version"] * job.make_discipline().gradients_per_update
    scores = scored.get("scores", {})
    return Status(
        num_gradients=num_gradients,
        num_examples=num_gradients * job.step_size,
        at_s=at_s,
        loss=master["loss"],
        staleness=master["staleness"],
        lr=master.get("lr"),
        metric_name=next(iter(scores), metric_name(job.recipe)),
        score=score_of(scored),
        scores=scores,
        version=master["version"],
        waits_for="the first gradient" if master["opened"] else "the servers",
    )


class MasterNetwork(SocketNetwork):
    """The servers, as the master reaches them."""

    def __init__(
        self,
        endpoint: Endpoint,
        job: Job,
        folder: RunFolder,
        succession: Succession,
        clock: Callable[[], float],
        say: Callable[[str], None],
        threads: int | None,
        *,
        loop: dict[str, Any] | None = None,
    ) -> None:
        """`loop`: of a launched run, what its script trains."""
        terms = dataclasses.replace(endpoint.terms, peer_timeout_s=job.config.worker_timeout)
        super().__init__(endpoint.hosts.addresses, terms, say)
        self.failed: Callable[[str], None] = lambda line: None
        self._folder = folder
        self._succession = succession
        self._clock = clock
        self._files: dict[str, EventFile] = {}
        self._writing = threading.Lock()
        """The books are not alone: who asks for norms, or for a script's state, connects too."""
        options = {**job.config.to_json(), "threads": threads}
        for own in ("run_dir", "device", "quiet", "tensorboard", "log_every", "track"):
            options.pop(own)  # each machine's own affair
        self._told = Configure(
            run=succession.run,
            life=secrets.token_hex(8),
            config=options,
            facts=dataclasses.asdict(job.facts),
            agreement=job.agreement,
            epochs=[],
            elapsed_s=0.0,
            loop=loop,
        )

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> CallEnd:
        """A connection to a server that knows what the run is."""
        end = super().connect_for_calls(shard, hello, layout, timeout_s)
        try:
            epochs = list(self._succession.epochs)
            told = dataclasses.replace(self._told, epochs=epochs, elapsed_s=self._clock())
            with self.waiting(shard):
                answer, _ = end.call(told.message(), {}, CALL_TIMEOUT_S)
        except ConnectionClosedError:
            end.close()
            raise
        self._succession.remember(shard, int(answer["epoch"]))
        got = self._succession.got.setdefault(shard, [])
        return CollectingEnd(end, self._collect, got, self._succession.write)

    def _collect(self, events: Events) -> None:
        """Keep lines of events in the run's folder, each source's in a file of its own."""
        for name, lines in events.lines.items():
            if not SOURCES.fullmatch(name):
                raise ConnectionClosedError(f"a server has events of {name!r}")
            with self._writing:
                if name not in self._files:
                    self._files[name] = EventFile.create(self._folder.events, name)
                self._files[name].write(lines.numpy().tobytes().decode(errors="replace"))
        for line in events.failures:
            self.failed(line)


class CollectingEnd(CallEnd):
    """A connection for calls over which what a server has for the run's folder is fetched, as often
    as somebody looks at it."""

    def __init__(
        self,
        end: CallEnd,
        collect: Callable[[Events], None],
        got: list[Any],
        remember: Callable[[], None],
    ) -> None:
        """`got` outlives the connection: an answer that comes again is known by it. `remember` is
        called when it has changed."""
        self._end = end
        self._collect = collect
        self._got = got
        self._remember = remember

    def call(
        self, message: Message, tensors: Mapping[str, Tensor], timeout_s: float
    ) -> tuple[Message, dict[str, Tensor]]:
        answer = self._end.call(message, tensors, timeout_s)
        if is_a(AskStatus, message):
            self._fetch(timeout_s)
        elif is_a(Finish, message):
            self._drain(timeout_s)
        return answer

    def _drain(self, timeout_s: float) -> None:
        """The workers were told that the run is over: collect what they still have to tell."""
        deadline_s = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline_s:
            status, _ = self._end.call(AskStatus().message(), {}, timeout_s)
            if not self._fetch(timeout_s) and not status["present"]:
                break
            threading.Event().wait(POLL_S / 2)
        self._end.call(Release().message(), {}, timeout_s)

    def _fetch(self, timeout_s: float) -> bool:
        """Keep what there is, unless it is here already; whether there were any lines."""
        answer = self._end.call(FetchEvents(self._got).message(), {}, timeout_s)
        events = Events.read(*answer)
        is_new = events.number != self._got
        self._collect(events if is_new else dataclasses.replace(events, lines={}))
        self._got[:] = events.number
        if is_new and events.lines:
            self._remember()
        return bool(events.lines)

    def close(self) -> None:
        self._end.close()
