"""A server that was started by hand: it listens, and waits for the master to say what it is to be.

    python -m offbeat role ps --index 0 --cluster cluster.toml

The master comes with the run's configuration (`configure`); from then on there is a Server here,
and connections go to it. What else is asked is in roles/calls.py. Lines of events that workers and
evaluators send are kept until the master takes them along with the answer to its next call.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.cluster.relay import SOURCES, Relay, RelaySink
from offbeat.config import TrainConfig, make_config
from offbeat.data.batches import Source
from offbeat.errors import ConnectionClosedError, OffbeatError, RecipeError, in_a_line
from offbeat.loops.description import Description
from offbeat.loops.job import make_loop_job
from offbeat.recipes.base import load_recipe
from offbeat.roles.acceptor import Acceptor
from offbeat.roles.calls import (
    About,
    AskConfig,
    AskStatus,
    Call,
    Configure,
    Events,
    FetchEvents,
    Finish,
    Leave,
    Newest,
    Release,
    SendEvents,
    TellFailure,
    read_call,
)
from offbeat.roles.context import Context, SentRecords
from offbeat.roles.run import ServerRole
from offbeat.roles.server import Server
from offbeat.roles.session import POLL_S
from offbeat.run.job import Facts, Job, disagreement
from offbeat.run.making import rejoin_job
from offbeat.transport.base import Message
from offbeat.transport.sockets import SocketListener, SocketServerEnd
from offbeat.version import __version__

MASTERS_OWN = ("threads", "data_dir", "keep", "checkpoint_every", "eval_every", "summary_every")
"""Options that a master which takes another one's place may have changed."""
RELEASE_TIMEOUT_S = 10.0
JOINED_PER_EPOCH = 1000
INCARNATIONS_PER_EPOCH = 1 << 16
"""Of server 0, which gives workers theirs: those of another life are above."""
LINGER_S = 60.0
LEAVE_S = 10.0
"""How long a server that was told to leave stays for the master. A scheduler that ends a run tells
all of them at once, and there is no last checkpoint without the servers; one that is told alone is
missed no sooner than it would be anyway. Slurm and Kubernetes wait for 30 s."""
CONFIG_WAIT_S = 5.0
"""How long somebody who asks for the configuration waits for it before asking again."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the master told this server, and what became of it."""

    told: Configure
    job: Job
    role: ServerRole
    records: SentRecords
    began_s: float
    given: dict[int, int] = field(default_factory=dict)
    """The newest incarnation of each worker."""

    @property
    def server(self) -> Server:
        return self.role.server


