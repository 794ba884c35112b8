"""A run on a virtual clock: the real ledger and discipline of every server, and models of all that
takes time.

    run = VirtualRun(Setup(discipline=ApplyReply, workers=64, servers=1), timing, seed=0)
    figures = run.go(gradients=10_000, warm_up=1_000)
    figures.gradients_per_s, figures.staleness

A worker computes, waits where it is held up, pushes to every server, prepares its next batch, and
goes on when all have replied. A server deals with one push after the other: it looks at it, asks
its ledger, and carries the actions out in their order, each of which takes time; a reply leaves
when it is made. Updates are counted, not made. What is drawn by chance depends on the seed alone,
so that the same run comes out the same to the byte.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from offbeat.accounts import DROPPED
from offbeat.disciplines import Apply, Discipline, Reply
from offbeat.ledger import Ledger
from offbeat.pushes import Action, Copy, PushRecord
from offbeat.simulation.clock import Clock, Link
from offbeat.simulation.timing import ServiceTimes, StepTimes, Timing

COMPUTED, HELD_UP, PREPARED, ARRIVED, SERVED, REPLIED, OVER, UP, DOWN, TICK = range(10)
"""Events; each is one of these, plus sixteen times whose it is."""
TICK_S = 0.05
"""How often a live server tells its discipline the time."""
BYTES_PER_S = 1e6 / 8
"""Of a Mbit/s."""
PART_BYTES = 1 << 18
"""What a connection sends before another one's turn comes: so much fits into its buffers."""
MOST_PARTS = 16
"""Of a message: more would take longer, and change little."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated."""

    discipline: Callable[[Sequence[int]], Discipline]
    """Makes one, for workers of these ranks."""
    workers: int
    servers: int = 1
    cores: float = math.inf
    """That all of them share; inf: each has its own."""
    mbit: float = math.inf
    """A second, of each server's link, each way; the timing's ways up and down come on top."""
    delay_ms: float = 0.0
    """There and back; likewise."""
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    """How many times as long as it needs to each worker that is held up takes for a step."""


@dataclass
class Figures:
    """Of a stretch of a run."""

    time_s: float = 0.0
    gradients: int = 0
    """That were answered."""
    updates: int = 0
    """Of the first server."""
    answered: int = 0
    """Replies of all servers."""
    dropped: int = 0
    """Gradients that they dropped."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Of gradients that were applied, over all servers."""
    steps_s: float = 0.0
    """That workers took for their steps."""
    computed_s: float = 0.0
    """Of that, from a step's begin until its gradient was pushed."""
    waited_s: float = 0.0
    """Of that, in which they had nothing to do but to wait for replies."""
    served_s: float = 0.0
    """In which servers had something to do, one after the other."""

    @property
    def gradients_per_s(self) -> float:
        return self.gradients / self.time_s


class _Lane:
    """A thread of a server: what it is to do next, and who waits for it."""

    __slots__ = ("is_busy", "items", "number", "server", "waiting")

    def __init__(self, number: int, server: "_Server") -> None:
        self.number = number
        self.server = server
        self.items: deque[tuple[float, Sequence[Action]]] = deque()
        """How long each takes, and what has happened then."""
        self.waiting: deque[int] = deque()
        """Workers whose pushes are here."""
        self.is_busy = False


class _Server:
    __slots__ = ("down", "index", "ledger", "services", "up", "version")

    def __init__(
        self, index: int, ledger: Ledger, services: Iterator[ServiceTimes], up: Link, down: Link
    ) -> None:
        self.index = index
        self.ledger = ledger
        self.services = services
        self.version = 0
        self.up = up
        self.down = down


class _Worker:
    __slots__ = (
        *("awaited", "bases", "began_s", "factor", "is_prepared", "prepared_s", "pushed_s"),
        *("rank", "ready_s", "sequence", "steps", "times"),
    )

    def __init__(self, rank: int, num_servers: int, steps: Iterator[StepTimes]) -> None:
        self.rank = rank
        self.steps = steps
        self.times = next(steps)
        self.factor = 0.0
        """How many times as long as it works it is held up."""
        self.sequence = 1
        self.bases = [0] * num_servers
        """The versions that it computes on."""
        self.awaited = 0
        """How many servers have not replied."""
        self.is_prepared = False
        self.began_s = self.pushed_s = self.ready_s = 0.0
        """When its step began, its gradient was pushed, and its next batch was there."""
        self.prepared_s = 0.0
        """How long the batch of this step took."""


