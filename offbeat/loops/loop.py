"""A worker whose loop is the user's: each `step` of its optimizer is an exchange with the servers.

Made by `distribute` in a script that was launched; process.py ends it. Rank 0's keeps the run's
books too, in a thread of their own, as every master does.

A script that was started again goes through its loop again. Steps that the servers know of are not
pushed a second time, so that the run has as many as it would have had; a script that keeps where it
was (state.py) does not go through them either.
"""

import contextlib
import dataclasses
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from offbeat.errors import ConnectionClosedError, ModelError, NonFiniteLossError
from offbeat.flat import FlatModel, plain_name
from offbeat.loops.description import Description, describe_loop, option_names, plain
from offbeat.loops.job import make_loop_job
from offbeat.loops.kept import from_servers, to_servers
from offbeat.loops.scores import Told
from offbeat.loops.seat import Seat
from offbeat.loops.summaries import LoopSummaries
from offbeat.optim import numbers_of
from offbeat.roles.context import Context, Progress
from offbeat.roles.exchange import Exchange
from offbeat.roles.faults import make_faults
from offbeat.roles.keeping import Keeper
from offbeat.roles.master import RemoteServer
from offbeat.roles.run import Books
from offbeat.run.rundir import role_name
from offbeat.towers import Towers
from offbeat.transport.base import keep_trying

FIXED = (bool, float, int, str, tuple, type(None))
"""Kinds of options that cannot change in their place, as a tensor or a list can."""
SHOW_TIMEOUT_S = 120.0
"""How long a server that is being started again may take to show what it keeps."""


class StoppedError(SystemExit):
    """Raised by `step` when the run is being stopped, or is over: the script ends, and what it does
    when it ends is done."""


