"""The accounts: every push that a worker made is accounted for once, whatever died in between."""

import random

import pytest

from offbeat.accounts import (
    APPLIED,
    DROPPED,
    LOST,
    REJECTED,
    Account,
    AccountBook,
    accounts_from,
    accounts_to_json,
    joined,
    moved,
)


def push(book: AccountBook, sequence: int, outcome: str = APPLIED, incarnation: int = 0) -> bool:
    if not book.claim(0, incarnation, sequence):
        return False
    book.settle(0, incarnation, sequence, outcome)
    return True


def test_each_push_can_be_claimed_once() -> None:
    book = AccountBook()
    assert book.claim(worker=0, incarnation=0, sequence=1)
    assert not book.claim(0, 0, 1)
    assert book.claim(1, 0, 1), "another worker's"
    assert book.claim(0, 0, 2)
    assert not book.claim(0, 0, 1), "an old one, sent again"
    assert book.claim(0, 1, 1), "a new process may push what its predecessor did not bring in"
    assert not book.claim(0, 0, 3), "the former process is over"


def test_what_is_settled_is_claimed_by_no_other_process_either() -> None:
    book = AccountBook()
    assert push(book, 1)
    assert not push(book, 1, incarnation=1)
    assert push(book, 2, incarnation=1)
    assert book.accounts[0] == Account(1, 2, applied=2)


def test_a_push_that_was_under_way_when_its_worker_left_may_come_again() -> None:
    book = AccountBook()
    assert push(book, 1)
    assert book.claim(0, 0, 2)
    assert book.admit(0) == 1, "where its successor goes on"
    assert push(book, 2, incarnation=1)
    assert book.accounts[0] == Account(1, 2, applied=2)


def test_outcomes_are_counted() -> None:
    book = AccountBook()
    for sequence, outcome in enumerate([APPLIED, DROPPED, REJECTED, APPLIED], start=1):
        push(book, sequence, outcome)
    account = book.accounts[0]
    assert account.counts == {APPLIED: 2, DROPPED: 1, REJECTED: 1, LOST: 0}
    assert account.gradients == account.sequence == 4


def test_what_a_server_does_not_know_of_after_it_was_loaded_is_lost() -> None:
    before = AccountBook()
    for sequence in range(1, 4):
        push(before, sequence)
    kept = accounts_from(accounts_to_json(before.accounts))
    for sequence in range(4, 9):
        push(before, sequence)
    after = AccountBook()
    after.load(kept)
    assert after.admit(0) == 3
    push(after, 9)
    assert after.accounts[0] == Account(0, 9, applied=4, lost=5)
    assert kept[0].applied == 3, "what was loaded from is not changed"


def test_a_worker_that_is_through_says_how_much_there_should_be() -> None:
    book = AccountBook()
    book.load({0: Account(0, 3, applied=3)})
    book.finish(0, 0, 8)
    assert book.accounts[0] == Account(0, 8, applied=3, lost=5)
    book.finish(0, 0, 8)
    assert book.accounts[0].lost == 5, "saying it again changes nothing"
    book.finish(1, 0, 2)
    assert book.accounts[1] == Account(0, 2, lost=2), "one that it never heard of"


def test_a_process_that_skips_a_push_to_a_server_that_lives_was_late() -> None:
    book = AccountBook()
    push(book, 1)
    push(book, 3)
    assert book.accounts[0] == Account(0, 3, applied=2, dropped=1)
    push(book, 5, incarnation=1)
    assert book.accounts[0] == Account(1, 5, applied=3, dropped=1, lost=1), (
        "its successor goes on after what other shards have"
    )


def test_who_comes_again_to_a_server_that_lives_was_late_with_one_push() -> None:
    """Its first one, which no account has."""
    book = AccountBook()
    for _ in range(2):
        assert book.admit(0, 0) == 0
    push(book, 2)
    assert book.accounts[0] == Account(0, 2, applied=1, dropped=1)
    other = AccountBook()
    for _ in range(2):
        other.admit(0, 3)
    push(other, 5, incarnation=3)
    assert other.accounts[0] == Account(3, 5, applied=1, dropped=1, lost=3), (
        "what its former life pushed to other shards is lost here"
    )
    other.admit(0, 4)
    push(other, 7, incarnation=4)
    assert other.accounts[0].lost == 4, "another process is not the same one come again"


def test_accounts_move_along_when_the_work_is_cut_anew() -> None:
    accounts = {0: Account(0, 30, applied=29, lost=1), 1: Account(1, 20, applied=20)}
    other = moved(accounts, {0: (2, 12, 30), 2: (2, 12, 0)})
    assert other[0] == Account(2, 12, applied=29, lost=1, batches=30), "what was done stays done"
    assert other[1] == accounts[1] and other[2] == Account(2, 12)
    assert accounts[0].sequence == 30


def test_of_several_shards_the_one_that_heard_of_a_worker_last_counts() -> None:
    old, new = Account(0, 9, applied=9), Account(1, 7, applied=6, lost=1)
    assert joined([{0: old}, {0: new, 1: old}]) == {0: new, 1: old}


