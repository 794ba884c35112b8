"""What must hold in a simulated run, looked at after every event that could break it.

Beside every server there is a `Shadow`, which counts for itself what goes in; the parameters, the
accounts, what workers are told, and what is committed are held against it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.accounts import ACCEPTED, APPLIED, DUPLICATE, Account, Accounts, accounts_from
from offbeat.disciplines import Push, Sync
from offbeat.ledger import Ledger
from offbeat.pushes import Action, PushRecord
from offbeat.roles.server import Server
from offbeat.run.checkpoint import Checkpoint, save_checkpoint
from offbeat.transport.base import PushHeader, ReplyHeader, WelcomeHeader
from simulated.network import SimulatedWorkerEnd
from simulated.program import CountingJob, Shape, discipline_of
from simulated.tasks import Process, World

Key = tuple[int, int]
"""A gradient, by its worker and step."""


class Shadow:
    """What one life of a server has in it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.inside: set[Key] = set()
        self.expected = server.shard.params.clone()
        self.version = 0
        self.history: dict[int, Tensor] = {}
        """The parameters of every version."""
        self.promised: set[Key] = set()
        """What workers were told to be in, or to come in."""
        self.came: dict[int, int] = {}
        """The incarnation of each worker, as it came last."""

    @property
    def ledger(self) -> Ledger:
        return self.server.ledger


