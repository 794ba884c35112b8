"""Rounds that wait for the norm of all servers' slices: what is decided, and what workers see."""

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_job
from rig import TIMEOUT_S, TRANSPORTS, Hand, Rig, in_threads, rig, wait_until

from offbeat.clipping import ClipNorm, joined_norm
from offbeat.errors import ConnectionClosedError
from offbeat.roles.calls import AskRound, EndRound, RoundPart
from offbeat.roles.norms import LEAVE_S, STARTED_ANEW_S, Meeting, Norms
from offbeat.transport.inproc import InprocCallEnd, InprocNetwork

PATIENCE_S = 30.0
ALL = frozenset((0, 1))


def part(*steps: int, held: bool = True, norm: float = 3.0, **more: object) -> RoundPart:
    """Of a round that every worker gave its gradient of these steps to, the first's first."""
    given = {"epoch": 0, "present": ALL, "held": held, "norms": {0: norm}, "number": sum(steps)}
    return RoundPart(pushes=frozenset(enumerate(steps)), **{**given, **more})  # type: ignore


def test_a_norm_is_known_when_every_server_has_its_part() -> None:
    meeting = Meeting(3, PATIENCE_S)
    first, second, third = part(5, 5), part(5, 5, norm=4.0), part(5, 5, norm=12.0)
    assert meeting.look([first, None, None], 0.0) == {}
    assert meeting.look([first, second, part(4, 4, held=False)], 1e-3) == {}
    assert meeting.look([first, second, third], 2e-3) == {0: 13.0, 1: 13.0, 2: 13.0}


def test_what_a_server_let_go_in_already_counts() -> None:
    """As when the master died between two servers."""
    meeting = Meeting(2, PATIENCE_S)
    assert meeting.look([part(5, 5), part(5, 5, held=False, norm=4.0)], 0.0) == {0: 5.0}
    assert meeting.look([part(5, 5), part(5, held=False, norm=4.0)], 0.0) == {0: 5.0}


def test_slices_of_different_rounds_never_meet() -> None:
    meeting = Meeting(2, PATIENCE_S)
    assert meeting.look([part(6, 7), part(6, 6, held=False)], 0.0) == {}
    assert meeting.look([part(6, 6), part(7, 6)], 1.0) == {0: 3.0}, "the other one is past it"
    assert meeting.look([None, part(7, 6)], 1.1) == {}


def test_who_tells_of_a_round_without_somebody_is_asked_again() -> None:
    """It may have been opened again, for a worker that came."""
    meeting = Meeting(2, PATIENCE_S)
    assert meeting.look([None, part(5)], 1.0, [0.9, 0.9]) == {}
    assert meeting.look([part(5, 5, norm=4.0), part(5)], 2.0, [1.9, 0.9]) == {}
    assert meeting.doubtful == {1}
    assert meeting.look([part(5, 5, norm=4.0), part(held=False)], 2.1, [1.9, 2.0]) == {}
    again = part(5, 5, number=7)
    assert meeting.look([part(5, 5, norm=4.0), again], 2.2, [1.9, 2.1]) == {0: 5.0, 1: 5.0}


def test_nobody_waits_for_a_server_that_will_not_have_the_round() -> None:
    meeting = Meeting(2, PATIENCE_S)
    before = part(4, 4, held=False)
    assert meeting.look([part(5, 5), part(4, 4, held=False, present=frozenset([2]))], 0) == {0: 3.0}
    assert meeting.look([part(5, 5), before], 0.0) == {}
    assert meeting.look([part(5, 5), before], 10.0) == {}
    assert meeting.look([part(5, 5), before], 10.0 + PATIENCE_S + 1) == {0: 3.0}


def test_nobody_waits_for_a_server_whose_workers_all_wait_elsewhere() -> None:
    """It dropped what is in time here, and who was in time there has left."""
    meeting = Meeting(2, PATIENCE_S)
    mine = part(5, 5, waiting=frozenset([(0, 5), (1, 5)]))
    before = part(4, held=False, answered=frozenset([(0, 5)]))
    assert meeting.look([mine, before], 0.0) == {}
    assert meeting.look([mine, replace(before, answered=mine.pushes)], 0.1) == {0: 3.0}