def test_what_is_pending_is_in_no_account_and_its_worker_goes_on_after_it() -> None:
    book = AccountBook()
    push(book, 1)
    for sequence in (2, 3):
        assert book.claim(0, 0, sequence)
        book.defer(0, 0, sequence, batches=10 * sequence)
    assert book.copy() == {0: Account(0, 1, applied=1)}
    assert book.admit(0) == 3 and book.batches(0) == 30
    assert not book.claim(0, 1, 2) and not book.claim(0, 1, 3), "they will be in"
    book.finish(0, 1, 4)
    assert book.copy() == {0: Account(0, 1, applied=1)}, "the fourth is not said to be lost yet"
    book.settle(0, 0, 2, APPLIED)
    assert book.copy() == {0: Account(0, 2, applied=2)}
    book.settle(0, 0, 3, DROPPED)
    assert book.copy() == {0: Account(0, 4, applied=2, dropped=1, lost=1)}


def test_a_checkpoint_counts_as_lost_what_whoever_goes_on_would_pass_over() -> None:
    book = AccountBook()
    assert book.claim(0, 0, 1)
    book.defer(0, 0, 1)
    push(book, 2)
    kept = book.copy()
    assert kept == {0: Account(0, 2, applied=1, lost=1)}
    book.settle(0, 0, 1, APPLIED)
    assert book.copy() == {0: Account(0, 2, applied=2)}
    after = AccountBook()
    after.load(kept)
    assert after.admit(0) == 2


@pytest.mark.parametrize("seed", range(100))
def test_the_accounts_add_up_whatever_waits(seed: int) -> None:
    """Pushes of a worker that are answered and settled later, in their order or not."""
    draw = random.Random(seed)
    in_order = seed % 2 == 0
    book, inside, waiting = AccountBook(), set[int](), list[int]()
    checkpoint: tuple[dict[str, list[int]], set[int]] = ({}, set())
    incarnation, sequence, steps = 0, 0, 200
    of = dict[int, int]()
    kinds = ["push", "settle", "checkpoint", "server dies", "worker dies"]
    while sequence < steps or waiting:
        (kind,) = draw.choices(kinds, [50, 12, 5, 2, 2])
        if kind == "push" and sequence < steps:
            sequence += 1
            assert book.claim(0, incarnation, sequence)
            book.defer(0, incarnation, sequence)
            waiting.append(sequence)
            of[sequence] = incarnation
            if sequence == steps:
                book.finish(0, incarnation, steps)
        elif kind == "settle":
            many = waiting[: draw.randint(0, 6)] if in_order else draw.sample(waiting, len(waiting))
            for each in many:
                waiting.remove(each)
                (outcome,) = draw.choices([APPLIED, DROPPED], [8, 1])
                book.settle(0, of[each], each, outcome)
                assert each not in inside
                inside |= {each} if outcome == APPLIED else set()
        elif kind == "checkpoint":
            copy = book.copy()
            checkpoint = (accounts_to_json(copy), set(inside))
            for account in copy.values():
                assert account.gradients == account.sequence
                assert account.applied == len(inside)
                assert in_order or max(inside, default=0) <= account.sequence
        elif kind == "server dies":
            book = AccountBook()
            book.load(accounts_from(checkpoint[0]))
            inside, waiting = set(checkpoint[1]), []
            settled = book.admit(0)
            if sequence == steps:  # who is through does again what is missing
                sequence = settled
        elif kind == "worker dies" and sequence < steps:
            incarnation, sequence = incarnation + 1, book.admit(0)
            assert sequence >= max(waiting, default=0), "what waits is not done again"
    account = book.copy()[0]
    assert account.gradients == account.sequence == steps, f"seed {seed}"
    assert account.applied == len(inside), f"seed {seed}"


@pytest.mark.parametrize("seed", range(50))
def test_the_accounts_add_up_whatever_dies(seed: int) -> None:
    """A worker and a server at random: deaths, checkpoints, pushes that come twice. A set of what
    is in, beside the book, tells whether anything was applied twice and what is missing."""
    draw = random.Random(seed)
    book, inside = AccountBook(), set[int]()
    checkpoint: tuple[dict[str, list[int]], set[int]] = ({}, set())
    incarnation, sequence, steps = 0, 0, 200
    kinds = ["push", "half a push", "repeat", "checkpoint", "server dies", "worker dies"]
    while sequence < steps:
        (kind,) = draw.choices(kinds, [80, 4, 5, 5, 3, 3])
        if kind == "push":
            sequence += 1
            (outcome,) = draw.choices([APPLIED, DROPPED, REJECTED], [8, 1, 1])
            assert book.claim(0, incarnation, sequence)
            book.settle(0, incarnation, sequence, outcome)
            if outcome == APPLIED:
                assert sequence not in inside
                inside.add(sequence)
        elif kind == "repeat" and 0 in book.accounts:
            again = draw.randint(1, book.accounts[0].sequence)
            assert not book.claim(0, incarnation, again)
        elif kind == "checkpoint":
            checkpoint = (accounts_to_json(book.accounts), set(inside))
        elif kind == "server dies":
            book = AccountBook()
            book.load(accounts_from(checkpoint[0]))
            inside = set(checkpoint[1])
            book.admit(0)
        elif kind in ("half a push", "worker dies"):
            if kind == "half a push":
                assert book.claim(0, incarnation, sequence + 1)
            incarnation, sequence = incarnation + 1, book.admit(0)
    book.finish(0, incarnation, steps)
    account = book.accounts[0]
    assert account.gradients == steps, f"seed {seed}"
    assert account.applied == len(inside), f"seed {seed}"
