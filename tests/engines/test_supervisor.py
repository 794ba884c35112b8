"""The supervisor: who is started again, who is given up, and how a run is stopped; no process is
needed to find out."""

import pytest

from offbeat.engines.supervisor import (
    KILL_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Blame,
    GiveUp,
    Leave,
    Member,
    StartAgain,
    Supervisor,
)

ROLES = [("ps", 0), ("ps", 1), ("master", 0), ("worker", 1), ("evaluator", 0)]


def a_run(*, max_restarts: int = 2, started: bool = True) -> tuple[Supervisor, dict[str, Member]]:
    members = [Member(role, index, generation=5) for role, index in ROLES]
    supervisor = Supervisor(members, max_restarts=max_restarts, silence_s=30.0)
    if started:
        for member in members:
            supervisor.started(member, 0.0)
    return supervisor, {member.name: member for member in members}


def names(members: list[Member]) -> list[str]:
    return [member.name for member in members]


def test_the_evaluator_is_started_when_there_is_something_to_score() -> None:
    supervisor, by_name = a_run(started=False)
    for member in supervisor.due(has_begun=False):
        supervisor.started(member, 0.0)
    assert names(supervisor.present()) == ["ps-0", "ps-1", "master", "worker-1"]
    assert supervisor.due(has_begun=False) == []
    assert supervisor.due(has_begun=True) == [by_name["evaluator"]]
    supervisor.stop(1.0, has_begun=True)
    assert supervisor.due(has_begun=True) == [], "nobody would wait for its score"


@pytest.mark.parametrize("name", ["ps-1", "master", "worker-1", "evaluator"])
def test_who_dies_is_started_again_as_somebody_new_until_it_is_enough(name: str) -> None:
    supervisor, by_name = a_run(max_restarts=2)
    member = by_name[name]
    for number in (1, 2):
        assert supervisor.ended(member, "was killed by SIGKILL") == StartAgain(
            "was killed by SIGKILL"
        )
        assert (member.num_restarts, member.generation) == (number, 5 + number)
        assert not member.is_there
        supervisor.started(member, 1.0)
    assert supervisor.ended(member, "ended with 3") == GiveUp("ended with 3")
    assert member.is_needed == (name != "evaluator")
    others = [m for m in supervisor.members if m is not member]
    assert {m.generation for m in others} == {5} and {m.num_restarts for m in others} == {0}


def test_those_who_cannot_go_on_alone_fall_together() -> None:
    supervisor, by_name = a_run(max_restarts=1)
    master, worker = by_name["master"], by_name["worker-1"]
    master.falls_with_others = worker.falls_with_others = True
    decision = supervisor.ended(worker, "was killed by SIGKILL")
    assert decision == StartAgain("was killed by SIGKILL", (master,))
    for member in (master, worker):
        assert (member.num_restarts, member.generation, member.is_there) == (1, 6, False)
        supervisor.started(member, 1.0)
    assert {by_name[name].generation for name in ("ps-0", "ps-1", "evaluator")} == {5}
    assert supervisor.ended(by_name["ps-0"], "ended with 3") == StartAgain("ended with 3")
    assert supervisor.ended(master, "ended with 3") == GiveUp("ended with 3"), "whoever it was"
    assert worker.generation == 6


def test_who_leaves_in_order_or_when_all_is_over_has_no_successor() -> None:
    supervisor, by_name = a_run()
    assert supervisor.ended(by_name["worker-1"], None) == Leave()
    assert supervisor.ended(by_name["ps-0"], "ended with 1", is_over=True) == Leave()
    again = supervisor.ended(by_name["evaluator"], "was killed by SIGKILL", is_over=True)
    assert again == StartAgain("was killed by SIGKILL"), "it has the last checkpoint to score"
    assert supervisor.ended(by_name["evaluator"], None, is_over=True) == Leave()
    supervisor.stop(1.0, has_begun=True)
    assert supervisor.ended(by_name["ps-1"], "ended with 1") == Leave()


def test_who_says_what_went_wrong_is_not_started_again() -> None:
    supervisor, by_name = a_run()
    assert supervisor.ended(by_name["worker-1"], "ended with 1", has_failed=True) == Blame()
    supervisor.stop(1.0, has_begun=True)
    assert supervisor.ended(by_name["ps-0"], "ended with 1", has_failed=True) == Leave()
    assert supervisor.ended(by_name["master"], "ended with 1", has_failed=True) == Blame()


def test_who_says_nothing_for_too_long_is_named_once_and_replaced() -> None:
    supervisor, by_name = a_run()
    for name in ("ps-0", "ps-1", "master", "evaluator"):
        supervisor.heard(by_name[name], 25.0)
    assert supervisor.silent(30.0) == []
    assert supervisor.silent(30.1) == [by_name["worker-1"]]
    assert supervisor.silent(40.0) == []
    decision = supervisor.ended(by_name["worker-1"], "was killed by SIGKILL")
    assert decision == StartAgain("was silent for 30 s")
    supervisor.started(by_name["worker-1"], 41.0)
    assert not by_name["worker-1"].is_silent
    assert supervisor.silent(50.0) == []


def test_a_run_is_stopped_by_its_master_and_what_stays_is_killed() -> None:
    supervisor, by_name = a_run()
    ending = supervisor.stop(10.0, has_begun=True)
    assert (names(list(ending.told)), list(ending.killed)) == (["master"], [])
    again = supervisor.stop(11.0, has_begun=True)
    assert not again.told and not again.killed
    assert supervisor.overdue(10.0 + STOP_TIMEOUT_S) == []
    supervisor.ended(by_name["ps-0"], None)
    late_s = 10.1 + STOP_TIMEOUT_S
    assert names(supervisor.overdue(late_s)) == ["ps-1", "master", "worker-1", "evaluator"]
    assert supervisor.overdue(late_s + KILL_TIMEOUT_S) == [], "they get time to be gone"
    assert supervisor.overdue(late_s + KILL_TIMEOUT_S + 0.1) != []


def test_without_a_master_all_are_told_and_without_a_step_all_are_killed() -> None:
    supervisor, by_name = a_run()
    supervisor.ended(by_name["master"], None)
    told = supervisor.stop(0.0, has_begun=True).told
    assert names(list(told)) == ["ps-0", "ps-1", "worker-1", "evaluator"]
    supervisor, _ = a_run()
    ending = supervisor.stop(0.0, has_begun=False)
    assert not ending.told and len(ending.killed) == len(ROLES)


@pytest.mark.parametrize(
    ("role", "ranks", "who"),
    [
        ("ps", (), "server 1"),
        ("worker", (1,), "worker 1"),
        ("worker", (1, 3), "the process of worker 1 and worker 3"),
        ("master", (0, 2, 4), "the process of the master, worker 2 and worker 4"),
    ],
)
def test_a_member_is_called_by_all_that_are_in_its_process(
    role: str, ranks: tuple[int, ...], who: str
) -> None:
    assert Member(role, 0 if role == "master" else 1, ranks=ranks).who == who


@pytest.mark.parametrize(("is_over", "left"), [(True, 3), (False, 4)])
def test_when_the_master_has_left_the_evaluator_alone_may_stay(is_over: bool, left: int) -> None:
    supervisor, by_name = a_run()
    supervisor.ended(by_name["master"], None, is_over=is_over)
    assert len(supervisor.left_behind(is_over=is_over)) == left
