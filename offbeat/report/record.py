"""What a run's config.json and event files hold, read once, in a form to count with.

Called by the summary and by the reports. Imports no torch, so that a report is there at once.
"""

import functools
import itertools
import json
import math
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.accounts import DROPPED, REJECTED, Accounts, accounts_from
from offbeat.config import discipline_options, make_config
from offbeat.errors import ConfigError, RunDirError
from offbeat.report.columns import Longest, Seconds, Wholes, count_until
from offbeat.run.events import read_events
from offbeat.run.stopping import Judge

PARTS = ("compute_s", "prepare_s", "exchange_s")
CARRIED = ("up", "down", "whole")
MIN_TOGETHER = 0.1
"""Of a run's time all workers must have been at work, for a rate of that time."""
REQUIRED_OPTIONS = ("recipe", "discipline", "workers", "servers", "seed")


def _floats() -> "array[float]":
    return array("d")


@dataclass
class WorkerRecord:
    """One worker's steps; the arrays have an element for each."""

    steps: Wholes = field(default_factory=Wholes)
    start_s: "array[float]" = field(default_factory=_floats)
    compute_s: Seconds = field(default_factory=Seconds)
    prepare_s: Seconds = field(default_factory=Seconds)
    exchange_s: Seconds = field(default_factory=Seconds)
    losses: "array[float]" = field(default_factory=_floats)
    last_s: float = 0.0
    """When the last of them was over."""
    local_steps: Wholes = field(default_factory=Wholes)
    """How many of its own a step was, where workers take different numbers of them."""
    examples: int = 0
    dropped: int = 0
    rejected: int = 0
    num_norms: int = 0
    """Of the gradients that were to be clipped, those whose norm is known."""
    num_clipped: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Of its gradients that were applied, over all shards."""
    carried: Counter[str] = field(default_factory=Counter)
    """Bytes that its links carried up and down, and what would have gone up as it is (whole)."""
    coding_s: float = 0.0
    """Seconds of a processor that codecs took of it."""
    servers_coding_s: float = 0.0
    """And of servers, on its behalf."""
    _last_carried: dict[str, int] = field(default_factory=dict)
    """With the step before: events tell only what is new."""
    held_s: Longest = field(default_factory=Longest)
    """How long a server kept the gradient of a step before it replied; the slowest one's."""

    @property
    def gradients(self) -> int:
        return len(self.steps)

    def add(self, event: dict[str, Any], clip_norm: float | None) -> None:
        start_s, compute_s, prepare_s, exchange_s = (
            float(event[part]) for part in ("start_s", *PARTS)
        )
        loss, step, examples = event["loss"], event["step"], event["examples"]
        loss = math.nan if loss is None else float(loss)  # of a script's own step it is not known
        self.steps.append(step)  # from here on nothing can be missing
        self.losses.append(loss)
        self.start_s.append(start_s)
        self.compute_s.append(compute_s)
        self.prepare_s.append(prepare_s)
        self.exchange_s.append(exchange_s)
        self.last_s = max(self.last_s, self.end_s(-1))
        if "local_steps" in event:
            self.local_steps.append(int(event["local_steps"]))
        self.examples += examples
        self.dropped += event["outcome"] == "dropped"
        self.rejected += event["outcome"] == "rejected"
        self.add_norm(event, clip_norm)
        if "up" in event:
            self._last_carried = {name: int(event[name]) for name in CARRIED}
        self.carried.update(self._last_carried)
        self.coding_s += event.get("coding_s", 0.0)

    def add_norm(self, event: dict[str, Any], clip_norm: float | None) -> None:
        """A step has it, or where the server clips a push."""
        if clip_norm and event.get("norm") is not None:
            self.num_norms += 1
            self.num_clipped += float(event["norm"]) > clip_norm

    def bytes_per_gradient(self, way: str) -> float | None:
        """What went up, or down; None: an older run does not say."""
        return self.carried[way] / self.gradients if self.carried[way] else None

    def times_smaller(self, way: str) -> float | None:
        """What float32 would have been, over what it was; parameters are as many as gradients."""
        return self.carried["whole"] / self.carried[way] if self.carried[way] else None

    @property
    def mean_local_steps(self) -> float | None:
        """From one push to the next; None: all workers take as many as the options say."""
        return sum(self.local_steps) / len(self.local_steps) if self.local_steps else None

    def end_s(self, index: int) -> float:
        """When step number `index` was over."""
        return math.fsum(
            (
                self.start_s[index],
                self.compute_s[index],
                self.prepare_s[index],
                self.exchange_s[index],
            )
        )

    def waited_s(self, index: int) -> float:
        """How much of a step's exchange its gradient lay at a server that did not reply yet."""
        return min(self.exchange_s[index], self.held_s[self.steps[index]])