def test_who_was_not_there_when_a_server_was_asked_last_may_have_come_since() -> None:
    meeting = Meeting(2, PATIENCE_S)
    empty = part(held=False, present=frozenset())
    assert meeting.look([part(1, 1), empty], 5.0, [4.9, 4.8]) == {}
    assert meeting.look([part(1, 1), empty], 5.2, [4.9, 5.1]) == {0: 3.0}


def test_one_that_was_started_anew_is_waited_for_a_moment() -> None:
    meeting = Meeting(2, PATIENCE_S)
    assert len(meeting.look([part(5, 5), part(5, 5)], 0.0)) == 2
    anew = part(held=False, epoch=1)
    assert meeting.look([part(6, 6), None], 1.0) == {}
    assert meeting.look([part(6, 6), anew], 1.1) == {}
    assert meeting.look([part(6, 6), anew], 1.1 + STARTED_ANEW_S) == {0: 3.0}
    assert meeting.look([part(7, 7), anew], 9.0) == {}
    assert meeting.look([part(7, 7), anew], 9.1 + STARTED_ANEW_S) == {}, "it is new no more"


def test_a_tensor_that_is_cut_has_one_norm() -> None:
    assert joined_norm([{0: 3.0, 1: 12.0}, {0: 4.0}]) == 13.0
    assert joined_norm([{}, {}]) == 0.0


def clipping_rig(folder: Path, num_workers: int, transport: str = "inproc") -> Rig:
    clip = ClipNorm(1.0, [3, 1])
    return Rig(folder, "sync", num_workers, sizes=(3, 1), transport=transport, joint_clip=clip)


