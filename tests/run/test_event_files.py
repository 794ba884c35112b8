"""Files of events that are full are archived, and nobody who reads notices."""

import contextlib
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import toy_recipe

import offbeat
from offbeat.report.summary import summarise
from offbeat.run import event_files
from offbeat.run.archive import BLOCK, Archive, from_block, read_archive, to_block
from offbeat.run.event_files import EventFile, free_path
from offbeat.run.event_files import event_files as files_in
from offbeat.run.events import EventLog, Followed, read_events

FULL_BYTES = 20_000


@pytest.fixture(autouse=True)
def soon_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "FULL_BYTES", FULL_BYTES)
    monkeypatch.setattr(event_files, "LONG_BYTES", 1000)


def made_up(count: int, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Pushes as servers write them down, with a few that were dropped."""
    chance = random.Random(seed)
    for number in range(count):
        dropped = chance.random() < 0.1
        yield {
            "kind": "push",
            "worker": number % 3,
            "sequence": number // 3,
            "outcome": "dropped" if dropped else "applied",
            "version": None if dropped else number,
            "mixed": chance.random() < 0.01,
            "received_s": round(number * 0.01 + chance.random(), 6),
            "applied_s": None if dropped else round(number * 0.01, 6),
            "lr": 0.1 * math.cos(number),
            **({"norm": None, "shards": [1, {"a": -0.0}]} if chance.random() < 0.05 else {}),
        }


def line(event: Any) -> str:
    return json.dumps(event) + "\n"


def anything(chance: random.Random) -> Any:
    """A value that an event may have, or may not."""
    return chance.choice(
        (
            lambda: None,
            lambda: chance.random() < 0.5,
            lambda: chance.choice((0, 1, -7, 10**30, chance.getrandbits(40))),
            lambda: chance.choice((0.0, -0.0, 1e300, math.inf, math.nan, 0.1, 5e-324, 1.0)),
            lambda: chance.randrange(-(10**12), 10**12) / 1e6,
            lambda: chance.choice(("", "x", "\n\u00e9")),
            lambda: [None, {"a": -0.0}],
        )
    )()


def test_what_is_archived_comes_back_to_the_bit() -> None:
    """Columns of one kind and of all kinds, events of one shape and of several."""
    for seed in range(200):
        events = anything_like_events(random.Random(seed))
        block = json.loads(json.dumps(to_block(events)))
        assert list(map(repr, from_block(block))) == list(map(repr, events)), seed


def anything_like_events(chance: random.Random) -> list[dict[str, Any]]:
    makes = [anything] * chance.randrange(1, 4) + [
        lambda chance, only=kind: next(
            v for v in iter(lambda: anything(chance), object()) if type(v) is only
        )
        for kind in (int, float, str, bool)
    ]
    makes += [lambda chance: chance.choice((None, 0.000001)), lambda chance: -0.0]
    return [
        {str(i): make(chance) for i, make in enumerate(makes) if i or chance.random() < 0.9}
        for _ in range(chance.randrange(1, 40))
    ]


def test_a_push_takes_less_than_25_bytes() -> None:
    """Also with a rate that is another one every time."""
    chance = random.Random(0)
    archive, count = Archive(), 5 * BLOCK
    for number in range(count):
        at_s = number * 0.013 + chance.uniform(0, 0.002)
        push = {
            **{"kind": "push", "shard": 0, "worker": number % 4, "incarnation": 0},
            **{"sequence": number // 4, "batch": number // 4, "base_version": number - 3},
            **{"outcome": "applied", "version": number, "staleness": 2, "mixed": False},
            **{"received_s": round(at_s, 6), "applied_s": round(at_s + chance.random() / 1e3, 6)},
            **{"replied_s": round(at_s + 0.002 + chance.random() / 1e3, 6)},
            "lr": 0.1 * math.cos(number / count),
        }
        archive.add(line(push))
    assert len(archive.end()) / count < 25


def test_files_that_are_full_are_packed_and_read_in_order(tmp_path: Path) -> None:
    events = list(made_up(500))
    with contextlib.closing(EventLog.create(tmp_path, "ps-0")) as log:
        for event in events:
            log.record(**event)
            log.flush()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 3 and all(name.endswith(".jsonl.gz") for name in names)
    found = list(read_events(tmp_path))
    assert found == events
    assert list(read_events(tmp_path, "worker*")) == []


def test_a_short_file_stays_as_it_is(tmp_path: Path) -> None:
    with contextlib.closing(EventFile.create(tmp_path, "engine")) as file:
        file.write(line({"kind": "run"}))
    assert [path.name for path in tmp_path.iterdir()] == ["engine.jsonl"]


def test_who_comes_next_begins_a_file_of_its_own(tmp_path: Path) -> None:
    """After archived files too, and after half a line."""
    first = EventFile.create(tmp_path, "ps-0")
    for event in made_up(150):
        first.write(line(event))
    before = len(list(read_events(tmp_path)))
    first.write('{"kind": "pu')  # and is killed
    with contextlib.closing(EventFile.create(tmp_path, "ps-0")) as second:
        second.write(line({"kind": "last"}))
    *events, last = read_events(tmp_path)
    assert last == {"kind": "last"}
    assert len(events) == before == 150


def test_lines_may_come_in_pieces(tmp_path: Path) -> None:
    events = list(made_up(300))
    text = "".join(map(line, events))
    with contextlib.closing(EventFile.create(tmp_path, "worker-1")) as file:
        for start in range(0, len(text), 777):
            file.write(text[start : start + 777])
    assert list(read_events(tmp_path)) == events
    assert len(files_in(tmp_path, "*")) > 1


def test_who_follows_keeps_the_place_while_files_are_to_column(tmp_path: Path) -> None:
    chance = random.Random(1)
    log = EventLog.create(tmp_path, "ps-0")
    events = [{"kind": "push", "number": number, "pad": "x" * 50} for number in range(3000)]
    for event in events[:100]:
        log.record(**event)
    log.flush()
    followed, found = Followed(tmp_path, "ps-*.jsonl"), []
    for event in events[100:]:
        log.record(**event)
        if chance.random() < 0.1:
            log.flush()
        if chance.random() < 0.02:
            found += followed.read()
    log.close()
    found += followed.read()
    assert found == events[100:]
    assert list(followed.read()) == []
    assert list(Followed(tmp_path, "ps-*.jsonl").read()) == []
    assert len(list(tmp_path.iterdir())) > 5


@pytest.mark.parametrize("moment", ["written", "renamed", "unlinked"])
def test_an_event_is_read_once_at_every_moment_of_packing(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed leaves what it has at that moment."""
    events = list(made_up(100))
    file = EventFile.create(tmp_path, "ps-0")
    for event in events:
        file.write(line(event))
    followed = Followed(tmp_path, "*.jsonl")
    killed = RuntimeError("killed")

    def die(*args: object) -> None:
        raise killed

    if moment == "written":
        monkeypatch.setattr(Path, "rename", die)
    elif moment == "renamed":
        monkeypatch.setattr(Path, "unlink", die)
    with contextlib.suppress(RuntimeError):
        file.close()
    archived = [path.suffix for path in tmp_path.iterdir()]
    expected = {"written": {".jsonl", ".tmp"}, "renamed": {".jsonl", ".gz"}, "unlinked": {".gz"}}
    assert set(archived) == expected[moment]
    assert list(read_events(tmp_path)) == events
    assert list(followed.read()) == []
    assert free_path(tmp_path / "ps-0.jsonl").name == "ps-0.1.jsonl"


def test_a_file_that_is_packed_while_somebody_lists_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lists has passed the place of the new name, and not come to the old one."""
    events = list(made_up(50))
    file = EventFile.create(tmp_path, "ps-0")
    file.write("".join(map(line, events)))
    found, looks = event_files._names, itertools.count()

    def names(folder: Path) -> set[str]:
        if next(looks) == 0:
            file.close()
            return set()
        return found(folder)

    monkeypatch.setattr(event_files, "_names", names)
    assert list(read_events(tmp_path)) == events


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip", "not a block", "empty"])
def test_what_is_missing_of_a_packed_file_is_told(tmp_path: Path, damage: str) -> None:
    archive = Archive()
    for event in made_up(5 * BLOCK):
        archive.add(line(event))
    data = archive.end()
    other = Archive()
    damaged = {
        "cut": data[: len(data) // 2],
        "flipped": data[: len(data) // 2] + bytes(99) + data[len(data) // 2 + 99 :],
        "not gzip": b"something",
        "not a block": other._gzip.compress(b"[]\n") + other._gzip.flush(),
        "empty": b"",
    }
    (tmp_path / "ps-0.jsonl.gz").write_bytes(damaged[damage])
    (tmp_path / "ps-1.jsonl").write_text(line({"kind": "run"}))
    *events, last, run = read_events(tmp_path)
    assert last == {"kind": "unreadable"}
    assert run == {"kind": "run"}
    assert events == list(made_up(5 * BLOCK))[: len(events)]
    assert (len(events) > BLOCK) == (damage in ("cut", "flipped"))


def test_a_line_that_is_no_event_is_told_once(tmp_path: Path) -> None:
    with contextlib.closing(EventFile.create(tmp_path, "ps-0")) as file:
        file.write(line({"kind": "a"}) + "?\n[1]\n" + line({"kind": "b", "x": "y" * 2000}))
    (archived,) = tmp_path.iterdir()
    kinds = [event["kind"] for event in read_archive(archived)]
    assert kinds == ["a", "unreadable", "unreadable", "b"]


def test_a_run_whose_files_are_archived_comes_to_the_same_and_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of 320 pushes of two workers, beside the same events as lines."""
    options = {"engine": "inproc", "device": "cpu", "quiet": True, "workers": 2}
    options |= {"discipline": "sync", "run_dir": tmp_path / "run"}
    offbeat.train(toy_recipe(epochs=20), **options)
    folder = tmp_path / "run" / "events"
    names = sorted(path.name for path in folder.iterdir())
    assert {"ps-0.jsonl.gz", "ps-0.1.jsonl.gz", "worker-1.jsonl.gz"} <= set(names)
    replayed = offbeat.replay(tmp_path / "run", recipe=toy_recipe(epochs=20))
    assert replayed.difference is None
    archived, events = summarise(tmp_path / "run"), list(read_events(folder))
    assert sum(event["kind"] == "push" for event in events) == archived["gradients"] > 100
    for path in folder.iterdir():
        path.unlink()
    monkeypatch.undo()
    with contextlib.closing(EventFile.create(folder, "all")) as file:
        file.write("".join(map(line, events)))
    assert [path.name for path in folder.iterdir()] == ["all.jsonl"]
    assert summarise(tmp_path / "run") == archived
