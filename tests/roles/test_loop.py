"""One thread for all workers of a small slice: what they see is what threads of their own show."""

import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from rig import Hand, in_threads, rig, wait_until

from offbeat.disciplines import Action, Push
from offbeat.errors import ConnectionClosedError
from offbeat.roles import sessions as sessions_module
from offbeat.transport import sockets
from offbeat.transport.wire import CALL, GOODBYE, PUSH, REFUSE, pack

DISCIPLINES = ["sync", "apply-reply", "reply-apply", "bounded", "lock-free"]


def threads_of(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def die(hand: Hand) -> None:
    """As a process that is killed: an end of file, without a word."""
    hand.link._connection._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]


def exchange_all(hands: list[Hand], times: int) -> None:
    """Each in a thread of its own, in which it may have to wait for the others."""

    def work(hand: Hand) -> None:
        for _ in range(times):
            hand.exchange(1.0)

    in_threads(*(lambda hand=hand: work(hand) for hand in hands))


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_sixty_four_workers_are_served_by_one_thread(tmp_path: Path, discipline: str) -> None:
    with rig(tmp_path, discipline, 64, transport="unix") as r:
        hands = r.join_all(64)
        exchange_all(hands, 5)
        updates = 5 if discipline == "sync" else 320
        wait_until(lambda: r.shard.version == updates, "all are in")
        assert threads_of("ps-0-loop") == 1
        assert r.shard.params.tolist() == [-updates] * 4
        for hand in hands:
            hand.link.close()
        assert r.drain()
    pushes = r.pushes()
    assert len(pushes) == 320
    assert {p["outcome"] for p in pushes} == {"applied"}
    assert not any(p["mixed"] for p in pushes)
    assert {w: a.applied for w, a in r.server.ledger.accounts.items()} == dict.fromkeys(
        range(64), 5
    )


def test_a_large_slice_has_a_thread_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "LARGE_FROM", 4)
    with rig(tmp_path, "apply-reply", 3, transport="unix") as r:
        exchange_all(r.join_all(3), 20)
        assert r.shard.version == 60
        assert threads_of("ps-0-loop") == 0


def test_headers_travel_over_the_socket_where_memory_promises_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "IN_ORDER", False)
    with rig(tmp_path, "bounded", 3, transport="unix") as r:
        exchange_all(r.join_all(3), 20)
        assert r.shard.version == 60
        assert threads_of("ps-0-loop") == 1


def test_bounded_holds_back_and_lets_go(tmp_path: Path) -> None:
    options = {"staleness": 1}
    with rig(tmp_path, "bounded", 2, transport="unix", discipline_options=options) as r:
        fast, slow = r.join_all(2)
        fast.exchange(1.0)
        fast.push(1.0)
        assert not fast.has_reply()
        slow.exchange(1.0)
        assert fast.reply().version == 3
        fast.push(1.0)
        wait_until(lambda: r.has_come(fast), "the push has come")
        slow.link.finish(1)
        assert fast.reply().version == 4, "who is through is not waited for"


def test_a_deadline_closes_a_round_and_silence_a_session(tmp_path: Path) -> None:
    now = [0.0]
    options = {"round_timeout_s": 5.0}
    with rig(
        tmp_path,
        "sync",
        2,
        transport="unix",
        clock=lambda: now[0],
        discipline_options=options,
        server_options={"worker_timeout_s": 20.0},
    ) as r:
        prompt, silent = r.join_all(2)
        prompt.push(1.0)
        assert not prompt.has_reply(0.3), "the clock stands still"
        now[0] = 6.0
        assert prompt.reply().version == 1
        assert silent.exchange(1.0).status == "dropped"
        wait_until(lambda: r.server.ledger.members[1].num_heard > 0, "it was noted when")
        now[0] = 30.0
        with pytest.raises(ConnectionClosedError, match="nothing was heard of worker 1"):
            silent.reply()