@dataclass
class ShardRecord:
    """What was applied to one shard; the columns have an element for each gradient."""

    versions: Wholes = field(default_factory=Wholes)
    at_s: "array[float]" = field(default_factory=_floats)
    staleness: Wholes = field(default_factory=Wholes)
    rates: "array[float]" = field(default_factory=_floats)
    """The learning rate of its update; NaN where that is not known. All shards have the same: only
    the one that is read first has any here."""
    version: int = 0
    last_s: float = 0.0
    """When the last update was made."""


@dataclass
class Score:
    version: int
    at_s: float
    values: dict[str, float]
    """By each metric's name; NaN where it is no number."""


@dataclass
class Kept:
    """One shard of a checkpoint."""

    version: int
    accounts: Accounts

    def count(self, outcome: str) -> int:
        return sum(account.counts[outcome] for account in self.accounts.values())

    @property
    def gradients(self) -> int:
        return sum(account.gradients for account in self.accounts.values())

    def lost_updates(self, *, in_rounds: bool) -> int:
        """A round is one update, which all that took part in it have lost; who lost the most has
        lost a gradient in each of them, if it was there all the time."""
        lost = [account.lost for account in self.accounts.values()]
        return max(lost, default=0) if in_rounds else sum(lost)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Of a run, over all workers; `gradients` are those that were computed and pushed."""

    gradients: int
    updates: int
    """Of the shard that has the most."""
    dropped: int
    rejected: int
    lost_updates: int
    """Over all shards."""
    not_kept: int
    """Gradients that are in no checkpoint: done after the last one, or before a server had to go
    back to it and then done again."""


@dataclass
class Record:
    """One run. `folder` is only a name for it."""

    folder: str
    config: dict[str, Any]
    metric: str
    environment: dict[str, Any]
    resolved: dict[str, Any]
    """What the recipe and the flags came to."""
    variant: str
    """The discipline and its options."""
    in_rounds: bool
    """An update is a round of all workers' gradients."""
    num_servers: int
    directions: dict[str, bool | None] = field(default_factory=dict)
    """Of each metric, whether more of it is better, as far as the run knows."""
    workers: dict[int, WorkerRecord] = field(default_factory=lambda: defaultdict(WorkerRecord))
    shards: dict[int, ShardRecord] = field(default_factory=lambda: defaultdict(ShardRecord))
    scores: list[Score] = field(default_factory=list)
    mixed: int = 0
    end_s: float = 0.0
    status: str = "unfinished"
    reason: str | None = None
    """Why it failed, or ended early."""
    restarts: list[tuple[float, str]] = field(default_factory=list)
    """When, and who."""
    orders: list[tuple[float, str]] = field(default_factory=list)
    """When somebody who looked on asked for what, and it was done."""
    committed_s: dict[int, float] = field(default_factory=dict)
    """When the checkpoint of each version was there."""
    books: list[dict[str, Any]] = field(default_factory=list)
    """Of each shard what the last checkpoint has: its version, and what became of the gradients
    that each worker had pushed."""
    unreadable: int = 0
    """Lines that are no events: what a crash of the machine can leave."""

    def add(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "push":
                self._add_push(event)
            case "step":
                self.workers[event["worker"]].add(event, self._clip_norm)
            case "score":
                self._add_score(event)
            case "run":
                self._add_phase(event)
            case "unreadable":
                self.unreadable += 1

    def _add_push(self, event: dict[str, Any]) -> None:
        if event.get("again"):
            return  # out of a journal: whoever made the update first has counted it
        self.mixed += bool(event["mixed"])
        worker = self.workers[event["worker"]]
        worker.servers_coding_s += event.get("coding_s", 0.0)
        received_s, replied_s = event["received_s"], event["replied_s"]
        if replied_s is not None:
            worker.held_s.add(event["sequence"], replied_s - received_s)
        if event["outcome"] == "applied":
            self._add_update(self.shards[event["shard"]], event)
            worker.staleness[event["staleness"]] += 1
            worker.add_norm(event, self._clip_norm)

    def _add_update(self, shard: ShardRecord, event: dict[str, Any]) -> None:
        at_s, staleness, lr = event["applied_s"], event["staleness"], event.get("lr")
        at_s = float(event["received_s"] if at_s is None else at_s)
        shard.versions.append(event["version"])
        shard.version = max(shard.version, event["version"])
        shard.at_s.append(at_s)
        shard.last_s = max(shard.last_s, at_s)
        shard.staleness.append(staleness)
        if shard is next(iter(self.shards.values())):
            shard.rates.append(math.nan if lr is None else float(lr))  # older runs have none

    @functools.cached_property
    def _clip_norm(self) -> float | None:
        most = self.config.get("clip_norm")
        return float(most) if most else None

    def _add_score(self, event: dict[str, Any]) -> None:
        """An older run has one metric alone. What a script tells it is judged by, and which way
        that is better, is known by its first score."""
        found = event.get("scores", {})
        if "higher_is_better" in event:
            self.metric = self.metric if self.scores else next(iter(found))
            self.directions |= event["higher_is_better"]
        else:
            found = {self.metric: event["metric"], **found}
        values = {k: math.nan if v is None else float(v) for k, v in found.items()}
        self.scores.append(Score(event["version"], event["at_s"], values))

    def _add_phase(self, event: dict[str, Any]) -> None:
        match event["phase"]:
            case "restart":
                names = [f"{event['role']} {event['index']}"]
                names += [f"worker {rank}" for rank in event.get("crew", ())[1:]]
                self.restarts.append((event["at_s"], " and ".join(names)))
            case "books":
                self.books = event["shards"]
            case "order" if not event.get("refused"):
                self.orders.append((event["at_s"], event["words"]))
            case "checkpoint":
                self.committed_s[event["version"]] = event["at_s"]
            case "start" if event["at_s"] > self.end_s:  # resumed: what it came to is not known yet
                self.end_s, self.status, self.reason = event["at_s"], "unfinished", None
            case "end" if event["at_s"] >= self.end_s:  # a run that was resumed has several
                self.end_s = event["at_s"]
                self.status = event["status"]
                self.reason = event.get("reason")

    # -- what follows from it ------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        """The workers that took a step at least."""
        return [rank for rank in sorted(self.workers) if self.workers[rank].gradients]

    @property
    def gradients(self) -> int:
        return sum(worker.gradients for worker in self.workers.values())

    @property
    def examples(self) -> int:
        return sum(worker.examples for worker in self.workers.values())

    @property
    def updates(self) -> int:
        return max((shard.version for shard in self.shards.values()), default=0)

    @property
    def staleness(self) -> Counter[int]:
        pooled: Counter[int] = Counter()
        for worker in self.workers.values():
            pooled.update(worker.staleness)
        return pooled

    @property
    def carried(self) -> WorkerRecord:
        """Of all workers together, what their links carried, and what that took."""
        total = WorkerRecord()
        for worker in self.workers.values():
            total.carried.update(worker.carried)
            total.coding_s += worker.coding_s
            total.servers_coding_s += worker.servers_coding_s
        return total

    def clipped(self) -> float | None:
        """The share of gradients whose norm was above --clip-norm; None: none was looked at."""
        num_norms = sum(worker.num_norms for worker in self.workers.values())
        num_clipped = sum(worker.num_clipped for worker in self.workers.values())
        return num_clipped / num_norms if num_norms else None

    @property
    def first_s(self) -> float:
        """When the first step began; what was before it is starting up."""
        return min((w.start_s[0] for w in self.workers.values() if w.gradients), default=0.0)

    @property
    def last_s(self) -> float:
        """When the last step was over, and the last update made: where a server replies before it
        applies a gradient, that is the later one."""
        steps_s = (worker.last_s for worker in self.workers.values())
        updates_s = (shard.last_s for shard in self.shards.values())
        return max(itertools.chain(steps_s, updates_s), default=0.0)

    @property
    def train_time_s(self) -> float:
        return max(0.0, self.last_s - self.first_s)

    def full_rate(self) -> float | None:
        """Gradients per second while all workers were at work: how quick a straggler lets the
        others be. When these have done their share it works on alone."""
        workers = [self.workers[rank] for rank in self.ranks]
        start_s = max((w.start_s[0] for w in workers), default=0.0)
        end_s = min((w.end_s(-1) for w in workers), default=0.0)
        within = sum(start_s < w.end_s(i) <= end_s for w in workers for i in range(w.gradients))
        if len(workers) < 2 or end_s - start_s < MIN_TOGETHER * self.train_time_s:
            return self.gradients / self.train_time_s if self.train_time_s else None
        return within / (end_s - start_s)

    def kept(self) -> list[Kept]:
        """What the last checkpoint has of each shard."""
        return [Kept(s["version"], accounts_from(s["accounts"])) for s in self.books]

    def totals(self) -> "Totals":
        """What the workers did, and what became of it. Steps are written down by the workers, and
        what is kept by the master; a process that was killed may have taken its last notes along,
        so that the larger number is the one that holds."""
        kept = self.kept()
        if not kept:
            return self._totals_without_books()
        num_kept = max(shard.gradients for shard in kept)
        gradients = max(self.gradients, num_kept)
        is_over = self.status != "unfinished"
        return Totals(
            gradients=gradients,
            updates=max(shard.version for shard in kept) if is_over else self.updates,
            dropped=max(shard.count(DROPPED) for shard in kept),
            rejected=max(shard.count(REJECTED) for shard in kept),
            lost_updates=sum(shard.lost_updates(in_rounds=self.in_rounds) for shard in kept),
            not_kept=gradients - num_kept,
        )

    def _totals_without_books(self) -> "Totals":
        """Of a run that came to no checkpoint, or was made before there were any books."""
        return Totals(
            gradients=self.gradients,
            updates=self.updates,
            dropped=sum(worker.dropped for worker in self.workers.values()),
            rejected=sum(worker.rejected for worker in self.workers.values()),
            lost_updates=0,
            not_kept=0 if self.committed_s else self.gradients,
        )

    def last_scores(self) -> dict[str, float]:
        """By each metric's name, of the newest version that was scored by it; the metric that the
        run is judged by first."""
        in_order = sorted(self.scores, key=lambda score: score.version)
        found = {name: value for score in in_order for name, value in score.values.items()}
        return {name: found[name] for name in self.metrics if name in found}

    def best_score(self) -> tuple[int, float] | None:
        """The version that was scored best, and what it scored; None: there is none, or nobody
        knows what is better."""
        most = self.directions.get(self.metric)
        if most is None:
            return None
        judge = Judge(self.metric, most=most)
        found = [s for s in self.scores if self.metric in s.values]
        return judge.add_all((score.version, score.values[self.metric]) for score in found).best

    @property
    def metrics(self) -> list[str]:
        """All that there are scores by, the one that the run is judged by first."""
        return list(dict.fromkeys([self.metric, *(n for s in self.scores for n in s.values)]))

    def curve(self, metric: str | None = None) -> list[tuple[float, int, float]]:
        """Each version with a score that is a number: how long training had taken until it was
        there, how many gradients were in, and what it got. The time that scoring took is not in
        it. `metric`: by which, where not by the one that the run is judged by."""
        metric = metric or self.metric
        shard = self.shards.get(0, ShardRecord())
        first_s, last_s = self.first_s, self.last_s
        points = []
        known = [s for s in self.scores if metric in s.values]
        numbers = {s.version: s for s in known if not math.isnan(s.values[metric])}
        pairs = zip(shard.versions, shard.at_s, strict=True)
        reached = {version: at_s for version, at_s in pairs if version in numbers}
        for score in sorted(numbers.values(), key=lambda s: s.version):
            at_s = reached.get(score.version)
            if at_s is None:  # the initial one, or its push was not written down any more
                at_s = first_s if score.version == 0 else self.committed_s.get(score.version)
            if at_s is None:
                at_s = score.at_s
            at_s = min(at_s, last_s)  # a checkpoint is written, and scored, after its last update
            value = score.values[metric]
            points.append((at_s, value))
        counts = count_until(shard.at_s, [at_s for at_s, _ in points])
        return [(max(0.0, at_s - first_s), counts[at_s], value) for at_s, value in points]


def read_run(path: Path, name: str | None = None) -> Record:
    """Everything about the run in the folder `path`."""
    config = path / "config.json"
    try:
        described = json.loads(config.read_text(encoding="utf-8"))
        for key in REQUIRED_OPTIONS:
            described["config"][key]
        record = Record(
            name or path.name,
            described["config"],
            described["metric"],
            dict(described.get("environment") or {}),
            dict(described.get("resolved") or {}),
            *_discipline_of(described),
            dict(described.get("metrics") or {}),
        )
    except OSError as error:
        raise RunDirError(f"cannot read {config}: {error.strerror}; is that a run?") from error
    except (ValueError, TypeError, LookupError, ConfigError) as error:
        raise RunDirError(f"{config} does not describe a run: {error!r}") from error
    for event in read_events(path / "events"):
        try:
            record.add(event)
        except (LookupError, TypeError, ValueError, OverflowError):
            record.unreadable += 1
    return record


def _discipline_of(described: Mapping[str, Any]) -> tuple[str, bool, int]:
    """What a report calls the discipline, whether it works in rounds, and how many servers it has:
    as the run has it, or, of an older one, as its options say."""
    facts, config = described.get("job") or {}, described["config"]
    servers = int(config["servers"]) if facts.get("served", True) else 0
    if facts.get("variant"):
        return str(facts["variant"]), bool(facts["in_rounds"]), servers
    names = {"discipline", "workers", "rule", *discipline_options()}
    made = make_config({k: v for k, v in config.items() if k in names and v is not None})
    return made.variant, made.chosen.kind.in_rounds, servers


def find_runs(path: Path) -> Iterator[Path]:
    """The folders of runs at or below `path`, in the order of their names; links are followed."""
    seen: set[Path] = set()
    found = []
    for name, folders, files in os.walk(path, followlinks=True):
        folder = Path(name)
        if (resolved := folder.resolve()) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(resolved)
        if "config.json" in files and "events" in folders:
            found.append(folder)
    yield from sorted(found)
