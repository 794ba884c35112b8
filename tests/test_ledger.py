"""The ledger, event by event. tests/simulation drives it with everything else, whatever dies."""

import json
import math
from typing import Any

import pytest
from helpers import make_discipline

from offbeat.accounts import (
    ACCEPTED,
    APPLIED,
    DROPPED,
    DUPLICATE,
    STALE,
    Account,
    accounts_from,
    accounts_to_json,
)
from offbeat.disciplines import Apply, Reply
from offbeat.ledger import Ledger
from offbeat.pushes import Dismiss, PushRecord, Snapshot, cut

DISCIPLINES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync with a backup": {"backup_workers": 1},
    "sync with a deadline": {"round_timeout_s": 1.5},
    "apply-reply": {},
    "reply-apply": {},
}


def make_ledger(name: str = "apply-reply", workers: int = 1, **options: Any) -> Ledger:
    chosen = make_discipline(name.split(" with ")[0], range(workers), **DISCIPLINES[name])
    return Ledger(chosen, **options)


def one_push(ledger: Ledger, worker: int = 0, sequence: int = 1, version: int = 0) -> PushRecord:
    record = PushRecord(worker, 0, sequence, base_version=version, epoch=ledger.epoch)
    for action in ledger.push(record, version):
        if isinstance(action, Apply):
            part = ledger.take_part(action.pushes, version)
            ledger.applied(action.pushes, version + 1 if part else None, now=2.5)
    return record


def test_a_gradient_that_is_applied() -> None:
    ledger = make_ledger()
    assert ledger.join(0, incarnation=0) == (0, [])
    record = PushRecord(0, 0, 1, base_version=3, received_s=1.0)
    apply, reply = ledger.push(record, version=7)
    assert isinstance(apply, Apply) and reply == Reply(0)
    assert ledger.take_part(apply.pushes, 7) == [record]
    ledger.applied(apply.pushes, 8, now=1.5)
    assert (record.outcome, record.version, record.staleness) == (APPLIED, 8, 4)
    assert ledger.accounts == {0: Account(0, 1, applied=1, batches=1)}
    assert list(ledger.recent_staleness) == [4]
    event = json.loads(record.event_line(2))
    assert event["kind"] == "push" and event["shard"] == 2 and event["applied_s"] == 1.5
    assert event["replied_s"] is None and event["mixed"] is False


def test_a_push_of_another_epoch_and_one_that_came_before_are_only_answered() -> None:
    ledger = make_ledger(epoch=2)
    ledger.join(0, 0)
    stale = PushRecord(0, 0, 1, epoch=1)
    assert ledger.push(stale, 0) == (Reply(0),) and stale.outcome == STALE
    assert one_push(ledger).outcome == APPLIED, "the stale one had claimed nothing"
    again = one_push(ledger)
    assert again.outcome == DUPLICATE and ledger.accounts[0].applied == 1


@pytest.mark.parametrize(("epoch", "outcome"), [(0, DUPLICATE), (1, STALE)])
def test_servers_in_step_have_a_push_of_which_nothing_comes_take_its_turn(
    epoch: int, outcome: str
) -> None:
    ledger = make_ledger("sync", workers=2, in_step=True)
    ledger.load({0: Account(0, 5, applied=5)})
    for worker in (0, 1):
        ledger.join(worker, 0)
    idle = PushRecord(0, 0, 5, epoch=epoch)
    assert ledger.push(idle, 0) == [], "it waits for the other one"
    apply, *replies = ledger.push(other := PushRecord(1, 0, 1), 0)
    assert isinstance(apply, Apply) and replies == [Reply(0), Reply(1)]
    assert ledger.take_part(apply.pushes, 0) == [other]
    ledger.applied(apply.pushes, 1, now=0.0)
    assert (idle.outcome, other.outcome) == (outcome, APPLIED)
    assert ledger.accounts[0] == Account(0, 5, applied=5)


def test_a_push_that_comes_twice_takes_nobodys_turn() -> None:
    ledger = make_ledger("sync", workers=2, in_step=True)
    for worker in (0, 1):
        ledger.join(worker, 0)
    first, twice = PushRecord(0, 0, 1), PushRecord(0, 0, 1)
    assert ledger.push(first, 0) == []
    apply, *_ = ledger.push(PushRecord(1, 0, 1), 0)
    assert isinstance(apply, Apply)
    ledger.take_part(apply.pushes, 0), ledger.applied(apply.pushes, 1, now=0.0)
    assert ledger.push(twice, 1) == (Reply(0),)
    assert (first.outcome, twice.outcome) == (APPLIED, DUPLICATE)
    assert ledger.push(PushRecord(0, 0, 2), 1) == [], "it waits for the other one"
    apply, *_ = ledger.push(PushRecord(1, 0, 2), 1)
    assert isinstance(apply, Apply) and [push.sequence for push in apply.pushes] == [2, 2]


