"""Bugs that are put into the program for as long as a run lasts: each has to be found.

Every protection against losing something, or doing it twice, is switched off in its turn. Some are
bugs that the program had.

    with BUGS["dedupe off"].planted():
        simulate(seed).complaints
"""

from collections.abc import Callable, Sequence
from typing import Any

from planting import Bug

from offbeat.accounts import ACCEPTED, APPLIED, DUPLICATE, AccountBook, Accounts
from offbeat.disciplines import Action, Apply, Bounded, Push, Reply, Sync
from offbeat.ledger import Ledger
from offbeat.pushes import PushRecord
from offbeat.roles import sessions
from offbeat.roles.copies import Copies
from offbeat.roles.exchange import Exchange
from offbeat.roles.master import Master
from offbeat.roles.session import Session
from offbeat.roles.sessions import Sessions
from offbeat.roles.worker import Worker
from offbeat.run import checkpoint
from offbeat.transport.base import ReplyHeader, WelcomeHeader, WorkerEnd


def _claim_all(book: AccountBook, worker: int, incarnation: int, sequence: int) -> bool:
    return True


_push, _go_on_after, _apply_close = Ledger.push, Worker._go_on_after, Sync._close
_make_reply, _exchange_push, _admit = Sessions._make_reply, Exchange.push, AccountBook.admit


def _push_of_any_epoch(ledger: Ledger, record: PushRecord, version: int) -> Sequence[Any]:
    record.epoch = ledger.epoch
    return _push(ledger, record, version)


def _wanted_in_any_epoch(exchange: Exchange, shard: int, former: WelcomeHeader) -> bool:
    return True


def _close_and_keep(sync: Sync) -> list[Action]:
    arrived = dict(sync.arrived)
    actions = _apply_close(sync)
    sync.arrived = arrived
    return actions


def _take_late(sync: Sync, push: Push) -> list[Action]:
    sync.arrived[push.worker] = push
    return sync._close_if_full()


def _write_without_fsync(path: Any, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)


def _push_any_version(exchange: Exchange, *given: Any, **named: Any) -> None:
    shown = exchange.versions
    exchange.versions = [2**31 for _ in shown]
    try:
        _exchange_push(exchange, *given, **named)
    finally:
        exchange.versions = shown


def _look_once(self: Sessions, end: Any, worker: int, incarnation: int) -> bool:
    if self.ledger.is_outdated(worker, incarnation):
        end.refuse("a newer one is here")
        return False
    return self._make_way(worker)


def _admit_as_new(book: AccountBook, worker: int, incarnation: int = 0) -> int:
    found = _admit(book, worker, incarnation)
    book._came_again.clear()
    return found


def _nothing(*given: Any) -> None:
    return


def _no_accounts(ledger: Ledger) -> Accounts:
    return {}


def _a_step_further(by: int) -> Callable[[Worker, int], None]:
    return lambda worker, done: _go_on_after(worker, max(0, done + by) if done else done)


def _say_applied(sequence: int, version: int, status: str, *given: Any, **more: Any) -> ReplyHeader:
    told = APPLIED if status == ACCEPTED else status
    return ReplyHeader(sequence, version, told, *given, **more)


def _answer_with_old_parameters(self: Sessions, session: Session) -> None:
    record, ledger = session.record, self.ledger
    if record.outcome != DUPLICATE:
        _make_reply(self, session)
        return
    version = self.shard.version
    ledger.replied(record)
    session.take_reply(ReplyHeader(record.sequence, version, record.outcome, ledger.epoch))


def _any_reply(exchange: Exchange, shard: int, link: WorkerEnd) -> ReplyHeader:
    while (reply := link.wait_reply(0.2)) is None:
        exchange._check_stop()
    return reply


def _open_at_once(master: Master) -> list[Any]:
    try:
        return master._snapshots_now()
    except Exception as error:
        raise RuntimeError("the first snapshots") from error