class VirtualRun:
    def __init__(self, setup: Setup, timing: Timing, *, seed: int = 0) -> None:
        self._setup = setup
        self._timing = timing
        self._clock = Clock(max(1.0, setup.cores / timing.threads))
        self._figures = Figures()
        self._is_measured = False
        self._num_done = 0
        self._apart_s = setup.delay_ms / 2000
        self._is_linked = setup.mbit < math.inf
        chance = random.Random(f"{seed}: servers")
        slices = timing.cut(setup.servers)
        self._merge_s = slices.merge_s
        self._servers = [
            _Server(
                index,
                self._make_ledger(),
                slices.services_of(chance),
                self._make_link(UP | index << 4, timing.up_bytes),
                self._make_link(DOWN | index << 4, timing.down_bytes),
            )
            for index in range(setup.servers)
        ]
        self._lanes = [self._make_lanes(server, slices) for server in self._servers]
        self._workers = [self._make_worker(rank, seed) for rank in range(setup.workers)]

    def _make_link(self, event: int, num_bytes: float | None) -> Link:
        """One server's, for its part of so many bytes."""
        assert num_bytes is not None or not self._is_linked, "there is something to carry"
        each = (num_bytes or 0.0) / self._setup.servers
        num_parts = min(MOST_PARTS, math.ceil(each / PART_BYTES)) or 1
        return Link(self._clock, event, each / (self._setup.mbit * BYTES_PER_S), num_parts)

    def _make_ledger(self) -> Ledger:
        ranks = range(self._setup.workers)
        ledger = Ledger(self._setup.discipline(ranks))
        for rank in ranks:
            ledger.join(rank, 0)
        return ledger

    def _make_lanes(self, server: _Server, slices: Timing) -> list[_Lane]:
        """One; without a lock each worker's session is a thread of its own, but for small
        slices."""
        is_parallel = not server.ledger.discipline.locked and slices.is_large
        count = self._setup.workers if is_parallel else 1
        return [_Lane(number, server) for number in range(count)]

    def _make_worker(self, rank: int, seed: int) -> _Worker:
        apart = math.isinf(self._setup.cores)
        steps = self._timing.steps_of(rank, seed, apart=apart)
        worker = _Worker(rank, self._setup.servers, steps)
        worker.factor = self._setup.slowdowns.get(rank, 1.0) - 1
        # workers come one after the other
        share = (rank + 0.5) / self._setup.workers
        self._clock.work(share * worker.times.compute_s, COMPUTED | rank << 4)
        return worker

    # -- the course of events ------------------------------------------------------------------

    def go(self, gradients: int, warm_up: int = 0) -> Figures:
        """Until so many gradients were answered after the first `warm_up`; the figures are
        theirs."""
        if type(self._servers[0].ledger.discipline).on_tick is not Discipline.on_tick:
            for server in self._servers:
                self._clock.after(TICK_S, TICK | server.index << 4)
        self._run(warm_up)
        self._figures, self._is_measured = Figures(), True
        began_s, version = self._clock.now_s, self._servers[0].version
        self._run(gradients)
        found = self._figures
        found.time_s = self._clock.now_s - began_s
        found.updates = self._servers[0].version - version
        return found

    def _run(self, gradients: int) -> None:
        self._num_done = 0
        next_event = self._clock.next
        handlers = (
            self._computed,
            self._push,
            self._prepared,
            self._arrived,
            self._served,
            self._replied,
            self._go_on,
            self._up,
            self._down,
            self._tick,
        )
        while self._num_done < gradients:
            event = next_event()
            handlers[event & 15](event >> 4)

    def _computed(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker.factor:
            own_s = self._clock.now_s - worker.began_s + worker.prepared_s
            self._clock.after(worker.factor * own_s, HELD_UP | rank << 4)
        else:
            self._push(rank)

    def _push(self, rank: int) -> None:
        worker, clock = self._workers[rank], self._clock
        worker.pushed_s = clock.now_s
        worker.is_prepared = False
        worker.awaited = len(self._servers)
        for server in self._servers:
            if self._is_linked:
                server.up.carry(rank)
            else:
                self._arrive(server, worker)
        clock.work(worker.times.prepare_s, PREPARED | rank << 4)

    def _up(self, index: int) -> None:
        server = self._servers[index]
        if (rank := server.up.over()) is not None:
            self._arrive(server, self._workers[rank])

    def _arrive(self, server: _Server, worker: _Worker) -> None:
        place = worker.rank * len(self._servers) + server.index
        self._clock.after(worker.times.up_s + self._apart_s, ARRIVED | place << 4)

    def _prepared(self, rank: int) -> None:
        worker = self._workers[rank]
        worker.is_prepared = True
        worker.ready_s = self._clock.now_s
        if not worker.awaited:
            self._clock.after(worker.times.down_s, OVER | rank << 4)

    def _replied(self, rank: int) -> None:
        worker = self._workers[rank]
        worker.awaited -= 1
        if worker.is_prepared and not worker.awaited:
            self._clock.after(worker.times.down_s, OVER | rank << 4)

    def _go_on(self, rank: int) -> None:
        """The step is over, and the next one begins."""
        worker, now_s = self._workers[rank], self._clock.now_s
        self._num_done += 1
        worker.prepared_s = worker.ready_s - worker.pushed_s
        if self._is_measured:
            self._count(worker, now_s)
        worker.sequence += 1
        worker.began_s = now_s
        worker.times = times = next(worker.steps)
        self._clock.work(times.compute_s, COMPUTED | worker.rank << 4)

    def _count(self, worker: _Worker, now_s: float) -> None:
        found = self._figures
        found.gradients += 1
        found.steps_s += now_s - worker.began_s
        found.computed_s += worker.pushed_s - worker.began_s
        found.waited_s += now_s - worker.ready_s

    # -- a server ------------------------------------------------------------------------------

    def _arrived(self, place: int) -> None:
        rank, index = divmod(place, len(self._servers))
        lanes = self._lanes[index]
        lane = lanes[rank if len(lanes) > 1 else 0]
        if lane.is_busy:
            lane.waiting.append(rank)
        else:
            self._take(lane, rank)

    def _take(self, lane: _Lane, rank: int) -> None:
        """A push is looked at."""
        server, worker = lane.server, self._workers[rank]
        record = PushRecord(
            rank,
            0,
            worker.sequence,
            worker.sequence - 1,
            worker.bases[server.index],
            received_s=self._clock.now_s,
        )
        self._begin(lane, server.ledger.push(record, server.version), looks=True)

    def _begin(self, lane: _Lane, actions: Sequence[Action], *, looks: bool) -> None:
        """Cut actions into items, each of which ends with a reply."""
        times = next(lane.server.services)
        takes_s, so_far = times.look_s if looks else 0.0, []
        for action in actions:
            so_far.append(action)
            if isinstance(action, Reply):
                lane.items.append((takes_s + times.reply_s, so_far))
                takes_s, so_far = 0.0, []
            elif isinstance(action, Apply):
                takes_s += times.apply_s + (len(action.pushes) - 1) * self._merge_s
            elif isinstance(action, Copy):
                takes_s += self._merge_s
        if takes_s or so_far:
            lane.items.append((takes_s, so_far))
        lane.is_busy = bool(lane.items)
        if lane.is_busy:
            self._serve(lane)

    def _serve(self, lane: _Lane) -> None:
        place = lane.number * len(self._servers) + lane.server.index
        self._clock.work(lane.items[0][0], SERVED | place << 4)

    def _served(self, place: int) -> None:
        number, index = divmod(place, len(self._servers))
        lane = self._lanes[index][number]
        takes_s, actions = lane.items.popleft()
        self._figures.served_s += takes_s
        self._carry_out(lane.server, actions)
        if lane.items:
            self._serve(lane)
            return
        lane.is_busy = False
        while lane.waiting and not lane.is_busy:
            self._take(lane, lane.waiting.popleft())

    def _carry_out(self, server: _Server, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Reply):
                self._reply(server, action.worker)
            elif isinstance(action, Apply):
                self._apply(server, action)
        server.ledger.take_decided()

    def _apply(self, server: _Server, action: Apply) -> None:
        ledger = server.ledger
        records = ledger.take_part(action.pushes, server.version)
        server.version += 1
        ledger.applied(action.pushes, server.version, self._clock.now_s)
        if self._is_measured:
            for record in records:
                assert record.staleness is not None, "it was applied"
                self._figures.staleness[record.staleness] += 1

    def _reply(self, server: _Server, rank: int) -> None:
        worker = self._workers[rank]
        record = server.ledger.under_way[rank]
        server.ledger.replied(record)
        self._figures.answered += 1
        self._figures.dropped += record.outcome == DROPPED
        worker.bases[server.index] = server.version
        if self._is_linked:
            server.down.carry(rank)
        elif self._apart_s:
            self._clock.after(self._apart_s, REPLIED | rank << 4)
        else:
            self._replied(rank)

    def _down(self, index: int) -> None:
        if (rank := self._servers[index].down.over()) is not None:
            self._clock.after(self._apart_s, REPLIED | rank << 4)

    def _tick(self, index: int) -> None:
        server, lane = self._servers[index], self._lanes[index][0]
        if not lane.is_busy:
            self._begin(lane, server.ledger.tick(self._clock.now_s), looks=False)
        self._clock.after(TICK_S, TICK | index << 4)
