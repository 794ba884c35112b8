"""What comes over connections and out of files: quick forms of its rows of the matrix of faults,
with each protection switched off in its turn, and its readers under Hypothesis."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import files, forged, mutation, wire
from matrix.desks import Tape, call_of
from matrix.row import Row, Trial

from offbeat.errors import CheckpointError, ConnectionClosedError
from offbeat.roles.calls import CALLS, Call, read_call
from offbeat.run.checkpoint import load_checkpoint
from offbeat.transport.base import PushHeader
from offbeat.transport.wire import (
    CALL,
    FORMAT,
    MAX_COUNT,
    Connection,
    Frame,
    pack,
    pack_push,
)
from offbeat.transport.wire import read_call as read_call_of

ROWS = {row.number: row for row in (*wire.ROWS, *files.ROWS)}
SEEDS_TO_FIND = {15: 60, 21: 70, 14: 25, 20: 12}
"""Within which a protection that is switched off is missed; elsewhere three are enough."""
CHEAP = {
    (7, "dedupe"),
    (8, "whole frames"),
    (13, "finite check"),
    (14, "agreement"),
    (14, "protocol's version"),
    (16, "length cap"),
    (17, "token"),
    (17, "nonces"),
    (18, "cap of strangers"),
    (20, "nothing but JSON"),
    (21, "digest of data"),
}
"""Of these a few trials tell; the others wait for what does not come, or for a rare seed."""
thorough = settings(max_examples=80, derandomize=True, deadline=None, database=None)


def trials_of(row: Row, count: int) -> list[str]:
    """What did not hold in the first trials, as many as make that count."""
    found: list[str] = []
    counted = seed = 0
    while counted < count:
        trial: Trial = row.trial(seed)
        found += trial.violations
        counted += trial.counted
        seed += 1
    return found


@pytest.mark.parametrize("number", ROWS)
def test_what_must_hold_does(number: int) -> None:
    row = ROWS[number]
    assert trials_of(row, row.quick) == []


def protections(*, cheap: bool) -> list[Any]:
    return [
        pytest.param(number, name, id=f"{number}: {name}")
        for number, row in ROWS.items()
        for name in row.protections
        if ((number, name) in CHEAP) == cheap
    ]


@pytest.mark.parametrize(("number", "name"), protections(cheap=True))
def test_what_is_switched_off_is_missed(number: int, name: str) -> None:
    with ROWS[number].protections[name]():
        assert any(ROWS[number].trial(seed).violations for seed in seeds_of(number))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), protections(cheap=False))
def test_what_else_is_switched_off_is_missed_too(number: int, name: str) -> None:
    test_what_is_switched_off_is_missed(number, name)


def seeds_of(number: int) -> range:
    return range(SEEDS_TO_FIND.get(number, 3))


# -- mutations -------------------------------------------------------------------------------------


def test_a_mutation_is_the_same_for_the_same_seed() -> None:
    frames = [pack_push(PushHeader(0, 0, 1, 0, 0), 4) + b"1234", call_of({"ask": "status"})]
    for seed in range(50):
        first, second = (mutation.mutated(frames, random.Random(seed), 0.5) for _ in range(2))
        assert first == second
    assert any(mutation.mutated(frames, random.Random(seed), 0.5) != frames for seed in range(9))


def test_every_field_of_a_header_is_where_it_is_said_to_be() -> None:
    header = PushHeader(1, 2, 3, 4, 5, 6, 7, num_bytes=8, num_rows=9, speed=0.5)
    raw = pack_push(header, 10)
    values = {"shard": 7, "worker": 1, "incarnation": 2, "epoch": 6, "length": 10, "sequence": 3}
    values |= {"batch": 5, "base version": 4, "version": 9, "size": 8}
    assert {name: mutation.field_of(raw, name) for name in values} == values
    assert mutation.field_of(raw, "magic") == b"OFFB" and mutation.field_of(raw, "speed") == 0.5
    assert sum(FORMAT.size - at for at, _ in mutation.FIELDS.values()) > FORMAT.size


# -- under Hypothesis ------------------------------------------------------------------------------

counts = st.integers(0, MAX_COUNT)
small = st.integers(0, 2**32 - 1)
words = st.sampled_from(("float32", "int64", "a", "", "ask", "status", "\ud800", "x" * 200))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | words,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | words, inner, max_size=4)
    ),
    max_leaves=8,
)


@thorough
@given(st.tuples(small, small, counts, counts, counts, small, small, st.booleans(), st.booleans()))
def test_a_header_says_what_was_packed(said: Any) -> None:
    header = PushHeader(*said)
    frame = Frame(pack_push(header, 17))
    assert frame.push() == header and frame.length == 17


@thorough
@given(st.binary(min_size=FORMAT.size, max_size=FORMAT.size), st.booleans())
def test_any_header_is_read_or_refused(raw: bytes, is_ours: bool) -> None:
    if is_ours:
        raw = pack(0)[:6] + raw[6:]
    with contextlib.suppress(ConnectionClosedError):
        frame = Frame(raw)
        for read in (frame.reply, frame.welcome, frame.push):
            read()


@thorough
@given(values, values, st.binary(max_size=40))
def test_any_call_is_read_or_refused(message: Any, tensors: Any, rest: bytes) -> None:
    raw = json.dumps({"message": message, "tensors": tensors}).encode()
    check_call(raw, rest)


@thorough
@given(
    st.lists(st.tuples(words, words, st.lists(st.integers(-1, 2**65) | values, max_size=4))),
    st.binary(max_size=40),
)
def test_any_table_of_tensors_is_read_or_refused(table: Any, rest: bytes) -> None:
    check_call(json.dumps({"message": {}, "tensors": table}).encode(), rest)


@thorough
@given(st.binary(max_size=300))
def test_any_bytes_are_a_call_or_none(raw: bytes) -> None:
    check_call(raw, b"")


def check_call(raw: bytes, rest: bytes) -> None:
    connection = Connection(Tape([raw + rest]))
    with contextlib.suppress(ConnectionClosedError):
        message, tensors = read_call_of(connection, Frame(pack(CALL, length=len(raw))), 1 << 12)
        assert isinstance(message, dict)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 1 << 12
        read_call(message, tensors)


@thorough
@given(st.sampled_from(sorted(CALLS)), st.data())
def test_any_message_is_a_call_or_refused(ask: str, data: st.DataObject) -> None:
    kind = CALLS[ask]
    fields = [name for name in kind.__annotations__ if name != "ask"]
    said = {name: data.draw(values, label=name) for name in fields}
    with contextlib.suppress(ConnectionClosedError):
        assert isinstance(read_call({"ask": ask, **said}, {"lines": torch.zeros(1)}), Call)


@settings(thorough, max_examples=40)
@given(st.sampled_from(("shards", "files", "manifest", "plan", "version", "format")), values)
def test_a_checkpoint_that_says_anything_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    path = forged.a_checkpoint(tmp_path_factory.mktemp("run"))
    described = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**described, name: value}))
    forged.signed(path)
    with contextlib.suppress(CheckpointError):
        load_checkpoint(path).state_dict()


# -- what trials have found ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [[2**63, 0], [float("inf")], [2**22, 2**22, 2**22, 0], [0.5], [True], "55", {"5": 1}]
)
def test_a_shape_that_no_tensor_has_ends_the_connection_and_no_server(shape: Any) -> None:
    raw = json.dumps({"message": {}, "tensors": [["a", "float32", shape]]}).encode()
    connection = Connection(Tape([raw]))
    with pytest.raises(ConnectionClosedError, match="makes no sense"):
        read_call_of(connection, Frame(pack(CALL, length=len(raw))), 1 << 20)


@pytest.mark.parametrize(
    "message",
    [
        {"ask": "fall", "versions": []},
        {"ask": "fall", "versions": ["x"]},
        {"ask": "leave_out", "workers": [[1]]},
        {"ask": "load", "state": {"version": 0, "accounts": []}},
        {"ask": "load", "state": {"version": 0, "accounts": {"0": [float("inf")]}}},
    ],
)
def test_a_call_that_makes_no_sense_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ConnectionClosedError, match="makes no sense"):
        read_call(message, {})


@pytest.mark.parametrize("field", ["sequence", "batch", "base version"])
def test_a_count_that_no_journal_has_room_for_is_refused(field: str) -> None:
    raw = mutation.set_field(pack_push(PushHeader(0, 0, 1, 0, 0)), field, 2**63)
    with pytest.raises(ConnectionClosedError, match="counts up to"):
        Frame(raw).push()


def test_a_checkpoint_of_files_that_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    path = forged.a_checkpoint(tmp_path)
    described = json.loads((path / "manifest.json").read_text())
    (tmp_path / "elsewhere").write_bytes((path / "frozen.safetensors").read_bytes())
    described["files"]["../elsewhere"] = described["files"].pop("frozen.safetensors")
    (path / "manifest.json").write_text(json.dumps(described))
    forged.signed(path)
    with pytest.raises(CheckpointError, match=r"elsewhere"):
        load_checkpoint(path)
