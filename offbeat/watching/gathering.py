"""What is gathered of a run's events while it goes on, for those who look at it.

Pure: whoever has the events (following.py, or a test) adds them one by one, and says when a tick is
over; summary.py has what has changed since an earlier one. Its memory does not grow with the run.

    gathered = Gathered(described)
    for event in events:
        gathered.add(event)
    gathered.tick()
    gathered.gradients, gathered.rates()
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.accounts import accounts_from
from offbeat.config import make_config
from offbeat.report.record import Kept
from offbeat.watching.scores import Scores
from offbeat.watching.series import Axis
from offbeat.watching.waits import Waits
from offbeat.watching.workers import ShardState, Step, WorkerState

SIZE = 240
"""Stretches of time of what is shown of the whole run; an even number."""
SIZES = ((8, 160), (24, 80))
"""Of each worker, for so many of them; of more it is SIZE_OF_MANY."""
SIZE_OF_MANY = 48
NUM_RECENT = 256
"""Steps that are shown one by one, of all workers together."""
MAX_RECENT = 24
"""Of one."""
RATE_S = 5.0
"""A rate is that of the last so many seconds."""
NUM_MOMENTS = 120
NUM_CHECKPOINTS = 20
STEP_PARTS = ("compute_s", "prepare_s", "exchange_s")
RUNNING, STARTING, KILLED = "running", "starting", "killed"


class Gathered:
    """`described` is what config.json says."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        config, job = described["config"], described.get("job") or {}
        self.num_workers = int(config["workers"])
        self.ticks = 0
        self.status = STARTING
        self.reason: str | None = None
        self.at_s = 0.0
        """The latest moment that there is an event of."""
        self.scores = Scores(str(described["metric"]), described.get("metrics") or {})
        self.mixed = 0
        self.gradients = self.examples = 0
        self.lost = 0
        self.unreadable = 0
        self.places: dict[str, dict[str, Any]] = {}
        """Of each role: host, pid, and when that process began."""
        self._config, self._job = config, job
        self._resolved = described.get("resolved") or {}
        self._in_rounds = bool(job.get("in_rounds"))
        self.began_s: float | None = None
        self.fine = Axis(SIZE)
        self.coarse = Axis(_size_for(self.num_workers))
        self.columns = {
            name: self.fine.column()
            for name in (
                *("gradients", "examples", "dropped", "rejected"),
                *("losses", "num_losses", "stale", "num_stale", "rates", "num_rates"),
            )
        }
        self.most_stale = self.fine.column(adds=False)
        self.num_recent = max(3, min(MAX_RECENT, NUM_RECENT // max(1, self.num_workers)))
        self.workers: dict[int, WorkerState] = {}
        self.shards: dict[int, ShardState] = {}
        self.lr: float | None = None
        self._end_s = -1.0
        self._was_behind = False
        self.history: deque[tuple[float, int, int, dict[int, int]]] = deque()
        self.moments: deque[tuple[float, str, str]] = deque(maxlen=NUM_MOMENTS)
        self.checkpoints: deque[tuple[int, float]] = deque(maxlen=NUM_CHECKPOINTS)
        self.changed = {"moments": 0, "checkpoints": 0, "scores": 0}
        for rank in range(self.num_workers):
            self._worker(rank)
        for rank, times in _slowdowns(config).items():
            self._worker(rank).slowdown = times

    # -- events in -----------------------------------------------------------------------------

    def add(self, event: Mapping[str, Any]) -> None:
        try:
            self._add(event)
        except (LookupError, TypeError, ValueError, OverflowError):
            self.unreadable += 1

    def _add(self, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "push":
                self._add_push(event)
            case "step":
                self._add_step(event)
            case "score":
                self._add_score(event)
            case "run":
                self._add_phase(event)
            case "rejoin":
                self._add_rejoin(event)
            case "diverged":
                who = f"worker {event['worker']}"
                self._moment(event["at_s"], "bad", f"the loss of {who} is no number any more")
            case "unreadable":
                self.unreadable += 1

    def _since_begin(self, at_s: float) -> float:
        """Seconds of training."""
        if at_s > self.at_s:
            self.at_s = at_s
        if self.began_s is None:
            self.began_s = at_s
            for name in self.changed:  # what was shown of them was counted from elsewhere
                self.changed[name] = self.ticks + 1
        return at_s - self.began_s

    def _worker(self, rank: int) -> WorkerState:
        if rank not in self.workers:
            self.workers[rank] = WorkerState(rank, self.coarse)
        return self.workers[rank]

    def _shard(self, index: int) -> ShardState:
        if index not in self.shards:
            self.shards[index] = ShardState(self.fine.column(adds=False), Waits(self.num_workers))
        return self.shards[index]

    def _add_push(self, event: Mapping[str, Any]) -> None:
        received_s, replied_s = event["received_s"], event["replied_s"]
        at_s = self._since_begin(received_s)
        rank = event["worker"]
        worker, shard = self._worker(rank), self._shard(event["shard"])
        self._see_incarnation(worker, event.get("incarnation", 0), received_s)
        self.mixed += bool(event["mixed"])
        if replied_s is not None:
            worker.held(event["sequence"], replied_s - received_s)
            shard.waits.add(rank, received_s, replied_s)
        if event["outcome"] != "applied":
            return
        version, staleness = event["version"], event["staleness"]
        fine, coarse = self.fine.index(at_s), self.coarse.index(at_s)
        shard.version = version
        values = shard.versions.values
        values[fine] = max(values[fine], version)
        self.columns["stale"].values[fine] += staleness
        self.columns["num_stale"].values[fine] += 1
        most = self.most_stale.values
        most[fine] = max(most[fine], staleness)
        worker.stale.values[coarse] += staleness
        worker.num_stale.values[coarse] += 1
        worker.staleness.append(staleness)
        if (lr := event.get("lr")) is not None:
            self.lr = lr
            self.columns["rates"].values[fine] += lr
            self.columns["num_rates"].values[fine] += 1

    def _see_incarnation(self, worker: WorkerState, incarnation: int, at_s: float) -> None:
        """Where nobody starts workers again, this is how it shows that one was."""
        if incarnation > worker.incarnation:
            worker.incarnation = incarnation
            if worker.num_steps and self._job.get("engine") == "cluster":
                self._moment(at_s, "note", f"worker {worker.rank} has come again")

    def _add_step(self, event: Mapping[str, Any]) -> None:
        compute_s, prepare_s, exchange_s = (event[part] for part in STEP_PARTS)
        took_s = compute_s + prepare_s + exchange_s
        start_s = self._since_begin(event["start_s"])
        if event["start_s"] + took_s > self.at_s:
            self.at_s = event["start_s"] + took_s
        worker = self._worker(event["worker"])
        end_s = start_s + took_s
        step = Step(event["step"], start_s, compute_s, prepare_s, exchange_s, end_s)
        worker.stepped(event, step)
        worker.put_aside(step, self.ticks)
        self.gradients += 1
        self.examples += event["examples"]
        fine, coarse = self.fine.index(end_s), self.coarse.index(end_s)
        columns = self.columns
        columns["gradients"].values[fine] += 1
        columns["examples"].values[fine] += event["examples"]
        if (outcome := event["outcome"]) in worker.outcomes:
            columns[outcome].values[fine] += 1
        loss = event["loss"]
        if loss is not None and math.isfinite(loss):
            worker.loss = loss
            columns["losses"].values[fine] += loss
            columns["num_losses"].values[fine] += 1
            worker.losses.values[coarse] += loss
            worker.num_losses.values[coarse] += 1

    def _add_score(self, event: Mapping[str, Any]) -> None:
        self.scores.add(event)
        self.changed["scores"] = self.ticks + 1

    def _add_rejoin(self, event: Mapping[str, Any]) -> None:
        what = "again" if event["epoch"] == event["former_epoch"] else "after its restart"
        shard, rank = event["shard"], event["worker"]
        self._moment(event["at_s"], "note", f"worker {rank} found server {shard} {what}")

    def _add_phase(self, event: Mapping[str, Any]) -> None:
        at_s = event.get("at_s")
        if at_s is not None:
            self.at_s = max(self.at_s, at_s)
        match event["phase"]:
            case "start" if at_s is not None and at_s > self._end_s:
                self.status, self.reason = RUNNING, None
                self._place("launcher", event)
                if self._end_s >= 0:
                    self._moment(at_s, "note", "the run goes on")
            case "end" if at_s is not None and at_s >= self._end_s:
                self._end_s = at_s
                self.status, self.reason = event["status"], event.get("reason")
                good = self.status == "finished"
                self._moment(at_s, "good" if good else "bad", self.ending())
            case "restart":
                self._add_restart(event)
            case "placed":
                self._place(_role(event["role"], event["index"]), event)
            case "load":
                self._add_load(event)
            case "checkpoint":
                self.scores.committed(event["version"], event["at_s"])
                self.checkpoints.append((event["version"], event["at_s"]))
                self.changed["checkpoints"] = self.ticks + 1
            case "books":
                self._add_books(event["shards"], event["at_s"])
            case "fall" if "version" in event and "shard" not in event:
                text = f"the learning rate falls at version {event['version']}"
                self._moment(event["at_s"], "note", text)
            case "order":
                self._add_order(event)

    def ending(self) -> str:
        return f"the run is {self.status}{f': {self.reason}' if self.reason else ''}"

    def _place(self, name: str, event: Mapping[str, Any]) -> None:
        if "pid" in event:
            self.places[name] = {key: event.get(key) for key in ("host", "pid", "began")}

    def _add_restart(self, event: Mapping[str, Any]) -> None:
        role, index, why = event["role"], event["index"], event["reason"]
        at_s = event["at_s"]
        ranks = event.get("crew") or ([] if role == "ps" else [0 if role == "master" else index])
        if role == "ps":
            self._shard(index).restarts += 1
        elif role != "evaluator":
            for rank in ranks:
                worker = self._worker(rank)
                worker.restarts += 1
                worker.away_since_s, worker.why_away = at_s, why
        who = "server" if role == "ps" else role
        name = who if role in ("master", "evaluator") else f"{who} {index}"
        self._moment(at_s, "bad", f"{name} {why}: it is started again")

    def _add_load(self, event: Mapping[str, Any]) -> None:
        """A server has its shard, and where it had it before, what it had since is lost."""
        shard, epoch, version = self._shard(event["shard"]), event["epoch"], event["version"]
        if epoch > shard.epoch and shard.version > version:
            text = f"server {event['shard']} is back with version {version}"
            self._moment(self.at_s, "bad", f"{text}: it had {shard.version}")
        shard.epoch, shard.version = epoch, version

    def _add_books(self, shards: Sequence[Mapping[str, Any]], at_s: float) -> None:
        kept = [Kept(shard["version"], accounts_from(shard["accounts"])) for shard in shards]
        lost = sum(shard.lost_updates(in_rounds=self._in_rounds) for shard in kept)
        if lost > self.lost:
            self._moment(at_s, "bad", f"{lost - self.lost} updates are lost")
        self.lost = lost

    def _add_order(self, event: Mapping[str, Any]) -> None:
        words, refused = event["words"], event.get("refused")
        if refused:
            self._moment(event["at_s"], "bad", f"asked for: {words}; refused: {refused}")
            return
        self._moment(event["at_s"], "note", f"asked for: {words}")
        if event["what"] == "slow":
            self._worker(event["worker"]).slowdown = float(event["factor"])
        elif event["what"] == "stop_worker":
            self._worker(event["worker"]).stopped = True

    def _moment(self, at_s: float, kind: str, text: str) -> None:
        self.moments.append((at_s, kind, text))
        self.changed["moments"] = self.ticks + 1

    # -- a tick --------------------------------------------------------------------------------

    def tick(self, now_s: float | None = None, *, is_behind: bool = False) -> int:
        """What was added since the last one is one step for whoever looks on; returns its number.
        `now_s`: on the run's clock, where that goes on without events; `is_behind`: there is more
        that happened already, so that nothing follows from how much was added."""
        for worker in self.workers.values():
            worker.settle(self.ticks)
        self.ticks += 1
        self.fine.tick(self.ticks)
        self.coarse.tick(self.ticks)
        now_s = self.at_s if now_s is None else max(now_s, self.at_s)
        counts = {rank: worker.num_steps for rank, worker in self.workers.items()}
        history = self.history
        if is_behind or self._was_behind:
            history.clear()
        self._was_behind = is_behind
        history.append((now_s, self.gradients, self.examples, counts))
        while len(history) > 2 and history[1][0] <= now_s - RATE_S:
            history.popleft()
        return self.ticks

    def rates(self) -> tuple[float, float, dict[int, float]]:
        """Gradients and examples a second lately, and the gradients of each worker."""
        if not self.history or self.is_over:
            return self._mean_rates()
        then_s, gradients, examples, counts = self.history[0]
        now_s = self.history[-1][0]
        time_s = now_s - then_s
        if time_s <= 0:
            return self._mean_rates()
        of_each = {
            rank: (worker.num_steps - counts.get(rank, 0)) / time_s
            for rank, worker in self.workers.items()
        }
        return (
            (self.gradients - gradients) / time_s,
            (self.examples - examples) / time_s,
            of_each,
        )

    def _mean_rates(self) -> tuple[float, float, dict[int, float]]:
        time_s = self.trained_s or math.inf
        of_each = {rank: worker.num_steps / time_s for rank, worker in self.workers.items()}
        return self.gradients / time_s, self.examples / time_s, of_each

    @property
    def is_over(self) -> bool:
        return self.status not in (RUNNING, STARTING)

    @property
    def trained_s(self) -> float:
        """From the first step to the last one's end."""
        return max((worker.last_s for worker in self.workers.values()), default=0.0)

    def expected_steps(self, rank: int) -> int | None:
        """Of this worker, if that is known."""
        steps, epochs = self._resolved.get("steps"), self._resolved.get("epochs")
        if steps is not None:
            return int(steps)
        batches = self._job.get("num_batches")
        if epochs is None or not batches or rank >= len(batches) or self._job.get("elastic"):
            return None
        each = int(self._resolved.get("accumulate") or 1) * self._local_steps()
        return -(-int(epochs) * int(batches[rank]) // each) if each else None

    def _local_steps(self) -> int:
        """None of them is known where each worker goes by its speed."""
        told = self._resolved.get("local_steps") or 1
        return int(told) if isinstance(told, int) else 0

    def progress(self) -> float | None:
        """From 0 to 1; None: nobody knows how long it will be."""
        if self.status == "finished":
            return 1.0
        expected = {rank: self.expected_steps(rank) for rank in self.workers}
        if all(expected.values()):
            done = sum(min(w.number, expected[r] or 0) for r, w in self.workers.items())
            return done / sum(steps or 0 for steps in expected.values())
        total, version = self._job.get("total_updates"), self.version
        return min(1.0, version / total) if total else None

    def left_s(self, of_each: Mapping[int, float]) -> float | None:
        """By the rates that there are now."""
        if self.status != RUNNING:
            return None
        left = []
        for rank, worker in self.workers.items():
            expected, rate = self.expected_steps(rank), of_each.get(rank, 0.0)
            if expected is None:
                return self._left_by_progress()
            if not worker.stopped and worker.number < expected:
                left.append((expected - worker.number) / rate if rate else math.inf)
        most = max(left, default=0.0)
        return most if math.isfinite(most) else None

    def _left_by_progress(self) -> float | None:
        share, time_s = self.progress(), self.trained_s
        return time_s * (1 - share) / share if share and time_s else None

    @property
    def version(self) -> int:
        return max((shard.version for shard in self.shards.values()), default=0)


def _slowdowns(config: Mapping[str, Any]) -> dict[int, float]:
    """What --slow-worker says."""
    names = ("workers", "slow_worker")
    given = {name: config[name] for name in names if config.get(name) is not None}
    return dict(make_config(given).slowdowns)


def _role(role: str, index: int) -> str:
    return role if role in ("master", "evaluator", "launcher") else f"{role}-{index}"


def _size_for(num_workers: int) -> int:
    return next((size for most, size in SIZES if num_workers <= most), SIZE_OF_MANY)
