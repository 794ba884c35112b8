"""What a run that was killed has in its servers' journals becomes a checkpoint, before it goes on.

Called by whoever resumes a run on the machine that has its journals: with the options that it had,
before they become others, as its servers would go on with after a death of their own. So a run can
go on with other servers, another optimizer or without a journal, and has lost nothing:

    lines = salvage(folder, job, at_s=12.5)     # nothing happens where there is no journal
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from offbeat.accounts import accounts_to_json
from offbeat.errors import JournalError
from offbeat.ledger import Ledger
from offbeat.roles.journalling import Key, Recovered, Recovery, again, pushes_of
from offbeat.run.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint, shard_digests
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.run.journal import remove_if_empty, remove_journal
from offbeat.run.rundir import RunFolder, role_name
from offbeat.run.segments import UPDATE, Entry, list_segments, read_entries
from offbeat.shard import ShardState

Say = Callable[[str], None]


def has_journals(folder: RunFolder) -> bool:
    return any(list_segments(path) for path in folder.journal.glob("*"))


def salvage(folder: RunFolder, job: Job, *, at_s: float, tolerant: bool = False) -> list[str]:
    """Returns what is to be said of it. `at_s`: of the run. `tolerant`: of what is damaged take
    what comes before the damage."""
    if not has_journals(folder):
        return []
    told: list[str] = []
    damaged = told.append if tolerant else None
    checkpoint = newest_checkpoint(folder.checkpoints)
    states = job.states_after(checkpoint)
    with _as_servers():
        found = [
            _recover(folder, job, index, begin, damaged)
            for index, begin in enumerate(_cut_to_rounds(folder, job, states, damaged))
        ]
    if any(recovered.records for _, recovered in found):
        _commit(folder, job, checkpoint, [state for state, _ in found], at_s)
    for index, (state, recovered) in enumerate(found):
        _write_down(folder, index, states[index], recovered)
        if recovered.complaint:
            told.append(f"server {index}: {recovered.complaint}: the options were others")
        if recovered.num_updates:
            told.append(
                f"server {index} had {recovered.num_updates} updates in its journal that are in no "
                f"checkpoint: going on from version {state.version}"
            )
    for path in folder.journal.glob("*"):
        remove_journal(path)
    remove_if_empty(folder.journal)
    return list(dict.fromkeys(told))


@contextlib.contextmanager
def _as_servers() -> Iterator[None]:
    """With one thread, as servers make their sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class _Begin:
    """What a shard begins with, and which entry is the first that is not made again; None: all
    are."""

    state: ShardState
    end: int | None = None


def _cut_to_rounds(
    folder: RunFolder, job: Job, states: Sequence[ShardState], damaged: Say | None
) -> list[_Begin]:
    """Where updates are rounds, one that not all servers had on their disks was answered to nobody
    as a whole: it is done again."""
    if not job.facts.in_rounds or len(states) == 1:
        return [_Begin(state) for state in states]
    rounds: list[list[tuple[int, Sequence[Key]]]] = []
    settled: list[dict[int, int]] = []
    for index, state in enumerate(states):
        rounds.append([])
        settled.append({worker: account.sequence for worker, account in state.accounts.items()})
        with _told_of_damage(folder, damaged):
            for entry in _entries(folder, job, index):
                if entry.head.kind == UPDATE:
                    rounds[-1].append((entry.head.number, keys := pushes_of(entry)))
                    for worker, sequence in keys:
                        settled[-1][worker] = max(settled[-1].get(worker, 0), sequence)
    whole = {w: min(last.get(w, 0) for last in settled) for last in settled for w in last}
    return [_Begin(*each) for each in zip(states, (_end(r, whole) for r in rounds), strict=True)]


def _end(rounds: Sequence[tuple[int, Sequence[Key]]], whole: Mapping[int, int]) -> int | None:
    """The first of the last rounds of which nobody has all answers."""
    end = None
    for number, keys in reversed(rounds):
        if any(sequence <= whole[worker] for worker, sequence in keys):
            break
        end = number
    return end


def _entries(folder: RunFolder, job: Job, index: int) -> Iterator[Entry]:
    return read_entries(folder.journal / role_name("ps", index), job.journal_mark(index))


@contextlib.contextmanager
def _told_of_damage(folder: RunFolder, damaged: Say | None) -> Iterator[None]:
    """`damaged` is told of what is the end then; None: that is an error."""
    try:
        yield
    except JournalError as error:
        if damaged is None:
            raise JournalError(
                f"{error}; to go on with what comes before it, and lose the rest, say --resume "
                f"{folder.path} --ack applied"
            ) from error
        damaged(f"{error}; what comes after it is lost")


def _recover(
    folder: RunFolder, job: Job, index: int, begin: _Begin, damaged: Say | None
) -> tuple[ShardState, Recovered]:
    shard, state = job.make_shard(index), begin.state
    shard.load(state)
    ledger = Ledger(job.make_discipline(), budget=job.budget, promises=True)
    ledger.load(state.accounts)
    recovery = Recovery(shard, shard.make_updater, ledger, state)
    entries = _entries(folder, job, index)
    with _told_of_damage(folder, damaged):
        for entry in itertools.takewhile(lambda each: each.head.number != begin.end, entries):
            recovery.take(entry)
    for records in recovery.left_over():
        recovery.make(records)
    recovered = recovery.recovered()
    made = shard.state(ledger.copy_accounts())
    return dataclasses.replace(made, entry=recovered.last), recovered


def _commit(
    folder: RunFolder,
    job: Job,
    before: Checkpoint,
    states: Sequence[ShardState],
    at_s: float,
) -> None:
    checkpoint = Checkpoint(
        version=states[0].version,
        manifest=job.manifest,
        shards=tuple(states),
        frozen=before.frozen,
        plan=job.plan,
        optimizer=job.optimizer.classes,
    )
    digests = shard_digests(save_checkpoint(folder.checkpoints, checkpoint))
    with contextlib.closing(EventLog.create(folder.events, "master")) as events:
        shards = [(state.version, digest) for state, digest in zip(states, digests, strict=True)]
        version = checkpoint.version
        events.record("run", phase="checkpoint", version=version, shards=shards, at_s=at_s)
        books = [
            {"version": state.version, "accounts": accounts_to_json(state.accounts)}
            for state in states
        ]
        events.record("run", phase="books", shards=books, at_s=at_s)


def _write_down(folder: RunFolder, index: int, state: ShardState, recovered: Recovered) -> None:
    """As a life of its server, which made these updates again."""
    if not recovered.records:
        return
    with contextlib.closing(EventLog.create(folder.events, role_name("ps", index))) as events:
        epoch = max(record.epoch for record in recovered.records)
        events.record("run", phase="load", shard=index, epoch=epoch, version=state.version)
        for record in recovered.records:
            events.record("push", **again(record, index))