def _join_at_the_slowest(bounded: Bounded, worker: int) -> list[Action]:
    bounded.clock.setdefault(worker, min(bounded.clock.values(), default=0))
    bounded.present.add(worker)
    return []


def _never_late(exchange: Exchange, shard: int, former: WelcomeHeader) -> bool:
    return exchange._links[shard].welcome.epoch == former.epoch


def _apply_all(ledger: Ledger, pushes: Sequence[Push], version: int) -> list[PushRecord]:
    return [ledger._record_of(push) for push in pushes]


def _commit_nothing(master: Master, outcome: str) -> bool:
    return True


def _reply_first(sync: Sync) -> list[Action]:
    apply, *replies = _apply_close(sync)
    assert isinstance(apply, Apply) and all(isinstance(reply, Reply) for reply in replies)
    return [*replies, apply]


def _ignore_incarnation(ledger: Ledger, worker: int, incarnation: int) -> bool:
    return False


BUGS = {
    bug.name: bug
    for bug in (
        Bug("dedupe off", [(AccountBook, "claim", _claim_all)]),
        Bug(
            "epoch ignored",
            [(Ledger, "push", _push_of_any_epoch), (Exchange, "_is_wanted", _wanted_in_any_epoch)],
        ),
        Bug(
            "incarnation ignored",
            [(Ledger, "is_outdated", _ignore_incarnation)],
        ),
        Bug("taking a turn twice", [(Ledger, "_hear", lambda *given: True)]),
        Bug("round closed twice", [(Sync, "_close", _close_and_keep)]),
        Bug("late gradient accepted in sync", [(Sync, "on_push", _take_late)]),
        Bug("late gradient pushed again in sync", [(Exchange, "_is_wanted", _never_late)]),
        Bug("replies of a round before its update", [(Sync, "_close", _reply_first)]),
        Bug("missing fsync", [(checkpoint, "_write", _write_without_fsync)]),
        Bug("rename without fsync of the folder", [(checkpoint, "_sync_folder", _nothing)]),
        Bug("snapshot mixing rounds", [(Master, "_may_commit", lambda *given: True)]),
        Bug("no last checkpoint", [(Master, "_commit_last", _commit_nothing)]),
        Bug("accounts not saved", [(Ledger, "copy_accounts", _no_accounts)]),
        Bug("pending not copied", [(Copies, "keep", _nothing)]),
        Bug("accepted said to be applied", [(sessions, "ReplyHeader", _say_applied)]),
        Bug(
            "duplicate answered with old parameters",
            [(Sessions, "_make_reply", _answer_with_old_parameters)],
        ),
        Bug("goes on a step too far", [(Worker, "_go_on_after", _a_step_further(1))]),
        Bug("goes on a step too early", [(Worker, "_go_on_after", _a_step_further(-1))]),
        Bug("any reply is taken", [(Exchange, "_next_reply", _any_reply)]),
        Bug("first snapshots in one go", [(Master, "_first_snapshots", _open_at_once)]),
        Bug("clocks that differ", [(Bounded, "on_join", _join_at_the_slowest)]),
        Bug("nobody looks at other servers", [(Exchange, "_look_at_others", _nothing)]),
        Bug("rounds that do not meet", [(Ledger, "pass_over", lambda *given: ())]),
        Bug("versions of another life", [(Exchange, "push", _push_any_version)]),
        Bug("one look at the door", [(Sessions, "_may_come", _look_once)]),
        Bug("late with the first push", [(AccountBook, "admit", _admit_as_new)]),
        Bug("what was left is in the way", [(checkpoint, "_clear", _nothing)]),
        Bug("rejected gradients applied", [(Ledger, "take_part", _apply_all)]),
    )
}


def found_at(bug: Bug, complaints: Callable[[int], Sequence[str]], most: int) -> tuple[int, str]:
    """After how many seeds it is found, and how it shows; 0: it is not."""
    with bug.planted():
        for seed in range(most):
            if found := complaints(seed):
                return seed + 1, found[0]
    return 0, ""