class Loop:
    """One thread uses it: the script's."""

    def __init__(
        self, seat: Seat, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._seat = seat
        self._stop = seat.stop
        self._optimizer = optimizer
        with self._ends():
            description = seat.agree(describe_loop(model, optimizer))
        groups = optimizer.param_groups
        self._options = [name for name in option_names(optimizer) if name in groups[0]]
        self._last_values: list[Any] = []
        self._last_rates: torch.Tensor | None = None
        self._description = description
        self._job = make_loop_job(seat.config, description)
        self._network = seat.network(self._job, description)
        flat = FlatModel(model, description.manifest)
        self._parameters = flat.parameters
        flat.keeps_gradients = True
        self._left_out = _left_out(model, optimizer, description)
        self._looks_on = flat.is_a_view
        """For changes by hand, of which a person is told once; others are written into."""
        self._shown: list[int] = []
        """How often each parameter had been changed when the last reply was in."""
        self._trained = [
            spec.name in description.optimizer.by_name for spec in flat.manifest.tensors
        ]
        self._towers = Towers([flat], [_device_of(model)])
        self._failures: list[Exception] = []
        self._told: Told | None = None
        self._summaries: LoopSummaries | None = None
        self._books = self._make_books(flat) if seat.rank == 0 else None
        if self._books is not None and (rounded := flat.manifest.rounded_in_words):
            seat.say(rounded)
        if self._books is not None:
            self._stop = self._books.closed
        self._events = seat.records.events(role_name("worker", seat.rank))
        self._faults = make_faults(
            seat.config,
            seat.rank,
            seat.incarnation,
            clock=seat.clock,
            stop=self._stop,
            orders=seat.orders,
        )
        self.step_number = 0
        self.num_steps = 0
        """Those that this process has pushed."""
        self.next_loss: float | None = None
        """What was told of the step that comes next."""
        self.meanwhile: Callable[[], None] | None = None
        self.loss = math.nan
        self._exchange = Exchange(
            self._job,
            seat.rank,
            self._towers,
            self._network,
            events=self._events,
            log=seat.log,
            clock=seat.clock,
            stop=self._stop,
            incarnation=seat.incarnation,
            connect_timeout_s=seat.connect_timeout_s,
        )
        self._keeper = Keeper(
            seat.states / role_name("worker", seat.rank), seat.config.fresh_worker_state, seat.log
        )
        self._open = contextlib.ExitStack()
        self.num_known = 0
        self._since_s = 0.0

    def _make_books(self, model: FlatModel) -> Books:
        seat, job = self._seat, self._job
        assert seat.folder is not None
        kept = to_servers(self._optimizer.state, model.parameters, self._description, job.slices)
        context = Context(
            job=dataclasses.replace(job, kept=kept),
            records=seat.records,
            clock=seat.clock,
            stop=seat.stop,
            network=self._network,
            folder=seat.folder,
            connect_timeout_s=seat.connect_timeout_s,
            patience=seat.patience,
            orders=seat.orders,
        )
        summaries = LoopSummaries(
            self._job, seat.folder, seat.log, seat.clock, self._optimizer.param_groups
        )
        self._told = Told(seat.records.events("evaluator"), seat.clock, summaries.scored)
        self._summaries = summaries
        return Books(
            context, model, threading.Event(), self._failures.append, watch=summaries.watch
        )

    @property
    def version(self) -> int:
        """How many updates are in what the model shows."""
        return self._exchange.versions[0]

    def join(self) -> None:
        """Begin with the servers' parameters: rank 0's, or those of a checkpoint."""
        if self._books is not None:
            self._books.start()
        with self._ends():
            if self._seat.patience is not None:
                self._await_servers()
            self._open.enter_context(self._exchange)
            self.num_known = self._exchange.join()
            self._go_on_after(self.num_known)
            self._take_in()
        self._since_s = self._seat.clock()

    def _await_servers(self) -> None:
        """Until they are this run's for sure: they were started by hand, and may be another's."""
        if self._books is not None and not self._books.wait_until_opened():
            raise ConnectionClosedError("the run came to nothing", over=True)

    def step(self) -> None:
        """Push what is in the parameters' gradients, and have the parameters show the reply."""
        is_asked = self._seat.rank in self._seat.orders.stopped
        if is_asked or self._stop.is_set():  # nobody drains the servers of one worker
            self._seat.log.info("told to stop")
            raise StoppedError(0)
        self.step_number += 1
        if self.step_number <= self.num_known:
            return
        self._check()
        self._faults.begin(self.step_number)
        present = self._take_gradient()
        _, is_usable = self._towers.wait()
        self._faults.computed(self._since_s, 0.0)
        self._faults.pushing(slot.values for slot in self._exchange.gradient_slots)
        pushed_s = self._seat.clock()
        with self._ends():
            self._exchange.push(
                self.step_number,
                present,
                self._exchange.versions,
                void=not is_usable,
                made=self._keep,
            )
            if self.meanwhile is not None:
                self.meanwhile()
            prepared_s = self._seat.clock()
            outcome = self._exchange.await_all()
            self._take_in()
            if self._looks_on:
                self._shown = [parameter._version for parameter in self._parameters]
            self._write_down(outcome, pushed_s, prepared_s)
            if self._exchange.is_last:
                raise ConnectionClosedError("the run is being stopped", over=True)

    def _go_on_after(self, done: int) -> None:
        """With what codecs had kept then, in this worker's former life."""
        if not self._exchange.codecs.may_keep or (kept := self._keeper.load(done)) is None:
            return
        if not self._exchange.codecs.restore(kept[0]):
            what = "what this worker keeps begins anew after step %d: it is another codec's"
            self._seat.log.warning(what, done)

    def _keep(self) -> None:
        if self._exchange.codecs.keep:
            self._keeper.save(self.step_number, self._exchange.codecs.state(), {})

    def kept(self) -> defaultdict[Any, Any]:
        """What the servers' optimizers keep for each Parameter at this moment."""
        with contextlib.ExitStack() as leaving, self._ends():
            shards = []
            for index in range(len(self._job.slices)):
                server = RemoteServer(
                    self._network,
                    index,
                    self._job.agreement,
                    self._job.layout(index),
                )
                leaving.callback(server.close)
                shards.append(keep_trying(server.show, SHOW_TIMEOUT_S, self._stop))
        return defaultdict(dict, from_servers(shards, self._parameters, self._description))

    def check_loading(self) -> None:
        """A ModelError where another state would come too late."""
        if self.num_steps:
            raise ModelError(
                "load_state_dict came after the first step of a distributed optimizer, when its "
                "servers have a state of their own: call it before"
            )

    def loaded(self) -> None:
        """The optimizer was given a state: the run has rank 0's, or that of its checkpoint."""
        self._optimizer.state.clear()

    def scored(self, scores: Mapping[str, float], most: bool | None) -> None:
        """Rank 0's are the run's. What a script that was started again goes through a second time
        says nothing of the model that it has by now."""
        if self._told is not None and self.step_number >= self.num_known:
            self._told.tell(self.version, scores, most)

    def finish(self) -> None:
        """The script is through: wait until everybody is, and the run with them."""
        try:
            self._exchange.finish_for_good(self.step_number)
        except ConnectionClosedError as error:
            if not error.over and not self._stop.is_set():
                raise
            self._seat.log.info("%s", error)

    def close(self) -> None:
        """Leave; rank 0 stays until the books are closed."""
        self._seat.log.info("left after %d steps", self.step_number)
        self._open.close()
        if self._books is not None:
            self._books.join()
        if self._summaries is not None:
            self._summaries.close()
        if self._failures:
            raise self._failures[0]

    def progress(self) -> Progress:
        mine: Progress = {
            "ready": self._exchange.has_joined,
            "steps": self.num_steps,
            "examples": 0,
            "loss": self.loss if math.isfinite(self.loss) else None,
        }
        if self._books is None:
            return mine
        latest = self._told.latest if self._told else None
        if latest is not None:
            version, scores = latest
            mine |= {"score": (version, next(iter(scores.values()))), "scores": scores}
        return {**mine, **self._books.progress()}

    # -- one step ------------------------------------------------------------------------------

    def _check(self) -> None:
        """That the servers train what the script does."""
        if self.next_loss is not None and not math.isfinite(self.next_loss):
            raise NonFiniteLossError(
                f"the loss became {self.next_loss} in worker {self._seat.rank} at step "
                f"{self.step_number}: a lower learning rate is the usual remedy, or data without "
                f"NaN and infinities. The state before it is kept in the run's last checkpoint."
            )
        for name, parameter in self._left_out:
            if parameter.requires_grad and parameter.grad is not None:
                raise ModelError(
                    f"parameter {name} has a gradient, and was frozen when offbeat.distribute was "
                    f"called, so that the servers do not have it: have it require a gradient "
                    f"there, and freeze it after that until it is to be trained"
                )
        if self._shown and self._shown != [p._version for p in self._parameters]:
            self._seat.say(
                f"before step {self.step_number} the model's parameters were changed by something "
                f"else than the optimizer's step: the servers do not know of it, and theirs come "
                f"back with each step"
            )
            self._shown = []
            self._looks_on = False

    def _take_gradient(self) -> list[bool]:
        slots = self._exchange.gradient_slots
        rates = self._rates()
        for slot in slots:
            slot.rates.copy_(rates)
        self._towers.write_buffers(slots[0].floats, slots[0].ints)
        self._towers.computed()
        if self._job.manifest.is_sparse:
            present = self._towers.take_rows(slots, self._exchange.rows)
        else:
            present = self._towers.take_gradient([slot.values for slot in slots])
        if all(self._trained):
            return present
        return [here and trained for here, trained in zip(present, self._trained, strict=True)]

    def _rates(self) -> torch.Tensor:
        """The numbers among the optimizer's options, as they are now; most steps leave them as they
        were."""
        groups = self._optimizer.param_groups
        values = [group[name] for group in groups for name in self._options]
        is_fixed = all(type(value) in FIXED for value in values)
        if self._last_rates is not None and is_fixed and values == self._last_values:
            return self._last_rates
        numbers = [
            number
            for group in groups
            for number in numbers_of({name: plain(group[name]) for name in self._options})
        ]
        if len(numbers) != self._job.num_rates:
            raise ModelError(
                "an option of the optimizer is another kind of value than it was at the start: "
                "numbers stay numbers"
            )
        self._last_values = values
        self._last_rates = torch.tensor(numbers, dtype=torch.float64)
        return self._last_rates

    def _take_in(self) -> None:
        moved = self._towers.refresh()
        if moved and self.num_steps:
            self._seat.log.warning("put back into place: %s", ", ".join(moved))
        self._towers.read_buffers(*self._exchange.buffers)

    def _write_down(self, outcome: str, pushed_s: float, prepared_s: float) -> None:
        now_s = self._seat.clock()
        self.loss, self.next_loss = math.nan if self.next_loss is None else self.next_loss, None
        self.num_steps += 1
        if self._summaries is not None:
            self._summaries.stepped(self.loss, self.version)
        compute_s, prepare_s = pushed_s - self._since_s, prepared_s - pushed_s
        parts = (self._since_s, compute_s, prepare_s, now_s - prepared_s)
        traffic = self._exchange.traffic.words()
        self._events.record_line(
            _step_line, self._seat.rank, self.step_number, self.loss, outcome, *parts, traffic
        )
        self._since_s = now_s

    @contextlib.contextmanager
    def _ends(self) -> Iterator[None]:
        """Have the end of the run be the end of the script."""
        try:
            yield
        except ConnectionClosedError as error:
            if not error.over and not self._stop_is_set():
                raise
            self._seat.log.info("%s", error)
            raise StoppedError(0) from error

    def _stop_is_set(self) -> bool:
        return self._seat.stop.is_set() or self._stop.is_set()


def _left_out(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, description: Description
) -> list[tuple[str, torch.nn.Parameter]]:
    """What the optimizer has, and the servers do not, since it does not train as yet."""
    known = {spec.name for spec in description.manifest.tensors}
    members = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(plain_name(name), p) for name, p in model.named_parameters()]
    return [(name, p) for name, p in named if id(p) in members and name not in known]


def _device_of(model: torch.nn.Module) -> torch.device:
    return next(p.device for p in model.parameters() if p.requires_grad)


def _step_line(
    worker: int,
    step: int,
    loss: float,
    outcome: str,
    start_s: float,
    compute_s: float,
    prepare_s: float,
    exchange_s: float,
    traffic: str,
) -> str:
    return (
        f'{{"kind": "step", "worker": {worker}, "step": {step}, "epoch": 0, '
        f'"loss": {loss if math.isfinite(loss) else "null"}, "examples": 0, '
        f'"outcome": "{outcome}", "start_s": {start_s:.6f}, "compute_s": {compute_s:.6f}, '
        f'"prepare_s": {prepare_s:.6f}, "exchange_s": {exchange_s:.6f}'
        f"{traffic}}}"
    )
