"""What became of every gradient that a shard was sent: an account for each worker.

A worker counts its pushes from 1, and pushes each of them once to every shard. So what a shard does
not know of is what it lost: it was started again from a checkpoint that did not have it, or the
push had only reached other shards when its worker died. For every shard and worker

    the gradients pushed  ==  applied + dropped + rejected + lost

always, and a checkpoint carries the accounts along. Kept by ledger.py, which calls this for one
event of a worker at a time:

    book = AccountBook()
    book.claim(0, 0, sequence=1), book.settle(0, 0, 1, APPLIED)
    book.accounts[0].applied

A push may be *pending*: answered before it is applied, so that its worker pushes again meanwhile.
It is in no account yet. While the server lives, its worker goes on after it; a checkpoint does not
have it, so that whoever goes on from there does it again, or counts it as lost.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace

ACCEPTED = "accepted"
APPLIED = "applied"
DROPPED = "dropped"
REJECTED = "rejected"
DUPLICATE = "duplicate"
STALE = "stale"
OUTCOMES = (ACCEPTED, APPLIED, DROPPED, REJECTED, DUPLICATE, STALE)
"""What a server says of a push. Accepted will be applied; stale was meant for an earlier epoch."""
LOST = "lost"


@dataclass(slots=True)
class Account:
    """One worker's gradients in one shard."""

    incarnation: int
    """The worker's that pushed last."""
    sequence: int
    """The worker's last push that is settled: where its successor goes on."""
    applied: int = 0
    dropped: int = 0
    rejected: int = 0
    lost: int = 0
    batches: int = 0
    """How many of its batches the worker had gone through with that push."""

    @property
    def gradients(self) -> int:
        return self.applied + self.dropped + self.rejected + self.lost

    @property
    def counts(self) -> dict[str, int]:
        return {
            APPLIED: self.applied,
            DROPPED: self.dropped,
            REJECTED: self.rejected,
            LOST: self.lost,
        }

    def to_json(self) -> list[int]:
        return list(astuple(self))


Accounts = dict[int, Account]
"""By the worker's rank."""


