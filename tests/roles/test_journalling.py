"""Servers that promise: what they have answered is on the disk, and is had again, to the bit.

The oracle, where there is one: gradients are powers of two, so that the parameters tell which ones
are in.
"""

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import FailingDisk, Forgetful, SlowDisk, taking_a_picture
from helpers import cross_entropy, toy_recipe
from rig import TRANSPORTS, Hand, Rig, in_threads, rig, wait_until

import offbeat
from offbeat import AdamW, Recipe, cosine, plateau
from offbeat.errors import ConnectionClosedError, JournalError
from offbeat.roles import master
from offbeat.roles.journalling import gradient_from, payload_of
from offbeat.rules import Dana, DelayCompensated, Gradient, Sum
from offbeat.run import journal as journal_module
from offbeat.run.events import read_events
from offbeat.run.journal import Disk, Journal
from offbeat.run.segments import GRADIENT, Entry, Head, list_segments
from offbeat.shard import ShardState

MARK = bytes(32)
DISCIPLINES: dict[str, dict[str, Any]] = {
    "apply-reply": {},
    "reply-apply": {},
    "sync": {},
    "bounded": {"staleness": 2},
    "ringmaster": {"max_delay": 2},
    "rennala": {"collect": 3},
    "buffer": {"buffer_size": 3},
}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def promising(
    folder: Path,
    discipline: str = "apply-reply",
    num_workers: int = 1,
    *,
    life: int = 0,
    disk: Disk | None = None,
    founded: bool = True,
    patience_s: float = 60.0,
    lines: Lines | None = None,
    **options: Any,
) -> Iterator[Rig]:
    """A server with a journal in `folder`/journal."""
    home = folder / f"life-{life}"
    home.mkdir(parents=True)

    log = logging.Logger("journal")
    log.addHandler(lines or logging.NullHandler())

    def make_journal(told: Any, failed: Any) -> Journal:
        more: dict[str, Any] = {"log": log, "disk": disk, "patience_s": patience_s}
        return Journal(folder / "journal", MARK, epoch=life, told=told, failed=failed, **more)

    given = {"discipline_options": DISCIPLINES[discipline], **options}
    told = {"make_journal": make_journal, **given.pop("server_options", {})}
    ledger = {"promises": True, "epoch": life, **given.pop("ledger_options", {})}
    with rig(
        home, discipline, num_workers, server_options=told, ledger_options=ledger, **given
    ) as r:
        if founded:
            cover(r)
        yield r


def cover(r: Rig, entry: int = 0) -> None:
    r.server.answer({"ask": "cover", "entry": entry}, {})


def crash(folder: Path, to: Path) -> Path:
    """What of a server in `folder` is left when the machine goes down now."""
    shutil.copytree(folder / "journal", to / "journal")
    return to


def powers(hand: Hand, *exponents: int) -> None:
    for exponent in exponents:
        hand.exchange(2.0**exponent)


def inside(r: Rig) -> int:
    (found,) = set(r.shard.params.tolist())
    return -int(found)


# -- when a reply leaves ---------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("discipline", ["apply-reply", "reply-apply", "buffer"])
def test_nobody_is_answered_before_the_disk_has_it(
    tmp_path: Path, transport: str, discipline: str
) -> None:
    disk = SlowDisk()
    with promising(tmp_path, discipline, disk=disk, transport=transport) as r:
        hand = r.join(0)
        powers(hand, 0)
        disk.goes_on.clear()
        hand.push(2.0)
        wait_until(lambda: r.has_come(hand), "it is there")
        assert not hand.has_reply()
        disk.goes_on.set()
        assert hand.reply().sequence == 2


def test_a_round_is_answered_together_when_the_disk_has_it(tmp_path: Path) -> None:
    disk = SlowDisk()
    with promising(tmp_path, "sync", 3, disk=disk, rule=Sum()) as r:
        hands = r.join_all(3)
        disk.goes_on.clear()
        for hand in hands:
            hand.push(2.0**hand.worker)
        wait_until(lambda: r.shard.version == 1, "the round is in")
        assert not any(hand.has_reply(0.02) for hand in hands)
        disk.goes_on.set()
        assert [hand.reply().version for hand in hands] == [1, 1, 1]
        assert [hand.params[0].item() for hand in hands] == [-7.0] * 3
        assert disk.num_synced <= 4, "one sync is for all that wait"


