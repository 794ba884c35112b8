"""A live server under each discipline: what its workers see, in threads."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch
from rig import TRANSPORTS, Hand, Rig, in_threads, rig, wait_until

from offbeat import SGD
from offbeat.accounts import Account
from offbeat.errors import ConnectionClosedError
from offbeat.rules import Gradient
from offbeat.run.events import read_events

LOCKED = ["sync", "apply-reply", "reply-apply", "bounded"]


def test_apply_reply_returns_parameters_that_contain_the_gradient(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 2) as r:
        first, second = r.join_all(2)
        assert first.exchange(1.0).version == 1
        assert first.params.tolist() == [-1] * 4
        assert second.exchange(2.0).version == 2
        assert second.params.tolist() == [-3] * 4
        assert second.link.wait_reply(0.01) is None, "one reply per push"
    assert [(p["staleness"], p["outcome"]) for p in r.pushes()] == [(0, "applied"), (1, "applied")]


@pytest.mark.parametrize("discipline", ["reply-apply", "lock-free"])
def test_reply_apply_answers_with_the_newest_and_applies_once(
    tmp_path: Path, discipline: str
) -> None:
    with rig(tmp_path, discipline, 1) as r:
        (hand,) = r.join_all(1)
        for step in range(1, 6):
            assert hand.exchange(1.0).version == step - 1, "not yet in"
            wait_until(lambda step=step: r.shard.version == step, "the gradient is in")
        assert r.shard.params.tolist() == [-5] * 4
    assert [p["staleness"] for p in r.pushes()] == [0, 1, 1, 1, 1]


def test_sync_answers_all_with_the_same_bits_after_the_round(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 3) as r:
        hands = r.join_all(3)
        hands[2].push(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        hands[0].push(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        assert not hands[0].has_reply() and not hands[2].has_reply()
        hands[1].push(torch.tensor([5.0, 6.0, 7.0, 8.0]))
        versions = [hand.reply().version for hand in hands]
        assert versions == [1, 1, 1]
        bits = {hand.params.numpy().tobytes() for hand in hands}
        assert len(bits) == 1
    assert {p["staleness"] for p in r.pushes()} == {0}


def test_sync_goes_on_when_a_worker_leaves_or_its_deadline_passes(tmp_path: Path) -> None:
    now = [0.0]
    options = {"round_timeout_s": 20.0}
    with rig(tmp_path, "sync", 3, clock=lambda: now[0], discipline_options=options) as r:
        hands = r.join_all(3)
        hands[0].push(1.0)
        hands[1].push(3.0)
        hands[2].link.close()
        assert hands[0].reply().version == hands[1].reply().version == 1
        assert hands[0].params.tolist() == [-2] * 4
        hands[0].push(1.0)
        assert not hands[0].has_reply(0.3), "the clock stands still"
        now[0] = 21.0  # nobody counts as gone by then
        assert hands[0].reply().version == 2, "the deadline closes the round"
        assert hands[0].params.tolist() == [-3] * 4
        assert hands[1].exchange(1.0).status == "dropped"
    assert [p["outcome"] for p in r.pushes()].count("dropped") == 1


def test_backup_workers_drop_the_late_gradient_and_answer_at_once(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 2, discipline_options={"backup_workers": 1}) as r:
        fast, slow = r.join_all(2)
        assert fast.exchange(1.0).version == 1
        late = slow.exchange(100.0)
        assert (late.status, late.version) == ("dropped", 1)
        assert slow.params.tolist() == [-1] * 4
        slow.push(1.0)
        assert slow.reply().version == 2


def test_bounded_holds_the_fast_worker_back(tmp_path: Path) -> None:
    with rig(tmp_path, "bounded", 2, discipline_options={"staleness": 1}) as r:
        fast, slow = r.join_all(2)
        fast.exchange(1.0)
        fast.push(1.0)
        assert not fast.has_reply()
        slow.exchange(1.0)
        assert fast.reply().version == 3
        fast.push(1.0)
        slow.link.close()
        assert fast.reply().version == 4, "a finished worker leaves the count"


@pytest.mark.parametrize("discipline", ["apply-reply", "reply-apply", "bounded", "lock-free"])
def test_a_stalled_worker_and_an_unread_reply_delay_nobody(tmp_path: Path, discipline: str) -> None:
    options = {"staleness": float("inf")} if discipline == "bounded" else {}
    with rig(tmp_path, discipline, 3, discipline_options=options) as r:
        active, lazy_reader, _stalled = r.join_all(3)
        lazy_reader.push(1.0)  # and never reads the reply
        for _ in range(20):
            active.exchange(1.0)
        wait_until(lambda: r.shard.version == 21, "all of them are in")


@pytest.mark.parametrize("discipline", [*LOCKED, "lock-free"])
def test_a_duplicate_is_answered_and_not_applied_again(tmp_path: Path, discipline: str) -> None:
    with rig(tmp_path, discipline, 1) as r:
        (hand,) = r.join_all(1)
        hand.exchange(1.0)
        assert hand.exchange(1.0, sequence=1).status == "duplicate"
        hand.exchange(1.0, sequence=2)
        assert hand.exchange(1.0, sequence=2).status == "duplicate"
        wait_until(lambda: r.shard.version == 2, "both are in")
        assert r.shard.params.tolist() == [-2] * 4
        hand.link.close()
        assert r.drain(10)
    assert [p["outcome"] for p in r.pushes()] == ["applied", "duplicate", "applied", "duplicate"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("discipline", [*LOCKED, "lock-free"])
def test_an_unusable_gradient_changes_nothing_and_is_counted(
    tmp_path: Path, discipline: str, bad: float
) -> None:
    with rig(tmp_path, discipline, 1, optimizer=SGD(lr=1.0, momentum=0.9), ema_decay=0.9) as r:
        (hand,) = r.join_all(1)
        hand.exchange(1.0)
        wait_until(lambda: r.shard.version == 1, "the good one is in")
        before = r.snapshot()
        assert hand.exchange(torch.tensor([0.0, 0.0, bad, 0.0])).status == "rejected"
        assert hand.exchange(0.0, void=True).status == "rejected"
        after = r.snapshot()
        assert after.version == before.version == 1
        assert all(torch.equal(before.tensors[k], after.tensors[k]) for k in before.tensors)
        hand.exchange(1.0)
        wait_until(lambda: r.shard.version == 2, "the next good one is in")
        hand.link.close()
        assert r.drain(10)
    outcomes = [p["outcome"] for p in r.pushes()]
    assert outcomes == ["applied", "rejected", "rejected", "applied"]


def test_in_sync_an_unusable_gradient_takes_no_part_and_keeps_the_pace(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 2) as r:
        hands = r.join_all(2)
        hands[0].push(float("nan"))
        hands[1].push(4.0)
        assert [h.reply().status for h in hands] == ["rejected", "applied"]
        assert r.shard.params.tolist() == [-4] * 4, "the mean of what was usable"
        for hand in hands:
            hand.push(float("nan"))
        assert [h.reply().status for h in hands] == ["rejected", "rejected"]
        assert r.shard.version == 1, "a round of nothing is no update"
        for hand in hands:
            hand.push(1.0)
        assert [h.reply().version for h in hands] == [2, 2]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("discipline", LOCKED)
def test_no_reply_of_a_locked_discipline_mixes_two_versions(
    tmp_path: Path, discipline: str, transport: str
) -> None:
    """Every update stamps its version into every element, so a mixed reply shows itself."""
    options = {"staleness": 1} if discipline == "bounded" else {}
    sizes = (50_001,)
    with rig(
        tmp_path, discipline, 3, sizes=sizes, discipline_options=options, transport=transport
    ) as r:
        hands = r.join_all(3)

        def work(hand: Hand) -> None:
            for _ in range(60):
                version = hand.exchange(-1.0).version
                least, most = torch.aminmax(hand.params)
                assert least.item() == most.item() == version
            hand.link.close()

        in_threads(*(lambda hand=hand: work(hand) for hand in hands))
        assert r.drain(10)
    pushes = r.pushes()
    assert not any(p["mixed"] for p in pushes)
    assert {p["outcome"] for p in pushes} == {"applied"}
    assert r.shard.version == (60 if discipline == "sync" else 180)


def test_a_snapshot_is_taken_at_the_version_asked_for(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 1) as r:
        (hand,) = r.join_all(1)
        r.want(3)
        hand.exchange(1.0)
        assert not r.is_ready()
        for _ in range(4):
            hand.exchange(1.0)
        assert r.is_ready()
        snapshot = r.take()
        assert (snapshot.version, snapshot.tensors["params"].tolist()) == (3, [-3] * 4)
        assert snapshot.accounts == {0: Account(0, 3, applied=3, batches=4)}
        assert not r.is_ready()


def test_strangers_and_twins_are_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 2) as r:
        hand = r.join(0)
        with pytest.raises(ConnectionClosedError, match="has another run: the model"):
            r.join(1, fingerprint="another")
        newer = r.join(1, incarnation=2)
        with pytest.raises(ConnectionClosedError, match="a newer worker 1 is here already"):
            r.join(1, incarnation=1)
        assert newer.exchange(1.0).version == 1
        assert hand.exchange(1.0).version == 2


def test_a_failing_update_is_reported_to_the_worker_and_to_the_engine(tmp_path: Path) -> None:
    def broken(version: int, total: int | None) -> float:
        raise ZeroDivisionError("no schedule")

    with rig(tmp_path, "apply-reply", 1, schedule=broken) as r:
        (hand,) = r.join_all(1)
        hand.push(1.0)
        with pytest.raises(ConnectionClosedError, match="no schedule"):
            hand.reply()
        assert isinstance(r.server.failure, ZeroDivisionError)


class HalfWay:
    """Holds an update up when its optimizer has stepped and the rest is still to be done."""

    def __init__(self, r: Rig) -> None:
        self.gate, self.began = threading.Event(), threading.Event()
        self.updater = r.shard.updaters[0]
        self.rest = self.updater._merge_buffers
        self.updater._merge_buffers = self._hold  # type: ignore[method-assign]

    def _hold(self, gradients: object) -> None:
        self.updater._merge_buffers = self.rest  # type: ignore[method-assign]
        self.began.set()
        assert self.gate.wait(20)
        self.rest(gradients)  # type: ignore[arg-type]


def test_lock_free_an_apply_held_up_half_way_delays_nobodys_reply(tmp_path: Path) -> None:
    with rig(tmp_path, "lock-free", 3) as r:
        hands = r.join_all(3)
        half_way = HalfWay(r)
        try:
            hands[0].exchange(1.0)  # answered although its own apply hangs
            assert half_way.began.wait(10)
            for _ in range(10):
                for hand in hands[1:]:
                    hand.exchange(1.0)
            late = r.join(7)  # not even a join is delayed
            late.exchange(1.0)
        finally:
            half_way.gate.set()
        wait_until(lambda: r.shard.version == 22, "the held-up one is in as well")
        assert r.shard.params.tolist() == [-22] * 4
        for hand in (*hands, late):
            hand.link.close()
        assert r.drain(10)
    pushes = r.pushes()
    assert [p["mixed"] for p in pushes if p["worker"] == 0] == [False]
    assert {p["mixed"] for p in pushes if p["worker"] != 0} == {True}, "seen half-way, and said so"


@pytest.mark.parametrize("discipline", ["reply-apply", "apply-reply"])
def test_with_a_lock_an_apply_half_way_is_waited_for(tmp_path: Path, discipline: str) -> None:
    """The contrast, which shows that the test above could fail."""
    with rig(tmp_path, discipline, 2) as r:
        hands = r.join_all(2)
        half_way = HalfWay(r)
        try:
            hands[0].push(1.0)
            assert half_way.began.wait(10)
            hands[1].push(1.0)
            assert not hands[1].has_reply()
        finally:
            half_way.gate.set()
        hands[0].reply()
        hands[1].reply()


def test_lock_free_takes_no_lock_on_the_request_path(tmp_path: Path) -> None:
    with rig(tmp_path, "lock-free", 2) as r:
        hands = r.join_all(2)
        with r.server.sessions._mutex, r.server.sessions._membership:
            for hand in hands:
                for _ in range(5):
                    hand.exchange(1.0)
            wait_until(lambda: r.shard.version == 10, "all are in, with every lock taken")
        assert isinstance(r.server.sessions._lock, contextlib.nullcontext)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_lock_free_keeps_nothing_of_connections_that_are_over(
    transport: str, tmp_path: Path
) -> None:
    """What a session applied its gradients with is the next one's."""
    with rig(tmp_path, "lock-free", 2, transport=transport, optimizer=SGD(0.5, momentum=0.5)) as r:
        other = r.join(1)
        for step in range(1, 6):
            hand = r.join(0)
            hand.sequence = hand.link.welcome.settled_sequence
            assert hand.sequence == step - 1
            hand.exchange(1.0)
            hand.link.close()
            wait_until(lambda: 0 not in r.server.sessions._sessions, "it has left")
        other.exchange(1.0)
        wait_until(lambda: r.shard.version == 6, "all are in")
        assert len(r.shard.updaters) <= 2