def round_of(made: Rig, wait_s: float = 20.0) -> RoundPart:
    return RoundPart.read(*made.server.answer_call(AskRound(wait_s)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_round_goes_in_when_its_norm_is_told(tmp_path: Path, transport: str) -> None:
    made = clipping_rig(tmp_path, 2, transport)
    try:
        hands = made.join_all(2)
        for step in (1, 2):
            for hand in hands:
                hand.push(torch.tensor([1.0, 2.0, 2.0, 4.0]))
            wait_until(lambda: round_of(made).held, "the round is closed")
            found = round_of(made)
            assert (found.number, found.norms) == (step, {0: 3.0, 1: 4.0})
            assert found.pushes == {(0, step), (1, step)} and not hands[0].has_reply()
            made.server.answer_call(EndRound(step - 1, 7.0))  # of another round: nothing happens
            made.server.answer_call(EndRound(step, 10.0))
            assert [hand.reply().version for hand in hands] == [step, step]
            torch.testing.assert_close(
                made.shard.params, step * torch.tensor([-0.1, -0.2, -0.2, -0.4])
            )
    finally:
        made.close()
    assert [push["norm"] for push in made.pushes()] == [10.0] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_dies_in_a_round_that_is_closed_is_in_it(tmp_path: Path, transport: str) -> None:
    made = clipping_rig(tmp_path, 2, transport)
    try:
        stays, dies = made.join_all(2)
        stays.push(torch.tensor([0.0, 0.0, 3.0, 0.0]))
        dies.push(torch.tensor([0.0, 0.0, 1.0, 0.0]))
        wait_until(lambda: round_of(made).held, "the round is closed")
        dies.link.close()
        wait_until(lambda: round_of(made).present == {0}, "it has left")

        def come_again() -> None:
            assert made.join(1, incarnation=1).version == 1, "what the round made"

        def end() -> None:
            made.server.answer_call(EndRound(1, 2.0))

        in_threads(come_again, end)
        assert stays.reply().version == 1
        torch.testing.assert_close(made.shard.params, torch.tensor([0.0, 0.0, -1.0, 0.0]))
    finally:
        made.close()
    outcomes = {push["worker"]: (push["outcome"], push["norm"]) for push in made.pushes()}
    assert outcomes == {0: ("applied", 2.0), 1: ("applied", 2.0)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_comes_back_is_in_the_same_round_at_every_server(
    tmp_path: Path, transport: str
) -> None:
    """It died when its gradient was at the second server, and another one's on its way to the
    first."""
    with two_rigs(tmp_path, 3, transport=transport) as rigs:
        first, second = rigs
        hands = [made.join_all(3) for made in rigs]
        for hand in (hands[0][0], *hands[1]):
            hand.push(torch.tensor([0.0, 0.0, 3.0, 4.0]))
        wait_until(lambda: round_of(second).held, "the round is closed there")
        for of_server in hands:
            of_server[2].link.close()
        for made in rigs:
            wait_until(lambda made=made: round_of(made).present == {0, 1}, "it has left")
        hands[0][2] = first.join(2, incarnation=1)
        last = [list(push) for push in round_of(first, 0.0).pushes]
        hands[1][2] = second.join(2, incarnation=1, last_round=last)
        assert (hands[1][2].version, second.shard.version_begun) == (0, 0)
        assert hands[1][2].link.welcome.settled_sequence == 0, "what it pushed is not in"
        assert not round_of(second, 0.0).held
        assert round_of(second, 0.0).waiting == {(0, 1), (1, 1)}
        assert round_of(second, 0.0).answered == {(2, 0)}
        for hand in (hands[0][1], hands[0][2], hands[1][2]):
            hand.push(torch.tensor([0.0, 0.0, 3.0, 4.0]))
        told = meet(rigs)
        assert told[0] == told[1] > 0
        assert [hand.reply().version for of_server in hands for hand in of_server] == [1] * 6
    torch.testing.assert_close(first.shard.params, second.shard.params)
    outcomes = [(push["worker"], push["incarnation"], push["outcome"]) for push in second.pushes()]
    assert sorted(outcomes) == [
        (0, 0, "applied"),
        (1, 0, "applied"),
        (2, 0, "dropped"),
        (2, 1, "applied"),
    ]


def test_who_comes_back_after_a_round_at_the_first_server_waits_for_it_at_others(
    tmp_path: Path,
) -> None:
    with rig(tmp_path, "sync", 2, joint_clip=ClipNorm(math.inf, [4])) as made:
        stays, dies = made.join_all(2)
        stays.push(1.0)
        dies.push(1.0)
        wait_until(lambda: round_of(made).held, "the round is closed")
        dies.link.close()

        def come_again() -> None:
            assert made.join(1, incarnation=1, last_round=[[0, 1]]).version == 1

        in_threads(come_again, lambda: made.server.answer_call(EndRound(1, 2.0)) and None)
        assert stays.reply().version == 1


def test_a_server_that_was_started_anew_ends_a_round_that_is_over_elsewhere(
    tmp_path: Path,
) -> None:
    """Two of three pushed to its former self, and are answered everywhere else."""
    last = [[worker, 532] for worker in range(3)]
    with rig(tmp_path, "sync", 3, joint_clip=ClipNorm(math.inf, [4])) as made:
        early = made.join(2)
        early.sequence = 531
        early.push(1.0)
        wait_until(lambda: round_of(made, 0.0).waiting == {(2, 532)}, "it waits")
        late: list[Hand] = []

        def come(worker: int) -> None:
            late.append(made.join(worker, last_round=last))

        def end() -> None:
            wait_until(lambda: round_of(made).held, "the round is closed without them")
            assert round_of(made).pushes == {(2, 532)}
            made.server.answer_call(EndRound(1, 2.0))

        in_threads(lambda: come(0), lambda: come(1), end)
        assert early.reply().version == 1 and [hand.version for hand in late] == [1, 1]
        for hand in late:
            hand.sequence = 532
        for hand in (*late, early):
            hand.push(1.0)
        wait_until(lambda: round_of(made).held, "all are in the next one")
        assert round_of(made).pushes == {(0, 533), (1, 533), (2, 533)}
        made.server.answer_call(EndRound(2, 2.0))
        assert [hand.reply().version for hand in (*late, early)] == [2, 2, 2]


def test_what_came_late_is_in_time_when_its_round_is_opened_again(tmp_path: Path) -> None:
    options = {"backup_workers": 1}
    clip = ClipNorm(math.inf, [4])
    with rig(tmp_path, "sync", 2, discipline_options=options, joint_clip=clip) as made:
        fast, slow = made.join_all(2)
        fast.push(1.0)
        wait_until(lambda: round_of(made).held, "the round is closed")
        slow.push(3.0)
        wait_until(lambda: bool(made.server.sessions.rounds.held.events), "it waits")
        made.join(2, last_round=[])
        wait_until(lambda: round_of(made).held, "the round is closed again")
        assert round_of(made).pushes == {(0, 1), (1, 1)}
        made.server.answer_call(EndRound(1, 9.0))  # of what was closed at first: nothing happens
        assert not fast.has_reply()
        made.server.answer_call(EndRound(2, 2.0))
        assert [hand.reply().version for hand in (fast, slow)] == [1, 1]


def test_a_hello_that_tells_of_no_round_is_none(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 1, joint_clip=ClipNorm(math.inf, [4])) as made:
        with pytest.raises(ConnectionClosedError, match="no hello"):
            made.join(0, last_round=[[0, "a"]])
        made.join(0, last_round=[[0, 1]])


def test_what_one_server_has_already_stands_for_its_round_there(tmp_path: Path) -> None:
    with two_rigs(tmp_path, 2, ledger_options={"in_step": True}) as rigs:
        hands = [made.join_all(2) for made in rigs]
        for hand in hands[0]:
            hand.push(1.0)
        wait_until(lambda: round_of(rigs[0]).held, "the round is closed")
        rigs[0].server.answer_call(EndRound(1, 2.0))
        assert [hand.reply().version for hand in hands[0]] == [1, 1]
        hands[0][1].link.close()  # its next connection is told less than it had
        wait_until(lambda: round_of(rigs[0]).present == {0}, "it has left")
        hands[0][1] = rigs[0].join(1)
        hands[0][0].push(1.0)
        hands[0][1].push(1.0)  # again
        hands[1][0].sequence = 1
        hands[1][0].push(1.0)
        hands[1][1].push(1.0)
        told = meet(rigs)
        assert told[0] == told[1]
        replies = [hand.reply() for of_server in hands for hand in of_server]
        assert [reply.status for reply in replies] == ["applied", "duplicate", "applied", "applied"]


@contextmanager
def two_rigs(folder: Path, num_workers: int, **options: Any) -> Iterator[list[Rig]]:
    folders = [folder / "first", folder / "second"]
    with ExitStack() as stack:
        rigs = []
        for each in folders:
            each.mkdir()
            clip = ClipNorm(math.inf, [4])
            made = rig(each, "sync", num_workers, joint_clip=clip, **options)
            rigs.append(stack.enter_context(made))
        yield rigs


def meet(rigs: Sequence[Rig]) -> dict[int, float]:
    """Have the servers told the norm of the round that all of them hold."""
    for made in rigs:
        wait_until(lambda made=made: round_of(made).held, "the round is closed")
    parts = [round_of(made) for made in rigs]
    told = Meeting(len(rigs), PATIENCE_S).look(parts, 0.0)
    for index, norm in told.items():
        rigs[index].server.answer_call(EndRound(parts[index].number, norm))
    return told


def test_what_comes_late_is_answered_with_what_the_round_made(tmp_path: Path) -> None:
    options = {"backup_workers": 1}
    clip = ClipNorm(math.inf, [4])
    with rig(tmp_path, "sync", 2, discipline_options=options, joint_clip=clip) as made:
        fast, slow = made.join_all(2)
        fast.push(1.0)
        wait_until(lambda: round_of(made).held, "the round is closed")
        slow.push(5.0)
        assert not slow.has_reply()
        made.server.answer_call(EndRound(1, 2.0))
        late = slow.reply()
        assert (late.status, late.version) == ("dropped", 1) and fast.reply().version == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_comes_late_of_a_worker_that_left_comes_to_nothing(
    tmp_path: Path, transport: str
) -> None:
    options = {"backup_workers": 1}
    clip = ClipNorm(math.inf, [4])
    with rig(
        tmp_path, "sync", 2, discipline_options=options, joint_clip=clip, transport=transport
    ) as made:
        fast, slow = made.join_all(2)
        fast.push(1.0)
        wait_until(lambda: round_of(made).held, "the round is closed")
        slow.push(5.0)
        held = made.server.sessions.rounds.held
        wait_until(lambda: len(held.events) == 1, "it waits")
        slow.link.close()
        wait_until(lambda: round_of(made).present == {0}, "it has left")
        made.server.answer_call(EndRound(1, 2.0))
        assert fast.reply().version == 1 and made.server.failure is None
        wait_until(lambda: len(made.pushes()) == 2, "both are written down")
    outcomes = [(push["worker"], push["outcome"]) for push in made.pushes()]
    assert sorted(outcomes) == [(0, "applied"), (1, "dropped")]


def test_what_comes_late_for_the_last_round_ends_its_worker_alone(tmp_path: Path) -> None:
    options = {"backup_workers": 1}
    clip = ClipNorm(math.inf, [4])
    with rig(
        tmp_path,
        "sync",
        2,
        discipline_options=options,
        ledger_options={"budget": 1},
        joint_clip=clip,
    ) as made:
        fast, slow = made.join_all(2)
        fast.push(1.0)
        wait_until(lambda: round_of(made).held, "the round is closed")
        slow.push(5.0)
        held = made.server.sessions.rounds.held
        wait_until(lambda: len(held.events) == 1, "it waits")
        made.server.answer_call(EndRound(1, 2.0))
        assert fast.reply().version == 1
        with pytest.raises(ConnectionClosedError, match="has all of its updates") as over:
            slow.reply()
        assert over.value.over


def test_who_waits_for_a_round_to_come_in_keeps_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path, "sync", 2, joint_clip=ClipNorm(math.inf, [4])) as made:
        stays, dies = made.join_all(2)
        stays.push(1.0)
        dies.push(1.0)
        wait_until(lambda: round_of(made).held, "the round is closed")
        dies.link.close()
        wait_until(lambda: round_of(made).present == {0}, "it has left")

        def come_again() -> None:
            assert made.join(1, incarnation=1).version == 1

        waits, wait_for_round = threading.Event(), made.server.sessions.rounds.wait

        def wait_as_ever(told: None) -> None:
            waits.set()
            wait_for_round(told)

        monkeypatch.setattr(made.server.sessions.rounds, "wait", wait_as_ever)

        def ask_and_end() -> None:
            assert waits.wait(TIMEOUT_S)
            assert made.snapshot().version == 0, "answered all the same"
            made.server.answer_call(EndRound(1, 2.0))

        in_threads(come_again, ask_and_end)
        assert stays.reply().version == 1


class Nowhere(InprocNetwork):
    """Whoever calls a server is told `answer`, or waits until `over`."""

    def __init__(self, answer: Exception | None = None) -> None:
        super().__init__([])
        self.over = threading.Event()
        self.asked = threading.Event()
        self._answer = answer

    def connect_for_calls(self, *_: Any) -> InprocCallEnd:
        self.asked.set()
        if self._answer is not None:
            raise self._answer
        assert self.over.wait(TIMEOUT_S)
        raise ConnectionClosedError("it is over")


def make_norms(network: Nowhere) -> Norms:
    log = logging.Logger("test")
    return Norms(toy_job(servers=2, clip_norm=1.0), network, log=log, clock=time.monotonic)


def test_a_server_that_does_not_answer_keeps_nobody_from_leaving() -> None:
    network = Nowhere()
    norms = make_norms(network)
    norms.start()
    try:
        assert network.asked.wait(TIMEOUT_S)
        began_s = time.monotonic()
        norms.close()
        assert time.monotonic() - began_s < LEAVE_S + 1
    finally:
        network.over.set()


def test_what_norms_fail_with_is_told() -> None:
    norms = make_norms(Nowhere(ValueError("no such thing")))
    norms.check()
    norms.start()
    norms.close()
    with pytest.raises(ValueError, match="no such thing"):
        norms.check()


def test_a_server_that_stops_lets_a_round_go(tmp_path: Path) -> None:
    made = clipping_rig(tmp_path, 2)
    hands = made.join_all(2)
    for hand in hands:
        hand.push(1.0)
    wait_until(lambda: round_of(made).held, "the round is closed")
    hands[1].link.close()
    wait_until(lambda: round_of(made).present == {0}, "it has left")
    made.close()
    assert {push["outcome"] for push in made.pushes()} == {"dropped"}
    assert made.shard.version == 0