def test_what_is_of_a_round_that_is_over_elsewhere_is_dropped_and_answered() -> None:
    """Worker 0 pushed step 5 to a server that was started anew; at another one it is in, with
    worker 1's, which comes from there."""
    ledger = make_ledger("sync", workers=3)
    ledger.join(0, 0), ledger.join(2, 0)
    early, late = PushRecord(0, 0, 5), PushRecord(2, 0, 5)
    assert ledger.push(early, 3) == []
    assert ledger.pass_over({0: 5, 1: 5, 2: 5}) == [Reply(0)]
    assert early.outcome == DROPPED
    ledger.replied(early)
    ledger.join(1, 0)
    assert ledger.push(late, 3) == (Reply(2),) and late.outcome == DROPPED
    ledger.replied(late)
    for worker in (0, 1):
        assert ledger.push(PushRecord(worker, 0, 6), 3) == []
    apply, *replies = ledger.push(PushRecord(2, 0, 6), 3)
    assert isinstance(apply, Apply) and len(replies) == 3
    assert [push.sequence for push in apply.pushes] == [6, 6, 6]
    assert ledger.accounts[0].dropped == ledger.accounts[2].dropped == 1
    assert ledger.pass_over({0: 6}) == [], "it is in an update already"


def test_steps_that_are_done_again_are_of_no_round_that_is_over() -> None:
    """Both were through with step 100 when their server died, which is back with 95 of them."""
    ledger = make_ledger("sync", workers=2)
    for worker in (0, 1):
        ledger.join(worker, 0)
        assert ledger.pass_over({0: 100, 1: 100}) == []
    again = [PushRecord(worker, 0, 96) for worker in (0, 1)]
    assert ledger.push(again[0], 95) == []
    assert ledger.pass_over({0: 100, 1: 100}) == [], "somebody else comes, and tells the same"
    apply, *_ = ledger.push(again[1], 95)
    assert isinstance(apply, Apply) and [push.sequence for push in apply.pushes] == [96, 96]
    assert ledger.push(PushRecord(0, 0, 97), 96) == []


def test_who_is_answered_that_its_round_is_over_takes_part_in_the_next() -> None:
    ledger = make_ledger("sync with a backup", workers=3)
    for worker in (0, 1, 2):
        ledger.join(worker, 0)
    ledger.pass_over({2: 5})
    for worker in (0, 1):  # they close the round without it
        actions = ledger.push(PushRecord(worker, 0, 6), 3)
    assert isinstance(actions[0], Apply)
    ledger.take_part(actions[0].pushes, 3), ledger.applied(actions[0].pushes, 4, now=0.0)
    assert ledger.push(PushRecord(2, 0, 5), 4) == (Reply(2),)
    good = PushRecord(2, 0, 6)
    ledger.push(good, 4)
    assert good.outcome != DROPPED


def test_who_leaves_before_its_turn_comes_keeps_its_outcome() -> None:
    ledger = make_ledger("sync", workers=2, in_step=True)
    ledger.load({0: Account(0, 5, applied=5)})
    for worker in (0, 1):
        ledger.join(worker, 0)
    ledger.push(idle := PushRecord(0, 0, 5), 0)
    assert ledger.leave(0) == [] and idle.outcome == DUPLICATE


def test_who_is_through_takes_no_turn() -> None:
    ledger = make_ledger("sync", workers=2, in_step=True)
    ledger.load({0: Account(0, 5, applied=5)})
    for worker in (0, 1):
        ledger.join(worker, 0)
    ledger.finish(0, 5)
    assert ledger.push(PushRecord(0, 0, 5), 0) == (Reply(0),)


def test_no_update_beyond_the_budget() -> None:
    ledger = make_ledger("reply-apply", 2, budget=1)
    ledger.join(0, 0), ledger.join(1, 0)
    records = [PushRecord(0, 0, 1), PushRecord(1, 0, 1)]
    answers = [ledger.push(record, version=0) for record in records]
    for version, actions in enumerate(answers):
        now, later = cut(actions)
        assert now == [Reply(version)] and isinstance(later[0], Apply)
        part = ledger.take_part(later[0].pushes, version)
        ledger.applied(later[0].pushes, version + 1 if part else None, 0.0)
    assert [record.outcome for record in records] == [APPLIED, DROPPED]
    (action,) = ledger.push(PushRecord(0, 0, 2), version=1)
    assert isinstance(action, Dismiss)


def test_a_dropped_gradient_is_settled_when_it_is_answered() -> None:
    ledger = make_ledger("sync with a backup", 2)
    ledger.join(0, 0), ledger.join(1, 0)
    one_push(ledger, worker=0)
    late = one_push(ledger, worker=1)
    assert late.outcome == DROPPED and 1 not in ledger.accounts
    ledger.replied(late)
    ledger.replied(late)
    assert ledger.accounts[1] == Account(0, 1, dropped=1, batches=1)


def test_a_snapshot_is_taken_once_at_the_version_that_was_asked_for() -> None:
    ledger = make_ledger()
    assert ledger.want(5, version=3) == () and not ledger.is_request_met
    assert ledger.due(4) == ()
    (action,) = ledger.due(5)
    assert isinstance(action, Snapshot) and ledger.due(6) == ()
    assert ledger.take() is None
    action.request.snapshot = "the shard"
    assert ledger.is_request_met and ledger.take() == "the shard" and ledger.take() is None
    (late,) = ledger.want(0, version=6)
    ledger.want(9, version=6)
    assert isinstance(late, Snapshot)
    late.request.snapshot = "of a request that was given up"
    assert not ledger.is_request_met