class Watch:
    """Of one run, through all of its lives."""

    def __init__(self, world: World, shape: Shape, job: CountingJob) -> None:
        self.world = world
        self.shape = shape
        self.job = job
        self.complaints: list[str] = []
        self.shadows: dict[Process, Shadow] = {}
        self.of_ledger: dict[Ledger, Shadow] = {}
        self.newest: dict[int, Shadow] = {}
        """By the server's index."""
        self.num_loads = [0] * shape.servers
        self.sent: set[Key] = set()
        self.links: dict[Process, dict[str, Any]] = {}
        """Of each worker, by the server's name."""
        self.kept: list[tuple[int, ...]] = [()]
        """The versions of the shards in the last checkpoint that was said to be kept, and in those
        that were begun since."""
        self.is_twofold = shape.overlap
        """A worker may have a step done, or under way, that is in by now: with overlap, or where
        two processes are one worker."""
        self.meets = False
        """Nobody is missing in any round, so that all steps in it have the same number."""
        self.books: list[Accounts] = []
        """The last accounts that were written down."""
        self.num_pushes = 0
        self.is_disturbed = False
        """Connections were cut, so that one server may have a gradient that another one lacks."""
        self._written: set[int] = set()
        self._records: list[PushRecord] = []
        kind = discipline_of(job)
        self._is_exact = kind.exact
        self._is_sync = kind is Sync
        self._is_plain_sync = kind is Sync and not shape.options

    def complain(self, what: str) -> None:
        self.world.tell(f"!!! {what}")
        self.complaints.append(what)
        self.world.is_over = True

    def hold(self, holds: bool, what: str) -> None:
        if not holds:
            self.complain(what)

    # -- a server ------------------------------------------------------------------------------

    def begin(self, server: Server, process: Process) -> None:
        shadow = Shadow(server)
        self.shadows[process] = self.newest[server.index] = self.of_ledger[server.ledger] = shadow

    def loaded(self, ledger: Ledger) -> None:
        shadow = self.of_ledger[ledger]
        index, shard = shadow.server.index, shadow.server.shard
        self.num_loads[index] += 1
        shadow.expected = shard.params.clone()
        shadow.version = shard.version
        shadow.history = {shard.version: shadow.expected}
        counts = self.counts(shard.params, f"what server {index} is given")
        shadow.inside = {key for key, count in counts.items() if count}
        self.check_accounts(ledger.accounts, counts, f"what server {index} is given")

    def came(self, shadow: Shadow, worker: int, incarnation: int) -> None:
        newest = shadow.came.get(worker, 0)
        where = f"server {shadow.server.index}"
        self.hold(
            incarnation >= newest,
            f"{where}: worker {worker} comes as {incarnation} after it came as {newest}",
        )
        shadow.came[worker] = incarnation

    def counts(self, params: Tensor, where: str) -> dict[Key, int]:
        """How often each gradient is in."""
        found = self.shape.inside(params)
        keys = [(w, s + 1) for w in range(self.shape.workers) for s in range(self.shape.steps)]
        counts = dict(zip(keys, found, strict=True))
        for key, count in counts.items():
            self.hold(count in (0, 1), f"{where}: gradient {key} is in {count} times")
        return counts

    def check_accounts(
        self, accounts: Mapping[int, Account], counts: Mapping[Key, int], where: str
    ) -> None:
        applied = dict.fromkeys(range(self.shape.workers), 0)
        for (worker, _), count in counts.items():
            applied[worker] += count
        for worker, count in applied.items():
            account = accounts.get(worker, Account(0, 0))
            self.hold(
                account.applied == count,
                f"{where}: {count} gradients of worker {worker} are in, {account} says otherwise",
            )
            self.hold(
                account.gradients == account.sequence,
                f"{where}: the account of worker {worker} does not add up: {account}",
            )

    def applied(
        self,
        shadow: Shadow,
        pushes: Sequence[Push],
        records: Sequence[PushRecord],
        version: int | None,
    ) -> None:
        part = [record for record in records if record.outcome == APPLIED]
        where = f"server {shadow.server.index}, version {version}"
        if version is None:
            self.hold(not part, f"{where}: something went in without an update")
            return
        self.hold(version == shadow.version + 1, f"{where}: comes after {shadow.version}")
        shadow.version = version
        shadow.expected = shadow.expected.clone()
        for record in part:
            self._went_in(shadow, record, where)
        params = shadow.server.shard.params
        self.hold(
            bool(torch.equal(params, shadow.expected)),
            f"{where}: the parameters are not the sum of what went in",
        )
        shadow.history[version] = shadow.expected
        if self._is_sync:
            self._check_round(shadow, pushes, part, where)

    def _went_in(self, shadow: Shadow, record: PushRecord, where: str) -> None:
        key = record.worker, record.sequence
        ledger = shadow.ledger
        self.hold(key not in shadow.inside, f"{where}: gradient {key} goes in twice")
        shadow.inside.add(key)
        shadow.expected[self.shape.place(*key)] -= 1
        self.hold(record.epoch == ledger.epoch, f"{where}: gradient {key} is of another epoch")
        self.hold((record.staleness or 0) >= 0, f"{where}: gradient {key} is of a later version")
        member = ledger.members.get(record.worker)
        is_former = member is not None and record.incarnation != member.incarnation
        self.hold(
            not is_former or record.is_pending,
            f"{where}: gradient {key} is of a process that another one has replaced",
        )

    def _check_round(
        self, shadow: Shadow, pushes: Sequence[Push], part: Sequence[PushRecord], where: str
    ) -> None:
        members = shadow.ledger.members
        awaited = {worker for worker, member in members.items() if not member.is_finished}
        lacking = awaited - {push.worker for push in pushes}
        is_held = shadow.server.shard.joint_clip is not None  # it may be left, and joined
        if self._is_plain_sync and not is_held:
            self.hold(not lacking, f"{where}: the round is not whole, without {sorted(lacking)}")
        if self.meets:
            steps = sorted((push.sequence, push.worker) for push in pushes)
            self.hold(steps[0][0] == steps[-1][0], f"{where}: steps {steps} meet in one round")
        most = int(self.shape.overlap)
        if most and (self.is_disturbed or not self._is_plain_sync):  # what had to wait is older
            return
        for record in part:
            late = f"{where}: gradient {record.worker, record.sequence} is late in its round"
            self.hold((record.staleness or 0) <= most, late)

    def replied(self, shadow: Shadow, record: PushRecord) -> None:
        key = record.worker, record.sequence
        if record.outcome == APPLIED:
            where = f"server {shadow.server.index}"
            self.hold(key in shadow.inside, f"{where}: {key} is said to be in, and is not")

    def wrote(self, what: Any) -> None:
        """A push's event, or the books."""
        if isinstance(what, list):
            self.books = [accounts_from(shard["accounts"]) for shard in what]
        record = getattr(what, "__self__", None)
        if isinstance(record, PushRecord):
            key = record.worker, record.sequence
            self.hold(id(record) not in self._written, f"{key} is written down twice")
            self._written.add(id(record))
            self._records.append(record)  # so that no other one gets its number

    # -- what workers say and hear -------------------------------------------------------------

    def heard(self, what: str, line: Any, said: Any) -> None:
        match what:
            case "push":
                self.pushed(line, said)
            case "reply":
                self.was_replied(line, said)
            case "joined":
                self.joined(line, said)
            case "cut":
                self.is_disturbed = True

    def joined(self, end: SimulatedWorkerEnd, welcome: WelcomeHeader) -> None:
        self.links.setdefault(end.line.client, {})[end.line.server.name] = end
        end.told, end.version = welcome.settled_sequence, welcome.version
        self._check_shown(end, welcome.version, "the welcome")

    def pushed(self, end: SimulatedWorkerEnd, header: PushHeader) -> None:
        self.num_pushes += 1
        who = f"worker {header.worker} ({header.incarnation})"
        self.sent.add((header.worker, header.sequence))
        self.hold(
            end.replied == end.pushed,
            f"{who}: pushes {header.sequence} before {end.pushed} is answered",
        )
        end.pushed = header.sequence
        links = self.links[end.line.client].values()
        is_news = any(header.sequence > link.told for link in links) or self.is_twofold
        self.hold(is_news, f"{who}: pushes {header.sequence}, which every server has")

    def was_replied(self, end: SimulatedWorkerEnd, header: ReplyHeader) -> None:
        shadow = self.shadows.get(end.line.server)
        if shadow is None or header.sequence != end.pushed:
            return  # the program has to see to that
        end.replied = header.sequence
        end.told = max(end.told, header.sequence)
        who = f"{end.line.client.name} at {end.line.server.name}"
        self.hold(
            header.version >= end.version,
            f"{who}: is shown version {header.version} after {end.version}",
        )
        end.version = header.version
        self._check_shown(end, header.version, f"the reply to {header.sequence}")
        self._check_word(end, shadow, header)

    def _check_shown(self, end: SimulatedWorkerEnd, version: int, what: str) -> None:
        shadow = self.shadows[end.line.server]
        shown = shadow.history.get(version)
        if shown is None:
            self.complain(f"{what} shows {end.line.client.name} version {version}, which is none")
            return
        self.hold(
            bool(torch.equal(end.reply_slot.values, shown)),
            f"{what} shows {end.line.client.name} other parameters than version {version} has",
        )

    def _check_word(self, end: SimulatedWorkerEnd, shadow: Shadow, header: ReplyHeader) -> None:
        """What a server says of a push is so."""
        key = self._rank_of(end), header.sequence
        where = f"server {shadow.server.index} says of {key}"
        if header.status in (APPLIED, ACCEPTED):
            shadow.promised.add(key)
        if header.status == APPLIED:
            self.hold(key in shadow.inside, f"{where} that it is in")
        if header.status == DUPLICATE:
            account = shadow.ledger.accounts.get(key[0], Account(0, 0))
            later = [sequence for worker, sequence in shadow.ledger.pending if worker == key[0]]
            is_known = max([account.sequence, *later]) >= key[1]
            self.hold(is_known, f"{where} that it has it, or a later one")

    def _rank_of(self, end: SimulatedWorkerEnd) -> int:
        name = str(end.line.client.name)
        return 0 if name == "master" else int(name.rpartition("-")[2])

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, folder: Path, checkpoint: Checkpoint) -> Path:
        """In the place of save_checkpoint."""
        self._check_checkpoint(checkpoint, "a checkpoint")
        versions = tuple(shard.version for shard in checkpoint.shards)
        self.kept.append(versions)
        path = save_checkpoint(folder, checkpoint)
        self.kept = [versions]
        return path

    def _check_checkpoint(self, checkpoint: Checkpoint, what: str) -> list[dict[Key, int]]:
        each = []
        for index, shard in enumerate(checkpoint.shards):
            where = f"{what}, shard {index} at version {shard.version}"
            counts = self.counts(shard.tensors["params"], where)
            self.check_accounts(shard.accounts, counts, where)
            each.append(counts)
        versions = [shard.version for shard in checkpoint.shards]
        if self._is_exact and len(set(versions)) > 1:
            now = [self.newest[index].version for index in range(len(versions))]
            self.hold(versions == now, f"{what} mixes versions {versions} while they are at {now}")
        if self._is_plain_sync and not self.is_disturbed:
            alike = all(counts == each[0] for counts in each)
            self.hold(alike, f"{what} mixes rounds")
        return each

    def found(self, checkpoint: Checkpoint | None) -> None:
        """What a run goes on from, or what is left of it in the end."""
        versions = () if checkpoint is None else tuple(s.version for s in checkpoint.shards)
        self.hold(
            versions in self.kept,
            f"versions {self.kept[0]} were said to be kept, {versions} are found",
        )

    def finished(self, checkpoint: Checkpoint) -> None:
        """The run is over."""
        shape = self.shape
        each = self._check_checkpoint(checkpoint, "in the end")
        for index, counts in enumerate(each):
            where = f"in the end, shard {index}"
            for worker in range(shape.workers):
                account = self.books[index].get(worker, Account(0, 0))
                self.hold(
                    account.gradients == shape.steps,
                    f"{where}: {account} of worker {worker}, who has {shape.steps} steps to do",
                )
            missing = {key for key, count in counts.items() if not count}
            unsent = missing - self.sent
            self.hold(not unsent, f"{where}: {sorted(unsent)} were never pushed")
            broken = missing & self.newest[index].promised
            self.hold(not broken, f"{where}: {sorted(broken)} were acknowledged, and are not in")
            lost = sum(account.lost for account in self.books[index].values())
            if shape.servers == 1 and self.num_loads[index] == 1:
                self.hold(not lost, f"{where}: {lost} are lost, and no server ever was")


class WatchedLedger(Ledger):
    """The ledger itself, with somebody who looks on."""

    watch: Watch
    """Of the run that is under way."""

    def load(self, accounts: Mapping[int, Account]) -> None:
        super().load(accounts)
        self.watch.loaded(self)

    def join(self, worker: int, incarnation: int, now: float = 0.0) -> tuple[int, Sequence[Action]]:
        self.watch.came(self.watch.of_ledger[self], worker, incarnation)
        return super().join(worker, incarnation, now)

    def applied(self, pushes: Sequence[Push], version: int | None, now: float) -> None:
        records = [self._record_of(push) for push in pushes]
        super().applied(pushes, version, now)
        self.watch.applied(self.watch.of_ledger[self], pushes, records, version)

    def replied(self, record: PushRecord) -> None:
        super().replied(record)
        self.watch.replied(self.watch.of_ledger[self], record)