def test_nobody_is_answered_before_there_is_a_checkpoint_to_rest_on(tmp_path: Path) -> None:
    with promising(tmp_path, founded=False) as r:
        hand = r.join(0)
        hand.push(1.0)
        wait_until(lambda: inside(r) == 1, "it is in")
        assert not hand.has_reply()
        cover(r)
        assert hand.reply().version == 1


def test_a_worker_that_comes_is_shown_what_the_disk_has(tmp_path: Path) -> None:
    disk = SlowDisk()
    with promising(tmp_path, "apply-reply", 2, disk=disk, transport="unix") as r:
        first = r.join(0)
        disk.goes_on.clear()
        first.push(1.0)
        wait_until(lambda: inside(r) == 1, "it is in")
        came: list[Hand] = []

        def come() -> None:
            came.append(r.join(1))

        def look() -> None:
            wait_until(lambda: 1 in r.server.ledger.members, "it is taken in")
            assert not came, "what it would be shown may be gone tomorrow"
            disk.goes_on.set()

        in_threads(come, look)
        assert came[0].link.welcome.version == 1


def test_a_worker_that_goes_while_it_waits_is_no_harm(tmp_path: Path) -> None:
    disk = SlowDisk()
    with promising(tmp_path, "apply-reply", 2, disk=disk, transport="unix") as r:
        first, second = r.join_all(2)
        disk.goes_on.clear()
        first.push(1.0)
        wait_until(lambda: inside(r) == 1, "it is in")
        first.link.close()
        wait_until(lambda: 0 not in r.server.ledger.members, "it has left")
        disk.goes_on.set()
        assert second.exchange(2.0).version == 2
        again = r.join(0, incarnation=1)
        assert again.link.welcome.settled_sequence == 1


def test_a_push_that_comes_twice_waits_as_the_first_one(tmp_path: Path) -> None:
    disk = SlowDisk()
    with promising(tmp_path, disk=disk, transport="unix") as r:
        hand = r.join(0)
        disk.goes_on.clear()
        hand.push(1.0)
        wait_until(lambda: inside(r) == 1, "it is in")
        hand.link.close()
        wait_until(lambda: not r.server.ledger.members, "it has left")
        disk.goes_on.set()
        again = r.join(0)
        assert again.exchange(1.0).status == "duplicate" and inside(r) == 1


# -- after a crash ---------------------------------------------------------------------------------


def same(a: ShardState, b: ShardState) -> bool:
    keys = a.tensors.keys() == b.tensors.keys()
    return keys and all(torch.equal(a.tensors[key], b.tensors[key]) for key in a.tensors)


SHARDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "adamw, a schedule and an average": lambda: {
        "optimizer": AdamW(lr=0.1, weight_decay=0.1),
        "schedule": cosine(warmup=3),
        "total_updates": 40,
        "ema_decay": 0.9,
    },
    "dc-asgd": lambda: {"rule": DelayCompensated(strength=1.0)},
    "dana": lambda: {"rule": Dana()},
}


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_what_was_answered_is_had_again_to_the_bit(
    tmp_path: Path, discipline: str, kind: str
) -> None:
    """With a checkpoint in between, and what the disk has when the machine goes down."""
    draw = torch.Generator().manual_seed(3)
    options: dict[str, Any] = {"sizes": (3, 5)}

    def exchange(hands: list[Hand]) -> None:
        for hand in hands:
            mask = [True, False] if torch.rand((), generator=draw) < 0.2 else None
            bad = torch.rand((), generator=draw) < 0.1
            value = torch.randn(8, generator=draw) if not bad else torch.tensor(float("nan"))
            hand.push(value, mask=mask)
        for hand in hands:
            hand.reply()

    with promising(tmp_path, discipline, 3, disk=Forgetful(), **options, **SHARDS[kind]()) as r:
        hands = r.join_all(3)
        for _ in range(4):
            exchange(hands)
        state = r.snapshot()
        assert state.entry > 0
        cover(r, 0)
        for _ in range(5):
            exchange(hands)
        left = crash(tmp_path, tmp_path / "left")
        shown, accounts = r.server.sessions.show(), r.server.ledger.copy_accounts()
        pending = len(r.server.ledger.pending)
    with promising(left, discipline, 3, life=1, state=state, **options, **SHARDS[kind]()) as r:
        again = r.server.sessions.show()
        assert again.version == shown.version + bool(pending)
        if not pending:
            assert same(again, shown)
            assert again.accounts == accounts
        settled = [r.join(worker).link.welcome.settled_sequence for worker in range(3)]
        assert settled == [9, 9, 9], "everybody goes on where it was"