@pytest.mark.parametrize("discipline", ["sync", "bounded"])
def test_a_worker_that_dies_while_others_wait_for_it_is_waited_for_no_longer(
    tmp_path: Path, discipline: str
) -> None:
    options = {"staleness": 0} if discipline == "bounded" else {}
    with rig(tmp_path, discipline, 3, transport="unix", discipline_options=options) as r:
        hands = r.join_all(3)
        for hand in hands[:2]:
            hand.push(1.0)
            wait_until(lambda hand=hand: r.has_come(hand), "the push has come")
        die(hands[2])
        assert [hand.reply().status for hand in hands[:2]] == ["applied", "applied"]
        hands[0].push(1.0)
        wait_until(lambda: r.has_come(hands[0]), "it waits for the other one")
        die(hands[0])
        wait_until(lambda: 0 not in r.server.ledger.members, "it is gone, though it waited")
        assert hands[1].exchange(1.0).status == "applied"
    of_the_dead = [p["outcome"] for p in r.pushes() if p["worker"] == 0]
    assert of_the_dead == ["applied", "dropped" if discipline == "sync" else "applied"]


def test_a_worker_that_comes_again_takes_its_place_in_the_loop(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 2, transport="unix") as r:
        first, second = r.join_all(2)
        first.push(1.0)
        wait_until(lambda: r.has_come(first), "it waits for its reply")
        again = r.join(0, incarnation=1)
        again.push(2.0, sequence=1)
        second.push(4.0)
        assert again.reply().version == second.reply().version == 1
        assert again.params.tolist() == [-3] * 4


def test_who_never_reads_is_sent_away_and_delays_nobody(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 2, transport="unix") as r:
        lazy, active = r.join_all(2)
        lazy.link._slots.replies.sleeps(True)  # type: ignore[attr-defined]
        while 0 in r.server.ledger.members:
            lazy.push(1.0)
            wait_until(
                lambda: r.has_come(lazy) or 0 not in r.server.ledger.members, "it was dealt with"
            )
            active.exchange(1.0)
        assert lazy.sequence > 100, "a few are no harm"
        assert active.exchange(1.0).status == "applied"


@pytest.mark.parametrize("kind", [PUSH, REFUSE, GOODBYE, CALL])
def test_a_body_that_never_comes_is_not_waited_for(tmp_path: Path, kind: int) -> None:
    with rig(tmp_path, "apply-reply", 2, transport="unix") as r:
        odd, active = r.join_all(2)
        odd.link._connection.send(pack(kind, length=100))  # type: ignore[attr-defined]
        wait_until(lambda: 0 not in r.server.ledger.members, "it was sent away")
        assert active.exchange(1.0).version == 1


def test_an_update_that_fails_in_the_loop_ends_everything(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 3, transport="unix") as r:
        hands = r.join_all(3)
        r.shard.updaters[0].optimizer = None  # type: ignore[assignment]
        r.shard.updaters[0].stateless = False
        hands[0].push(1.0)
        for hand in hands:
            with pytest.raises(ConnectionClosedError, match="server 0 failed") as ended:
                hand.reply()
            assert ended.value.over
        assert r.server.failure is not None


def test_a_worker_that_is_there_is_not_taken_for_gone(tmp_path: Path) -> None:
    """A poll may tell of the one before, whose connection had the same number."""
    with rig(tmp_path, "sync", 2, transport="unix") as r:
        one, other = r.join_all(2)
        one.push(1.0)
        wait_until(lambda: r.has_come(one), "the push has come")
        loop = r.server.sessions.loop
        (member,) = loop._waiting.values()
        loop._vanish(member)
        other.push(3.0)
        assert [one.reply().version, other.reply().version] == [1, 1]
        assert one.params.tolist() == [-2] * 4


def test_a_push_of_which_nobody_told_is_found_all_the_same(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 1, transport="unix") as r:
        hand = r.join(0)
        hand.exchange(1.0)
        box = hand.link._slots.pushes  # type: ignore[attr-defined]
        if box is None:
            pytest.skip("no boxes on this processor")
        hand.link.beat = lambda: None  # type: ignore[method-assign]
        box.reader_sleeps = lambda: False
        assert hand.exchange(1.0).version == 2


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_users_exit_in_a_discipline_leaves_nobody_waiting(tmp_path: Path, transport: str) -> None:
    with rig(tmp_path, "apply-reply", 2, transport=transport) as r:
        one, other = r.join_all(2)

        def leave(push: Push) -> Sequence[Action]:
            raise SystemExit("of the user's")

        r.server.ledger.discipline.on_push = leave  # type: ignore[method-assign]
        one.push(1.0)
        for hand in (one, other):
            with pytest.raises(ConnectionClosedError, match="server 0 failed: SystemExit: of the"):
                hand.reply()
        assert isinstance(r.server.failure, SystemExit)