class AccountBook:
    """The accounts of one shard, and which pushes were claimed."""

    def __init__(self) -> None:
        self.accounts: Accounts = {}
        self._claimed: dict[int, tuple[int, int]] = {}
        self._heard: set[int] = set()
        """Whose pushes were settled since the book was loaded."""
        self._came: dict[int, int] = {}
        """The incarnation of each worker that came since then, as it came last."""
        self._came_again: set[int] = set()
        """Of these, whose process had been here before, and pushed nothing since."""
        self._pending: dict[int, dict[int, tuple[int, int]]] = {}
        """By worker and sequence, which incarnation pushed what is pending, and how many batches it
        had gone through with it."""
        self._through: dict[int, tuple[int, int]] = {}
        """The incarnation and last push of workers that are done, and have something pending."""

    def load(self, accounts: Mapping[int, Account], *, are_heard: bool = False) -> None:
        """`are_heard`: as if they had been settled here, since nothing was lost in between."""
        self.accounts = copied(accounts)
        for kept in (self._claimed, self._heard, self._pending, self._through):
            kept.clear()
        self._came.clear()
        self._came_again.clear()
        if are_heard:
            self._heard.update(self.accounts)

    def copy(self) -> Accounts:
        """For a checkpoint. What is pending behind a later one that is settled would be passed over
        by whoever goes on from it: there it is lost."""
        accounts = copied(self.accounts)
        for worker, pending in self._pending.items():
            if (account := accounts.get(worker)) is not None:
                account.lost += sum(sequence <= account.sequence for sequence in pending)
        return accounts

    def admit(self, worker: int, incarnation: int = 0) -> int:
        """A worker comes, and nothing of it is under way: whatever it pushed before is settled or
        pending, or will never be. Returns the sequence of its last push that is."""
        if self._came.get(worker) == incarnation:
            self._came_again.add(worker)
        else:
            self._came_again.discard(worker)
        self._came[worker] = incarnation
        account = self.accounts.get(worker)
        at = (-1, 0) if account is None else (account.incarnation, account.sequence)
        if (pending := self._pending.get(worker)) and (last := max(pending)) > at[1]:
            at = (pending[last][0], last)
        self._through.pop(worker, None)
        self._claimed[worker] = at
        return at[1]

    def batches(self, worker: int) -> int:
        """How many of its batches the worker had gone through with that push."""
        account, pending = self.accounts.get(worker), self._pending.get(worker)
        known = (0, 0) if account is None else (account.sequence, account.batches)
        if pending and (last := max(pending)) > known[0]:
            return pending[last][1]
        return known[1]

    def claim(self, worker: int, incarnation: int, sequence: int) -> bool:
        """Whether this push is new; from now on it is not."""
        if (incarnation, sequence) <= self._claimed.get(worker, (-1, -1)):
            return False
        account = self.accounts.get(worker)
        if account is not None and sequence <= account.sequence:
            return False  # it is in, whichever process pushed it
        if sequence in self._pending.get(worker, ()):
            return False  # it will be
        self._claimed[worker] = (incarnation, sequence)
        return True

    def settle(
        self, worker: int, incarnation: int, sequence: int, outcome: str, batches: int = 0
    ) -> None:
        """A claimed push was applied, or dropped or rejected and answered. `batches`: how many the
        worker has gone through with it."""
        if pending := self._pending.get(worker):
            pending.pop(sequence, None)
        account = self._up_to(worker, incarnation, sequence - 1)
        if sequence > account.sequence:
            account.incarnation, account.sequence = incarnation, sequence
            account.batches = batches
        if outcome == APPLIED:
            account.applied += 1
        elif outcome == DROPPED:
            account.dropped += 1
        else:
            assert outcome == REJECTED, outcome
            account.rejected += 1
        if not pending and worker in self._through:
            self._up_to(worker, *self._through.pop(worker))

    def defer(self, worker: int, incarnation: int, sequence: int, batches: int = 0) -> None:
        """A claimed push is answered now, and settled later."""
        self._pending.setdefault(worker, {})[sequence] = incarnation, batches

    def finish(self, worker: int, incarnation: int, sequence: int) -> None:
        """The worker's work is done, and `sequence` was its last push."""
        if self._pending.get(worker):
            self._through[worker] = incarnation, sequence
        else:
            self._up_to(worker, incarnation, sequence)

    def _up_to(self, worker: int, incarnation: int, sequence: int) -> Account:
        """The worker's account, with everything up to `sequence` accounted for. What is missing was
        lost; but a process that skips a push of its own, to a server that lives, found that it had
        come too late (its connection broke, and meanwhile the round was closed)."""
        account = self.accounts.get(worker)
        if account is None:
            account = self.accounts[worker] = Account(incarnation, 0)
        if account.sequence < sequence:
            missing = sequence - account.sequence
            for pending in self._pending.get(worker, ()):
                missing -= account.sequence < pending <= sequence
            late = 0
            if worker in self._heard and incarnation == account.incarnation:
                late = missing
            elif worker in self._came_again:  # the push that its connection broke with
                late = min(missing, 1)
            account.dropped += late
            account.lost += missing - late
            account.sequence = sequence
        self._heard.add(worker)
        self._came_again.discard(worker)
        return account


def copied(accounts: Mapping[int, Account]) -> Accounts:
    return {worker: replace(account) for worker, account in accounts.items()}


Start = tuple[int, int, int]
"""Where a worker goes on: incarnation and sequence of its last push, and batches so far."""


def moved(accounts: Mapping[int, Account], starts: Mapping[int, Start]) -> Accounts:
    """The same accounts where each worker goes on after another push, because the work was cut
    anew."""
    result = copied(accounts)
    for worker, (incarnation, sequence, batches) in starts.items():
        account = result.setdefault(worker, Account(incarnation, sequence))
        account.incarnation, account.sequence = incarnation, sequence
        account.batches = batches
    return result


def joined(shards: Iterable[Mapping[int, Account]]) -> Accounts:
    """One account of each worker for a shard that is made out of parts of these: of the one that
    heard of the worker last."""
    last: Accounts = {}
    for accounts in shards:
        for worker, account in accounts.items():
            other = last.get(worker, account)
            key = (account.incarnation, account.sequence)
            last[worker] = account if key >= (other.incarnation, other.sequence) else other
    return copied(last)


def accounts_from(message: Mapping[str, Iterable[int]]) -> Accounts:
    """The accounts out of what JSON made of them."""
    return {int(worker): Account(*map(int, values)) for worker, values in message.items()}


def accounts_to_json(accounts: Mapping[int, Account]) -> dict[str, list[int]]:
    return {str(worker): account.to_json() for worker, account in accounts.items()}