def test_what_is_pending_when_a_checkpoint_is_made_goes_in_later(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rule": Sum(), "discipline_options": {"buffer_size": 4}}
    with promising(tmp_path, "buffer", 2, **options) as r:
        first, second = r.join_all(2)
        powers(first, 0, 1)
        state = r.snapshot()
        cover(r, state.entry)
        powers(second, 2)
        assert inside(r) == 0
        early = crash(tmp_path, tmp_path / "early")
        powers(second, 3, 4)
        assert inside(r) == 15
        late = crash(tmp_path, tmp_path / "late")
    with promising(early, "buffer", 2, life=1, state=state, **options) as r:
        assert inside(r) == 7, "as when nobody is left"
        assert r.join(1).link.welcome.settled_sequence == 1
    with promising(late, "buffer", 2, life=1, state=state, **options) as r:
        assert inside(r) == 31 and r.shard.version == 2
        assert sum(a.applied for a in r.server.ledger.accounts.values()) == 5


def test_a_round_that_is_open_when_a_checkpoint_is_made_is_whole_later(tmp_path: Path) -> None:
    with promising(tmp_path, "sync", 3, rule=Sum()) as r:
        first, second, third = r.join_all(3)
        first.push(1.0)
        third.push(64.0)
        wait_until(lambda: r.has_come(first) and r.has_come(third), "they are there")
        third.link.close()
        wait_until(lambda: 2 not in r.server.ledger.members, "it has left")
        state = r.snapshot()
        cover(r, state.entry)
        second.push(2.0)
        assert [first.reply().version, second.reply().version] == [1, 1]
        between = crash(tmp_path, tmp_path / "between")
        cover(r, (later := r.snapshot()).entry)
        assert not list_segments(tmp_path / "journal"), "nobody waits for who has left"
        first.push(4.0)
        second.push(8.0)
        first.reply(), second.reply()
        left = crash(tmp_path, tmp_path / "left")
    with promising(between, "sync", 3, life=1, state=state, rule=Sum()) as r:
        assert inside(r) == 3, "what came before the snapshot is in the round"
    with promising(left, "sync", 3, life=1, state=later, rule=Sum()) as r:
        assert inside(r) == 15


def test_what_came_when_all_updates_were_made_is_dropped_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ledger_options": {"budget": 1}, "rule": Sum()}
    with promising(tmp_path, "sync", 2, **options) as r:
        first, second = r.join_all(2)
        first.push(1.0), second.push(2.0)
        first.reply(), second.reply()
        accounts = r.server.ledger.copy_accounts()
        left = crash(tmp_path, tmp_path / "left")
    with promising(left, "sync", 2, life=1, **options) as r:
        assert inside(r) == 3 and r.server.ledger.copy_accounts() == accounts
    with promising(tmp_path / "other", "buffer", 2, **options) as r:
        first, second = r.join_all(2)
        powers(first, 0, 1)
        powers(second, 2)
        assert r.shard.version == 1
        left = crash(tmp_path / "other", tmp_path / "other-left")
    with promising(left, "buffer", 2, life=1, **options) as r:
        assert inside(r) == 7
        assert sum(a.gradients for a in r.server.ledger.accounts.values()) == 3


def test_a_life_that_dies_as_it_comes_back_leaves_enough_to_the_next(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rule": Sum()}
    folder = tmp_path
    for life in range(4):
        with promising(folder, "reply-apply", 1, life=life, disk=Forgetful(), **options) as r:
            assert inside(r) == 2 ** (2 * life) - 1
            hand = r.join(0, incarnation=life)
            hand.sequence = hand.link.welcome.settled_sequence
            powers(hand, 2 * life, 2 * life + 1)
            left = crash(folder, tmp_path / f"left-{life}")
        folder = left


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_without_its_fsync_the_promise_is_broken_and_the_oracle_sees_it(
    tmp_path: Path, discipline: str, syncs: bool
) -> None:
    with promising(tmp_path, discipline, disk=Forgetful(syncs=syncs), rule=Sum()) as r:
        hand = r.join(0)
        powers(hand, *range(7))
        left = crash(tmp_path, tmp_path / "left")
    with promising(left, discipline, life=1, rule=Sum()) as r:
        assert (inside(r) == 127) is syncs


def test_what_was_not_answered_is_pushed_again_and_in_once(tmp_path: Path) -> None:
    with promising(tmp_path, "sync", 2, rule=Sum()) as r:
        first, second = r.join_all(2)
        first.push(1.0)
        second.push(2.0)
        first.reply(), second.reply()
        first.push(4.0)
        wait_until(lambda: r.has_come(first), "it is there")
        wait_until(lambda: r.server.ledger.durable >= 4, "and on the disk")
        left = crash(tmp_path, tmp_path / "left")
    with promising(left, "sync", 2, life=1, rule=Sum()) as r:
        assert inside(r) == 3, "nobody was told of the other one"
        hands = [r.join(0), r.join(1)]
        for hand, value in zip(hands, (4.0, 8.0), strict=True):
            hand.sequence = hand.link.welcome.settled_sequence
            hand.push(value)
        assert [hand.reply().status for hand in hands] == ["applied", "applied"]
        again = crash(left, tmp_path / "again")
    with promising(again, "sync", 2, life=2, rule=Sum()) as r:
        assert inside(r) == 15
        assert all(a.applied == 2 and not a.lost for a in r.server.ledger.accounts.values())


def test_a_rate_that_was_told_late_to_fall_is_the_same_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": plateau(factor=0.5)}
    with promising(tmp_path, **options) as r:
        hand = r.join(0)
        powers(hand, 0, 0, 0)
        r.server.answer({"ask": "fall", "versions": [1]}, {})
        powers(hand, 0)
        shown = r.server.sessions.show()
        left = crash(tmp_path, tmp_path / "left")
    with promising(left, life=1, **options) as r:
        assert same(r.server.sessions.show(), shown)
        assert r.shard.falls == [1]


def test_events_tell_of_what_was_made_again(tmp_path: Path) -> None:
    with promising(tmp_path) as r:
        powers(r.join(0), 0, 1)
        left = crash(tmp_path, tmp_path / "left")
    with promising(left, life=1) as r:
        r.events.flush()
        again = [push for push in r.pushes() if push.get("again")]
    assert [(p["sequence"], p["version"], p["base_version"]) for p in again] == [
        (1, 1, 0),
        (2, 2, 1),
    ]


# -- what is kept of it ----------------------------------------------------------------------------


def test_what_a_checkpoint_covers_is_removed(tmp_path: Path) -> None:
    with promising(tmp_path) as r:
        hand = r.join(0)
        sizes = []
        for _ in range(4):
            powers(hand, 0, 0, 0)
            state = r.snapshot()
            cover(r, state.entry)
            sizes.append(len(list_segments(tmp_path / "journal")))
        assert sizes == [0, 0, 0, 0]
        powers(hand, 0)
        assert len(list_segments(tmp_path / "journal")) == 1


def test_what_is_missing_between_checkpoint_and_journal_is_told(tmp_path: Path) -> None:
    with promising(tmp_path) as r:
        hand = r.join(0)
        powers(hand, 0)
        cover(r, r.snapshot().entry)
        powers(hand, 1)
        left = crash(tmp_path, tmp_path / "left")
    with pytest.raises(JournalError, match="what is between them is lost"), promising(left, life=1):
        pytest.fail("it began")


# -- disks that fail -------------------------------------------------------------------------------


def test_a_disk_that_is_full_for_a_while_makes_everybody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FIRST_PAUSE_S", 0.001)
    disk, lines = FailingDisk(errno.ENOSPC), Lines()
    with promising(tmp_path, "sync", 2, disk=disk, lines=lines, rule=Sum()) as r:
        hands = r.join_all(2)
        disk.left["sync"] = 4
        for hand in hands:
            hand.push(2.0**hand.worker)
        assert [hand.reply().version for hand in hands] == [1, 1]
        left = crash(tmp_path, tmp_path / "left")
    told = [line for line in lines.lines if "No space left on device; every push waits" in line]
    assert len(told) == 4
    with promising(left, "sync", 2, life=1, rule=Sum()) as r:
        assert inside(r) == 3


def test_a_disk_that_stays_full_ends_the_server_and_nothing_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FIRST_PAUSE_S", 0.001)
    disk = FailingDisk(errno.ENOSPC)
    with promising(tmp_path, disk=disk, patience_s=0.05) as r:
        hand = r.join(0)
        powers(hand, 0)
        disk.left["write"] = 10**6
        hand.push(2.0)
        with pytest.raises(ConnectionClosedError, match="No space left on device"):
            hand.reply()
        assert r.server.over.wait(20) and isinstance(r.server.failure, JournalError)
        left = crash(tmp_path, tmp_path / "left")
    with promising(left, life=1) as r:
        assert inside(r) == 1


def test_a_damaged_journal_ends_the_server_with_the_files_name(tmp_path: Path) -> None:
    with promising(tmp_path) as r:
        powers(r.join(0), 0, 1)
        left = crash(tmp_path, tmp_path / "left")
    (segment,) = list_segments(left / "journal")
    raw = bytearray(segment.path.read_bytes())
    raw[len(raw) // 2] ^= 4
    segment.path.write_bytes(raw)
    with (
        pytest.raises(JournalError, match=f"{segment.path.name} is damaged at byte"),
        promising(left, life=1),
    ):
        pytest.fail("it began")


# -- payloads --------------------------------------------------------------------------------------


def test_all_that_a_gradient_has_comes_back() -> None:
    draw = torch.Generator().manual_seed(1)
    gradient = Gradient(
        torch.randn(7, generator=draw),
        [True, False, True],
        torch.randn(3, generator=draw),
        torch.tensor([5]),
        worker=4,
        base_version=9,
        base=torch.randn(7, generator=draw),
        rates=torch.randn(2, generator=draw, dtype=torch.float64),
        ids=[torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)],
    )
    raw = b"".join(payload_of(gradient))
    found = gradient_from(Entry(Head(GRADIENT, 0, worker=4, base_version=9), raw))
    for name in ("values", "floats", "ints", "base", "rates"):
        assert torch.equal(getattr(found, name), getattr(gradient, name)), name
        assert getattr(found, name).data_ptr() % 64 == 0, "as memory of torch's own lies"
    assert (found.mask, found.worker, found.base_version) == ([True, False, True], 4, 9)
    assert [ids.tolist() for ids in found.ids] == [[1, 2], []]
    bare = gradient_from(Entry(Head(GRADIENT, 0), b"".join(payload_of(Gradient(torch.ones(1))))))
    assert bare == Gradient(bare.values, ids=[]) and bare.values.tolist() == [1.0]


def test_a_slot_is_not_copied() -> None:
    values = torch.zeros(1000)
    payload = payload_of(Gradient(values))
    values.fill_(1)
    assert any(bytes(part) == values.numpy().tobytes() for part in payload)


def test_a_run_whose_journal_is_damaged_goes_on_if_one_says_so(
    run_dir: Path, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    loss = taking_a_picture(cross_entropy, run_dir, left)
    recipe = toy_recipe(loss=loss, epochs=5)
    given: dict[str, Any] = {"engine": "inproc", "threads": 1, "quiet": True, "servers": 2}
    given |= {"discipline": "sync", "checkpoint_every": 1000, "eval_every": 0}
    offbeat.train(recipe, run_dir=str(run_dir), ack="durable", **given)
    (segment,) = list_segments(left / "journal" / "ps-1")
    raw = bytearray(segment.path.read_bytes())
    raw[len(raw) // 2] ^= 1
    segment.path.write_bytes(raw)
    with pytest.raises(
        JournalError, match=f"{segment.path.name} is damaged.*--ack applied"
    ) as told:
        offbeat.resume(left, recipe=recipe)
    assert str(told.value).count("--resume") == 1
    result = offbeat.resume(left, recipe=recipe, ack="applied", servers=1)
    assert result.summary["status"] == "finished" and not (left / "journal").exists()
    loads = [e["version"] for e in read_events(left / "events") if e.get("phase") == "load"]
    assert max(loads) > 10, "what comes before the damage is in"


# -- a whole run -----------------------------------------------------------------------------------


def test_a_server_that_did_not_hear_of_the_first_checkpoint_is_told_again(
    run_dir: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all that it has answered would wait for ever."""
    cover, told = master.RemoteServer.cover, []

    def fails_at_first(server: master.RemoteServer, entry: int) -> None:
        told.append(entry)
        if len(told) <= 2:
            raise ConnectionClosedError("the connection broke")
        cover(server, entry)

    monkeypatch.setattr(master.RemoteServer, "cover", fails_at_first)
    given: dict[str, Any] = {"engine": "inproc", "threads": 1, "quiet": True, "epochs": 1}
    result = offbeat.train(recipe, run_dir=str(run_dir), ack="durable", **given)
    assert result.summary["status"] == "finished" and len(told) > 2