class Bootstrap:
    """`run` returns when the run is over. `stop` ends it early; `leave` does so too, as soon as
    the master has ended the run, or has not."""

    def __init__(
        self,
        listener: SocketListener,
        index: int,
        log: logging.Logger,
        *,
        start_timeout_s: float,
        stop: threading.Event,
        leave: threading.Event | None = None,
        script: str | None = None,
        journal: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`script`: where this machine has the script of a launched run, if it does; `journal`: the
        folder for the journal of a server that promises."""
        self.index = index
        self._script = script
        self._journal = journal
        self._now = now
        self.log = log
        self._start_timeout_s = start_timeout_s
        self._stop = stop
        self._leave = leave or threading.Event()
        self._told_s: float | None = None
        """When it was told to leave."""
        self._lock = threading.Lock()
        self.serving: Run | None = None
        """What the master said that it is to be; None: nothing yet."""
        self._configured = threading.Event()
        self._relay = Relay()
        self.failures: list[str] = []
        """What workers failed with, for the master to hear."""
        self._evaluators: set[str] = set()
        """Those that did not leave yet."""
        self._closing = False
        self._released = threading.Event()
        """The master has all that there is to have, or needs nothing any more."""
        self._life = ""
        """Of the master."""
        self._master_heard_s = self._now()
        self._tick = threading.Event()
        self._acceptor = Acceptor(listener, self._serve, f"ps-{index}", log)

    @property
    def reason(self) -> str:
        """Why it is over."""
        if self._stop.is_set() or self.serving is None:
            return "it was stopped"
        return self.serving.server.reason

    def run(self) -> None:
        """Raises what the server failed with, or that nobody came."""
        deadline_s = self._now() + self._start_timeout_s
        self._acceptor.start()
        try:
            while not self._configured.wait(POLL_S):
                if self._is_to_go():
                    return
                if self._now() > deadline_s:
                    raise ConnectionClosedError(
                        f"no master came within {self._start_timeout_s:g} s (--start-timeout)"
                    )
            assert self.serving is not None
            self.serving.role.run()
            if not self.serving.server.over.is_set():
                return  # the workers look for this server again: it may be started anew
            self._released.wait(RELEASE_TIMEOUT_S)
            self._linger()
        finally:
            self._close()

    def _look(self) -> None:
        """Called as long as the run goes on."""
        if self.serving is not None:
            self.serving.records.flush()
        self._look_whether_to_leave()
        away_s = self._now() - self._master_heard_s
        if away_s > self._start_timeout_s:
            raise ConnectionClosedError(
                f"nothing was heard of the master for {away_s:.0f} s (--start-timeout)"
            )

    def _look_whether_to_leave(self) -> None:
        if not self._leave.is_set():
            return
        if self._told_s is None:
            self._told_s = self._now()
            self.log.info("told to leave: waiting up to %g s for the master's last word", LEAVE_S)
        if self._now() > self._told_s + LEAVE_S:
            self._stop.set()

    def _is_to_go(self) -> bool:
        return self._stop.is_set() or self._leave.is_set()

    def _linger(self) -> None:
        """Stay for the evaluators that were here: they may still be busy with another checkpoint,
        and are to have the last one."""
        deadline_s = self._now() + LINGER_S
        while self._evaluators and self._now() < deadline_s and not self._is_to_go():
            self._tick.wait(POLL_S)

    def _close(self) -> None:
        self._closing = True
        if self._relay.num_lost:
            self.log.warning("%d bytes of events found no room", self._relay.num_lost)
        self._acceptor.close()
        if self.serving is not None:
            self.serving.server.close(over=self.serving.server.over.is_set())
            self.serving.records.close()
        self._acceptor.join()

    # -- connections ---------------------------------------------------------------------------

    def _serve(self, end: Any, hello: Message) -> None:
        """A connection's thread."""
        assert isinstance(end, SocketServerEnd)
        run = self.serving
        if hello.get("calls"):
            self._serve_calls(end)
        elif run is None:
            end.close("this server waits for its master")
        else:
            end.layout = run.job.layout(self.index)
            run.server.serve(end, hello)

    def _serve_calls(self, end: SocketServerEnd) -> None:
        def answer(
            message: Message, tensors: Mapping[str, Tensor]
        ) -> tuple[Message, Mapping[str, Tensor]]:
            answered = self.answer(message, tensors)
            if self.serving is not None:
                end.layout = self.serving.job.layout(self.index)
            return answered

        try:
            while not self._is_over():
                end.answer_calls(answer, POLL_S)
            over = self.serving is not None and self.serving.server.over.is_set()
            end.close(
                self.serving.server.reason if self.serving else "the server was stopped", over=over
            )
        except ConnectionClosedError as error:
            if error.refused:
                end.refuse(str(error))
            end.close(str(error))
        except Exception as error:  # a call that makes no sense is its sender's affair
            self.log.error("a call failed", exc_info=error)
            end.refuse(f"server {self.index} cannot do that: {in_a_line(error)}")

    def _is_over(self) -> bool:
        return self._closing or self._stop.is_set()

    # -- what is asked -------------------------------------------------------------------------

    def answer(
        self, message: Message, tensors: Mapping[str, Tensor]
    ) -> tuple[Message, Mapping[str, Tensor]]:
        call = read_call(message, tensors)
        match call:
            case About():
                return self._about(), {}
            case Configure():
                return self._configure(call), {}
            case AskConfig():
                return self._config(call), {}
            case SendEvents(name, source, before, lines):
                if not SOURCES.fullmatch(name):
                    raise ConnectionClosedError(f"nobody here is called {name!r}", refused=True)
                self._relay.add(name, lines.numpy().tobytes(), source, before)
            case FetchEvents(got):
                return self._events(got)
            case Release():
                self._released.set()
            case Leave(who):
                self._evaluators.discard(who)
            case TellFailure(line):
                self.failures.append(line[:2000])
            case _:
                return self._ask_server(call)
        return {}, {}

    def _ask_server(self, call: Call) -> tuple[Message, Mapping[str, Tensor]]:
        if self.serving is None:
            raise ConnectionClosedError("this server waits for its master")
        answer, tensors = self.serving.server.answer_call(call)
        match call:
            case Newest(_, str(who)) if not answer["over"]:
                self._evaluators.add(who)
            case AskStatus() | Finish():
                self._master_heard_s = self._now()
        return answer, tensors

    def _events(self, got: list[Any] | None) -> tuple[Message, Mapping[str, Tensor]]:
        if self.serving is not None:
            self.serving.records.flush()
        events = Events(*self._relay.take(got), self.failures)
        return events.message(), events.lines

    def _about(self) -> Message:
        run = self.serving
        about: Message = {
            "version": __version__,
            "torch": str(torch.__version__),
            "index": self.index,
            "run": None,
        }
        if run is not None:
            about |= {
                "run": run.told.run,
                "recipe": run.job.config.recipe,
                "fingerprint": run.job.fingerprint,
                "updates": run.server.shard.version,
                "present": sorted(run.server.ledger.members),
                "finished": sorted(run.server.ledger.finished),
            }
        return about

    def _configure(self, call: Configure) -> Message:
        """The master says what this server is to be; saying it again changes nothing."""
        with self._lock:
            if self.serving is None:
                self.serving = self._make_run(call)
                self._master_heard_s = self._now()
                self._configured.set()
            else:
                self._check_same(self.serving, call)
            if call.life != self._life:  # a master that was started anew
                self._life = call.life
                self.failures.clear()
            return {"epoch": self.serving.server.ledger.epoch}

    def _check_same(self, run: Run, call: Configure) -> None:
        where = f"at version {run.server.shard.version}"
        if run.told.run != call.run:
            recipe = run.job.config.recipe
            raise ConnectionClosedError(
                f"server {self.index} serves another run: {recipe}, {where}", refused=True
            )
        before = {**run.told.config, **run.told.agreement}
        now = {**call.config, **call.agreement}
        for key in now:
            if key not in MASTERS_OWN and now[key] != before.get(key):
                raise ConnectionClosedError(
                    f"server {self.index} is in the midst of this run, {where}, with {key} "
                    f"{before.get(key)} instead of {now[key]}: go on as it was, or end the servers "
                    f"and start them again",
                    refused=True,
                )

    def _make_run(self, call: Configure) -> Run:
        try:
            job = job_from(call, with_data=False, script=self._script)
            began_s = self._now() - call.elapsed_s
            epoch = int(call.epochs[self.index])
        except (KeyError, IndexError, TypeError, ValueError, OffbeatError) as error:
            self.log.warning("cannot serve the run: %s", error)
            raise ConnectionClosedError(
                f"server {self.index} cannot serve the run: {in_a_line(error)}", refused=True
            ) from error
        records = SentRecords(self.log, lambda name: RelaySink(self._relay, name))
        context = Context(
            job=job,
            records=records,
            clock=lambda: self._now() - began_s,
            stop=self._stop,
            generation=epoch,
            stop_ends_run=False,
            look=self._look,
            journal=self._journal,
            run=call.run,
        )
        try:
            role = ServerRole(context, self.index)
        except OffbeatError as error:
            raise ConnectionClosedError(str(error), refused=True) from error
        self.log.info("serving %s, %s", job.config.recipe, job.config.discipline)
        return Run(told=call, job=job, role=role, records=records, began_s=began_s)

    def _config(self, call: AskConfig) -> Message:
        """For a worker: the configuration, its rank and its incarnation; {} means: ask again."""
        if not self._configured.wait(CONFIG_WAIT_S) or self.serving is None:
            return {}
        run = self.serving
        if not run.server.sessions.loaded.wait(CONFIG_WAIT_S):
            return {}
        elapsed_s = self._now() - run.began_s
        told = dataclasses.replace(run.told, elapsed_s=elapsed_s).message()
        with self._lock:
            rank = call.rank
            if call.join:
                rank = self._new_rank(run)
            elif rank is not None and not 0 <= rank < run.job.config.workers:
                raise ConnectionClosedError(
                    f"this run has {run.job.config.workers} workers: there is no rank {rank}; do "
                    f"all machines have the same cluster file?",
                    refused=True,
                )
            if rank is not None:
                account = run.server.ledger.accounts.get(rank)
                last = account.incarnation if account else -1
                epoch = run.server.ledger.epoch
                before = max(run.given.get(rank, -1), last, epoch * INCARNATIONS_PER_EPOCH)
                run.given[rank] = before + 1
                told |= {"rank": rank, "incarnation": before + 1}
        return told

    def _new_rank(self, run: Run) -> int:
        """For one who joins beyond those the cluster lists."""
        if not run.job.budget:
            raise ConnectionClosedError(
                "nobody can join this run: that takes an asynchronous discipline, --split shared, "
                "and data of a known length",
                refused=True,
            )
        known = [*run.given, *run.server.ledger.accounts, *run.server.ledger.members]
        # who joined before this server was started anew may not be known here
        first = run.job.config.workers + JOINED_PER_EPOCH * run.server.ledger.epoch
        return max([first - 1, *known]) + 1


def job_from(told: Configure, *, with_data: bool, script: str | None = None, **local: Any) -> Job:
    """The master's job, made anew out of what it says of it; `local` options are this machine's
    own, and so is where a launched run's `script` lies. A difference in the model or the optimizer
    is a RecipeError that names it."""
    config = config_from(told, local)
    if told.loop is None:
        data: dict[str, Source] | None = {} if with_data else None
        recipe = load_recipe(config.recipe, given=config.set)
        job = rejoin_job(config, recipe, Facts(**told.facts), data)
    elif with_data:
        raise RecipeError(
            f"the cluster runs the script {config.recipe}, which scores itself; its workers are "
            f"started with offbeat launch --role worker {config.recipe}"
        )
    else:
        job = make_loop_job(config, Description.from_json(_with_own(told.loop, script)))
    difference = disagreement(told.agreement, job.agreement)
    if difference:
        raise RecipeError(f"the recipe {config.recipe} is not the master's: {difference}")
    return job


def _with_own(loop: Mapping[str, Any], script: str | None) -> Mapping[str, Any]:
    """What a launched run trains, with this machine's own file where a class is taken out of it."""
    if loop["script"] is None:
        return loop
    if script is None:
        raise RecipeError(
            f"the script defines its optimizer's class {loop['optimizer']['kind']} itself: start "
            f"the servers with it, offbeat launch --role ps {Path(loop['script']).name}"
        )
    return {**loop, "script": script}


def config_from(told: Configure, local: Mapping[str, Any]) -> TrainConfig:
    """The run's, with what is this machine's own."""
    options = {k: v for k, v in told.config.items() if v is not None}
    given = {k: v for k, v in local.items() if v is not None}
    return make_config({**options, **given})
