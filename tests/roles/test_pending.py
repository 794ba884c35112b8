"""Gradients that are answered before they go in: each is in once, whatever happens meanwhile.

The oracle: gradients are powers of two and the rule is their sum, so that the parameters tell which
ones are in.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import TRANSPORTS, Hand, Rig, rig, wait_until

from offbeat.accounts import Account, Accounts
from offbeat.disciplines import Action, Apply, Discipline, Drop, Push, Reply
from offbeat.ledger import Ledger
from offbeat.pushes import Copy, PushRecord
from offbeat.roles import sessions as sessions_module
from offbeat.roles.copies import Copies
from offbeat.rules import DelayCompensated, Gradient, Sum
from offbeat.streams import Mark


def gathering(folder: Path, num_workers: int = 1, size: int = 5, **options: Any) -> Any:
    told = {"rule": Sum(), "discipline_options": {"buffer_size": size}, **options}
    return rig(folder, "buffer", num_workers, **told)


def powers(hand: Hand, *exponents: int) -> None:
    for exponent in exponents:
        hand.exchange(2.0**exponent)


def counted(accounts: Mapping[int, Account]) -> Accounts:
    """Without what batches they were of."""
    return {worker: replace(account, batches=0) for worker, account in accounts.items()}


def inside(r: Rig) -> int:
    (found,) = set(r.shard.params.tolist())
    return -int(found)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_writes_over_what_is_pending_and_nothing_is_lost(
    tmp_path: Path, transport: str
) -> None:
    with gathering(tmp_path, transport=transport) as r:
        hand = r.join(0)
        for exponent in range(4):
            assert hand.exchange(2.0**exponent).version == 0, "it waits for nobody"
        assert inside(r) == 0
        assert hand.exchange(16.0).version == 1
        assert inside(r) == 31 and hand.params.tolist() == [-31.0] * 4
        powers(hand, 5, 6, 7, 8)
        assert inside(r) == 31, "memory that was given back is used again"
        powers(hand, 9)
        assert inside(r) == 1023
        assert counted(r.server.ledger.accounts) == {0: Account(0, 10, applied=10)}
        hand.link.close()
        assert r.drain()
    pushes = r.pushes()
    assert [p["sequence"] for p in pushes] == list(range(1, 11)), "each is written down once"
    assert [p["version"] for p in pushes] == [1] * 5 + [2] * 5
    assert [p["staleness"] for p in pushes] == [0] * 10
    assert all(p["outcome"] == "applied" and p["replied_s"] for p in pushes)


def test_what_a_worker_left_behind_goes_in(tmp_path: Path) -> None:
    with gathering(tmp_path, 2) as r:
        first, second = r.join_all(2)
        powers(first, 0, 1)
        first.link.close()
        wait_until(lambda: 0 not in r.server.ledger.members, "it has left")
        powers(second, 2, 3, 4)
        assert inside(r) == 31
        assert counted(r.server.ledger.accounts)[0] == Account(0, 2, applied=2)


def test_a_successor_goes_on_after_what_is_pending(tmp_path: Path) -> None:
    with gathering(tmp_path, 2) as r:
        first, second = r.join_all(2)
        powers(first, 0, 1)
        first.link.close()
        again = r.join(0, incarnation=1)
        assert again.link.welcome.settled_sequence == 2
        again.sequence = 1
        assert again.exchange(2.0).status == "duplicate", "it will be in"
        powers(again, 2)
        powers(second, 3, 4)
        assert inside(r) == 31
        assert counted(r.server.ledger.accounts)[0] == Account(1, 3, applied=3)


@pytest.mark.parametrize("leaves", [True, False])
def test_when_nobody_is_left_it_goes_in_as_it_is(tmp_path: Path, leaves: bool) -> None:
    with gathering(tmp_path, 2) as r:
        first, second = r.join_all(2)
        powers(first, 0)
        powers(second, 1, 2)
        for hand, sequence in ((first, 1), (second, 2)):
            if leaves:
                hand.link.close()
            else:
                hand.link.finish(sequence)
            wait_until(lambda hand=hand: has_left(r, hand), "it is through")  # type: ignore[misc]
        assert (inside(r), r.shard.version) == (7, 1)
        state = r.snapshot()
        assert counted(state.accounts) == {0: Account(0, 1, applied=1), 1: Account(0, 2, applied=2)}


def has_left(r: Rig, hand: Hand) -> bool:
    ledger = r.server.ledger
    return hand.worker in ledger.finished or hand.worker not in ledger.discipline.present


def test_a_checkpoint_does_not_have_what_is_pending(tmp_path: Path) -> None:
    with gathering(tmp_path, 2, size=3) as r:
        hand, _ = r.join_all(2)
        powers(hand, 0, 1, 2, 3, 4)
        state = r.snapshot()
        assert set(state.tensors["params"].tolist()) == {-7.0}
        found = counted(state.accounts)
        assert found == {0: Account(0, 3, applied=3)}, "who goes on does the rest again"
        hand.link.finish(5)
        wait_until(lambda: has_left(r, hand), "it is through")
        assert counted(r.snapshot().accounts) == {0: Account(0, 3, applied=3)}, "the others go on"
    accounts = state.accounts
    ledger = Ledger(r.server.ledger.discipline)
    ledger.load(accounts)
    assert ledger.join(0, 0)[0] == 3


def test_a_server_that_is_stopped_drops_what_is_pending_and_says_so(tmp_path: Path) -> None:
    with gathering(tmp_path, 2, size=3) as r:
        hand, _ = r.join_all(2)
        powers(hand, 0, 1, 2, 3, 4)
    outcomes = [(p["sequence"], p["outcome"]) for p in r.pushes()]
    assert outcomes[:3] == [(1, "applied"), (2, "applied"), (3, "applied")]
    assert outcomes[3:] == [(4, "dropped"), (5, "dropped")]


def test_a_refused_gradient_has_its_place_and_nothing_of_it_goes_in(tmp_path: Path) -> None:
    with gathering(tmp_path, size=3) as r:
        hand = r.join(0)
        assert hand.exchange(float("nan")).status == "rejected"
        powers(hand, 1, 2)
        assert inside(r) == 6
        assert counted(r.server.ledger.accounts)[0] == Account(0, 3, applied=2, rejected=1)
        hand.link.close()
        assert r.drain()
    assert sorted(p["outcome"] for p in r.pushes()) == ["applied", "applied", "rejected"]


def test_missing_tensors_and_bases_are_kept_with_the_gradient(tmp_path: Path) -> None:
    with gathering(tmp_path, size=2, sizes=(2, 2), rule=DelayCompensated(strength=1)) as r:
        hand = r.join(0)
        hand.exchange(torch.tensor([2.0, 2.0, 99.0, 99.0]), mask=[True, False])
        assert hand.exchange(0.0, mask=[True, False]).version == 1
        assert r.shard.params.tolist() == [-1.0, -1.0, 0.0, 0.0], "the second tensor has none"


def test_rennala_drops_what_is_old_and_gathers_what_is_not(tmp_path: Path) -> None:
    options = {"rule": Sum(), "discipline_options": {"collect": 2}}
    with rig(tmp_path, "rennala", 2, **options) as r:
        fast, slow = r.join_all(2)
        powers(fast, 0, 1)
        assert inside(r) == 3
        assert slow.exchange(1024.0).status == "dropped"
        assert slow.version == 1
        powers(slow, 2)
        powers(fast, 3)
        assert inside(r) == 15
        assert counted(r.server.ledger.accounts) == {
            0: Account(0, 3, applied=3),
            1: Account(0, 2, applied=1, dropped=1),
        }


# -- disciplines of one's own ----------------------------------------------------------------------


class Newest(Discipline):
    """Keeps one gradient back, and drops it for a newer one of the same worker."""

    def __init__(self, workers: Any) -> None:
        super().__init__(workers)
        self.kept: dict[int, Push] = {}

    def on_push(self, push: Push) -> list[Action]:
        before = self.kept.pop(push.worker, None)
        if push.sequence % 3 == 0:
            return [Apply((push,)), Reply(push.worker)]
        self.kept[push.worker] = push
        return [*([Drop(before)] if before else []), Reply(push.worker)]


def test_what_is_pending_can_be_dropped(tmp_path: Path) -> None:
    ledger = Ledger(Newest([0]))
    ledger.join(0, 0)
    first, second = PushRecord(0, 0, 1), PushRecord(0, 0, 2)
    assert ledger.push(first, 0) == [Copy(first), Reply(0)]
    ledger.replied(first)
    assert ledger.take_decided() == ()
    assert ledger.push(second, 0) == [Copy(second), Reply(0)]
    assert ledger.take_decided() == [first] and first.outcome == "dropped"
    assert counted(ledger.accounts)[0] == Account(0, 1, dropped=1)
    (apply, *_) = ledger.push(PushRecord(0, 0, 3), 0)
    assert isinstance(apply, Apply) and second.outcome == "accepted"
    ledger.applied(apply.pushes, 1, 0.0)
    assert counted(ledger.accounts)[0] == Account(0, 3, applied=1, dropped=1)
    assert counted(ledger.copy_accounts())[0] == Account(0, 3, applied=1, dropped=1, lost=1), (
        "who goes on from there goes on after it"
    )


# -- memory ----------------------------------------------------------------------------------------


def made(value: float) -> Gradient:
    return Gradient(
        torch.full((3,), value),
        [True],
        torch.full((2,), value),
        torch.full((1,), int(value)),
        worker=4,
        base_version=7,
        base=torch.full((3,), value),
        rates=torch.full((1,), value, dtype=torch.float64),
    )


def test_a_copy_has_all_that_a_gradient_has_and_its_memory_is_used_again() -> None:
    copies = Copies()
    source, record = made(1.0), PushRecord(0, 0, 1)
    copies.keep(record, source)
    places = [record.copy.values.data_ptr(), record.copy.base.data_ptr()]
    for name in ("values", "floats", "ints", "base", "rates"):
        getattr(source, name).fill_(9)
        assert set(getattr(record.copy, name).tolist()) == {1}, name
    assert (record.copy.mask, record.copy.worker, record.copy.base_version) == ([True], 4, 7)
    copies.give_back(record)
    assert record.copy is None
    copies.keep(record, made(2.0))
    assert [record.copy.values.data_ptr(), record.copy.base.data_ptr()] == places
    assert set(record.copy.rates.tolist()) == {2}
    copies.keep(other := PushRecord(0, 0, 2), made(3.0))
    assert set(record.copy.values.tolist()) == {2} and set(other.copy.values.tolist()) == {3}


def test_copies_are_made_in_the_order_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device every thread has a stream: copying comes after all that was told before, and
    whatever is told later after that."""
    told: list[str] = []

    class Told(Mark):
        def order(self) -> None:
            told.append("order")

        def set(self) -> None:
            told.append("set")

    class Watched(Copies):
        def keep(self, record: PushRecord, gradient: Gradient | None) -> None:
            told.append("copy")
            super().keep(record, gradient)

    monkeypatch.setattr(sessions_module, "make_mark", lambda device: Told())
    monkeypatch.setattr(sessions_module, "Copies", Watched)
    with gathering(tmp_path, size=3) as r:
        hand = r.join(0)
        told.clear()
        powers(hand, 0, 1)
        assert told == ["order", "copy", "set"] * 2


def test_a_refusal_is_told_when_it_is_written_down(tmp_path: Path) -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    with gathering(tmp_path, size=2) as r:
        r.log.addHandler(Lines())
        hand = r.join(0)
        hand.exchange(float("inf"))
        powers(hand, 0)
        wait_until(lambda: any("refused a gradient of worker 0" in line for line in lines), "told")