def test_a_time_that_is_none_is_not_waited_for(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 1) as r:
        assert r.server.answer({"ask": "round", "wait_s": float("nan")}, {})[0]["number"] == 0


@pytest.mark.parametrize("num_pushes", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_lock_free_eight_sessions_apply_every_gradient_exactly_once(
    tmp_path: Path, num_pushes: int
) -> None:
    """Each session's gradients go to a tensor of its own, so that no addition can be lost to
    another; what each optimizer saw is written down besides."""
    num_sessions = 8
    with rig(tmp_path, "lock-free", num_sessions, sizes=(2,) * num_sessions) as r:
        hands = r.join_all(num_sessions)
        seen: list[list[float]] = [[] for _ in range(num_sessions)]
        for session, updater in enumerate(r.shard.updaters):

            def write_down(values, mask, *more, s=session, step=updater._step) -> None:  # type: ignore[no-untyped-def]
                seen[s].append(values[2 * s + 1].item())
                step(values, mask, *more)

            updater._step = write_down  # type: ignore[method-assign]

        masks = [[t == s for t in range(num_sessions)] for s in range(num_sessions)]
        for number in range(num_pushes):
            for s, hand in enumerate(hands):
                values = torch.zeros(2 * num_sessions)
                values[2 * s] = 1.0
                values[2 * s + 1] = number
                hand.push(values, masks[s])
            for hand in hands:
                hand.reply()
        for hand in hands:
            hand.link.close()
        assert r.drain(60)
        assert r.shard.version == num_sessions * num_pushes
        assert seen == [[float(n) for n in range(num_pushes)]] * num_sessions
        assert r.shard.params[::2].tolist() == [-num_pushes] * num_sessions
    pushes = r.pushes()
    assert sorted(p["version"] for p in pushes) == list(range(1, num_sessions * num_pushes + 1))
    assert {(p["worker"], p["sequence"]) for p in pushes} == {
        (s, n) for s in range(num_sessions) for n in range(1, num_pushes + 1)
    }


def test_lock_free_sessions_racing_on_the_same_elements_skip_no_gradient(tmp_path: Path) -> None:
    """Additions may be lost to a race, as in Hogwild; gradients may not, and momentum is shared."""
    with rig(tmp_path, "lock-free", 4, sizes=(20_000,), optimizer=SGD(lr=1e-3, momentum=0.5)) as r:
        hands = r.join_all(4)
        consumed: list[float] = []
        for updater in r.shard.updaters:
            updater.optimizer.register_step_pre_hook(
                lambda optimizer, args, kwargs: consumed.append(
                    optimizer.param_groups[0]["params"][0].grad[0].item()
                )
            )

        def work(hand: Hand) -> None:
            for number in range(200):
                hand.exchange(float(hand.worker * 1000 + number))
            hand.link.close()

        in_threads(*(lambda hand=hand: work(hand) for hand in hands))
        assert r.drain(20)
        assert sorted(consumed) == sorted(w * 1000 + n for w in range(4) for n in range(200))
        buffers = {
            u.optimizer.state[u.aliases[0].param]["momentum_buffer"].data_ptr()
            for u in r.shard.updaters
        }
        assert len(buffers) == 1


def test_a_stalled_server_does_not_stop_another_from_applying(tmp_path: Path) -> None:
    """Two servers with a slice each; the second one hangs in an update."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        rig(tmp_path / "a", "apply-reply", 2) as a,
        rig(tmp_path / "b", "apply-reply", 2) as b,
    ):
        on_a, on_b = a.join_all(2), b.join_all(2)
        half_way = HalfWay(b)
        try:
            on_a[0].push(1.0)
            on_b[0].push(1.0)
            assert half_way.began.wait(10)
            assert on_a[0].reply().version == 1
            assert on_a[1].exchange(1.0).version == 2, "the other worker's slice goes on"
            assert not on_b[0].has_reply(), "so worker 0 cannot go on yet"
        finally:
            half_way.gate.set()
        assert on_b[0].reply().version == 1


def broken_at(step: int):  # type: ignore[no-untyped-def]
    def schedule(version: int, total: int | None) -> float:
        if version == step:
            raise IndexError("no rate left")
        return 1.0

    return schedule


def test_when_an_update_fails_nobody_is_left_waiting(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 3, schedule=broken_at(0)) as r:
        hands = r.join_all(3)
        for hand in hands:
            hand.push(1.0)
        for hand in hands:
            with pytest.raises(ConnectionClosedError, match="no rate left"):
                hand.reply()
        assert r.drain(5)
        assert isinstance(r.server.failure, IndexError)


def test_an_update_that_a_leave_brings_about_may_fail_too(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 2, schedule=broken_at(0)) as r:
        hands = r.join_all(2)
        hands[0].push(1.0)
        hands[1].link.close()
        with pytest.raises(ConnectionClosedError, match="no rate left"):
            hands[0].reply()
        assert r.drain(5)
        assert isinstance(r.server.failure, IndexError)


def test_a_snapshot_knows_what_is_applied_rather_than_what_has_come(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 2) as r:
        hands = r.join_all(2)
        hands[0].push(1.0)
        assert not hands[0].has_reply()
        assert r.snapshot().accounts == {}
        hands[1].push(1.0)
        hands[0].reply()
        one = Account(0, 1, applied=1, batches=2)
        assert r.snapshot().accounts == {0: one, 1: one}
        hands[1].reply()
        hands[0].push(1.0)
        wait_until(lambda: r.has_come(hands[0]), "the push has come")
    assert r.pushes()[-1]["outcome"] == "dropped", "the server was stopped before its round"


# -- joining, leaving, coming back -----------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_that_comes_again_takes_the_place_of_its_former_self(
    tmp_path: Path, transport: str
) -> None:
    with rig(tmp_path, "sync", 2, transport=transport) as r:
        first, other = r.join_all(2)
        first.push(5.0)  # waits for the other one, and is given up
        wait_until(lambda: r.has_come(first), "the push has come")
        again = r.join(0, incarnation=1)
        with pytest.raises(ConnectionClosedError, match="took this one's place"):
            first.reply()
        assert again.link.welcome.settled_sequence == 0
        again.push(1.0)
        other.push(3.0)
        assert [again.reply().version, other.reply().version] == [1, 1]
        assert again.params.tolist() == [-2] * 4, "the gradient that was given up is not in"
        for hand in (first, again, other):
            hand.link.close()
    outcomes = [(p["worker"], p["incarnation"], p["outcome"]) for p in r.pushes()]
    assert sorted(outcomes) == [(0, 0, "dropped"), (0, 1, "applied"), (1, 0, "applied")]


def test_a_welcome_tells_what_of_the_worker_is_in(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 1) as r:
        hand = r.join(0)
        for _ in range(3):
            hand.exchange(1.0)
        hand.link.close()
        again = r.join(0)
        assert again.link.welcome.settled_sequence == 3
        again.sequence = 2
        assert again.exchange(1.0).status == "duplicate", "it is in already"
        assert again.exchange(1.0).status == "applied"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sync_notices_at_once_when_a_waiting_worker_dies(tmp_path: Path, transport: str) -> None:
    with rig(tmp_path, "sync", 3, transport=transport) as r:
        hands = r.join_all(3)
        hands[0].push(100.0)
        wait_until(lambda: r.has_come(hands[0]), "the push has come")
        hands[0].link.close()
        wait_until(lambda: 0 not in r.server.ledger.members, "its death was noticed, in mid-round")
        hands[1].push(1.0)
        hands[2].push(3.0)
        assert [hand.reply().version for hand in hands[1:]] == [1, 1]
        assert hands[1].params.tolist() == [-2] * 4
        for hand in hands[1:]:
            hand.link.close()


def test_a_silent_worker_is_declared_gone_and_a_beating_one_is_not(tmp_path: Path) -> None:
    timeout = {"worker_timeout_s": 0.5}
    with rig(tmp_path, "sync", 2, transport="unix", server_options=timeout) as r:
        silent, slow = r.join_all(2)
        slow.push(1.0)
        wait_until(lambda: 0 not in r.server.ledger.members, "the silent one was declared gone")
        assert slow.reply().version == 1, "and the round closed without it"
        for _ in range(10):
            slow.link.beat()
            assert not slow.has_reply(0.1)
        assert slow.exchange(1.0).version == 2, "a long step is not a hang"
        silent.push(1.0)
        with pytest.raises(ConnectionClosedError, match="nothing was heard of worker 0"):
            silent.reply()
        slow.link.close()
        silent.link.close()


def test_a_push_of_another_epoch_is_refused_and_answered(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 1, ledger_options={"epoch": 3}) as r:
        hand = r.join(0)
        assert hand.link.welcome.epoch == 3
        answer = hand.exchange(1.0, epoch=2)
        assert (answer.status, answer.epoch, answer.version) == ("stale", 3, 0)
        assert hand.exchange(1.0).status == "applied"


def test_finished_workers_are_counted_and_others_are_not(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 3) as r:
        hands = r.join_all(3)
        hands[0].link.finish(0)
        hands[0].link.close()
        hands[1].link.close()
        wait_until(lambda: len(r.server.ledger.members) == 1, "two have left")
        status, _ = r.server.answer({"ask": "status"}, {})
        assert status["finished"] == [0]
        hands[2].link.close()


def test_an_unknown_wish_of_the_master_ends_its_call_alone(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 1) as r:
        hand = r.join(0)
        with pytest.raises(ConnectionClosedError, match="unknown"):
            r.server.answer({"ask": "the moon"}, {})
        assert hand.exchange(1.0).status == "applied"


@pytest.mark.parametrize(("at", "falls_at"), [(5, 5), (0, 1)])
def test_a_fall_that_an_update_under_way_has_missed_is_told_as_late(
    tmp_path: Path, at: int, falls_at: int
) -> None:
    with rig(tmp_path, "lock-free", 1) as r:
        r.shard.make_updater(shared=True).begin([Gradient(torch.ones(4))])
        r.server.answer({"ask": "fall", "versions": [at]}, {})
        r.events.flush()
        told = [event for event in read_events(tmp_path) if event.get("phase") == "fall"]
        assert [event["version"] for event in told] == [falls_at] and r.shard.falls == [at]