def test_silence_is_counted_from_the_last_message() -> None:
    ledger = make_ledger()
    ledger.join(0, 0, now=10.0)
    assert ledger.silent_s(0, num_heard=0, now=12.0) == 2.0
    assert ledger.silent_s(0, num_heard=4, now=13.0) == 0.0
    assert ledger.silent_s(0, num_heard=4, now=15.5) == 2.5


def test_who_is_here_who_is_awaited_and_who_is_through() -> None:
    ledger = make_ledger("sync", 3)
    ledger.join(0, 0), ledger.join(1, incarnation=4)
    assert ledger.awaited == {2} and ledger.members.keys() == {0, 1}
    assert ledger.is_outdated(1, 3) and not ledger.is_outdated(1, 4)
    waiting = one_push(ledger, worker=0)
    assert waiting.outcome == ACCEPTED and ledger.leave_out([0, 2]) == []
    actions = ledger.finish(1, sequence=0)
    assert isinstance(actions[0], Apply), "the round is full: nobody else is waited for"
    assert ledger.finished == {1} and ledger.leave(1) == () and ledger.members.keys() == {0}
    ledger.join(1, 5)
    assert ledger.finished == set(), "it came again, and is not through"


def test_a_worker_that_comes_again_is_told_where_to_go_on() -> None:
    ledger = make_ledger()
    ledger.join(0, 0)
    one_push(ledger), one_push(ledger, sequence=2, version=1)
    ledger.leave(0)
    assert ledger.join(0, incarnation=1)[0] == 2


def test_a_process_that_was_replaced_does_not_come_back() -> None:
    """Not even when its successor is gone: all that it pushes is taken for what came before."""
    ledger = make_ledger(workers=2)
    ledger.join(0, incarnation=1)
    ledger.leave(0)
    assert ledger.is_outdated(0, 0) and not ledger.is_outdated(0, 1)
    other = make_ledger(workers=2)
    other.load({0: Account(3, 5, applied=5)})
    assert other.is_outdated(0, 2) and not other.is_outdated(0, 3)
    assert not other.is_outdated(1, 0), "of this one nothing is known"


def test_time_alone_can_close_a_round() -> None:
    ledger = make_ledger("sync with a deadline", 2)
    ledger.join(0, 0), ledger.join(1, 0)
    one_push(ledger, worker=0)
    assert ledger.tick(10.0) == [] and ledger.tick(11.0) == []
    assert [type(action) for action in ledger.tick(11.5)] == [Apply, Reply]


def test_a_round_that_a_stop_cuts_off_is_not_closed() -> None:
    ledger = make_ledger("sync", 2)
    ledger.join(0, 0), ledger.join(1, 0)
    record = one_push(ledger, worker=0)
    ledger.is_closing = True
    assert ledger.leave(1) == () and record.outcome == ACCEPTED
    ledger.abandon(record)
    assert record.outcome == DROPPED and not record.is_settled


def test_the_fastest_is_one_that_is_here_and_has_work_to_do() -> None:
    """As workers told last; who is gone or through is waited for by nobody, and nothing is made of
    a speed that is none."""
    ledger = make_ledger(workers=3)
    assert ledger.fastest == 0.0
    for worker in range(3):
        ledger.join(worker, 0)
    told = {0: [20.0, 30.0], 1: [90.0, 60.0], 2: [10.0, 10.0]}
    for sequence in (1, 2):
        for worker, speeds in told.items():
            ledger.push(PushRecord(worker, 0, sequence, speed=speeds[sequence - 1]), 0)
    assert ledger.fastest == 60.0
    for sequence, nonsense in enumerate((0.0, -1.0, math.inf, math.nan), start=3):
        ledger.push(PushRecord(1, 0, sequence, speed=nonsense), 0)
        assert ledger.fastest == 60.0
    ledger.finish(1, 6)
    assert ledger.fastest == 30.0
    ledger.leave(0)
    assert ledger.fastest == 10.0
    ledger.join(0, 1)
    assert ledger.fastest == 10.0, "another process may be on another machine"


def test_a_worker_that_comes_again_is_told_how_far_it_was_in_its_data() -> None:
    """A push may stand for any number of batches."""
    ledger = make_ledger()
    ledger.join(0, 0)
    for sequence, batch in ((1, 49), (2, 65), (3, 66)):
        (apply, _) = ledger.push(record := PushRecord(0, 0, sequence, batch), sequence - 1)
        assert isinstance(apply, Apply)
        if sequence < 3:
            ledger.applied(apply.pushes, sequence, 0.0)
        assert record.batch == batch
    assert ledger.accounts[0].batches == 66, "of what is in"
    other = make_ledger()
    other.load(accounts_from(json.loads(json.dumps(accounts_to_json(ledger.copy_accounts())))))
    other.join(0, 1)
    assert (other.accounts[0].sequence, other.accounts[0].batches) == (2, 66)
