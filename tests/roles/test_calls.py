"""What is asked of servers: each call comes out of its message as it went in."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat
from offbeat.accounts import Account
from offbeat.errors import ConnectionClosedError
from offbeat.roles import calls
from offbeat.roles.calls import Call, Events, Load, SendEvents, Status, read_call
from offbeat.shard import ShardState

MESSAGES: list[dict[str, Any]] = [
    {"ask": "status"},
    {"ask": "status"},
    {"ask": "fetch_events", "got": ["s", 3]},
    {"ask": "want", "version": 7},
    {"ask": "take"},
    {"ask": "drain"},
    {"ask": "leave_out", "workers": [1, 2]},
    {"ask": "finish", "reason": "the run is finished"},
    {"ask": "finish", "reason": "over"},
    {"ask": "newest", "after": -1},
    {"ask": "newest", "after": 8, "who": "e"},
    {"ask": "show"},
    {"ask": "fall", "versions": [120, 300]},
    {"ask": "round", "wait_s": 0.5},
    {"ask": "end_round", "number": 8, "norm": 1.5},
    {"ask": "about"},
    {"ask": "config"},
    {"ask": "config", "rank": 0},
    {"ask": "config", "join": True},
    {"ask": "release"},
    {"ask": "leave", "who": "e"},
    {"ask": "failed", "line": "the loss is nan"},
]
CONFIGURE = {"ask": "configure", "run": "r", "life": "l", "config": {"epochs": 3}, "facts": {}}
CONFIGURE |= {"agreement": {"fingerprint": "f"}, "epochs": [0, 1], "elapsed_s": 2.5}


@pytest.mark.parametrize("message", [*MESSAGES, CONFIGURE], ids=lambda m: str(m["ask"]))
def test_a_message_is_what_it_was_when_it_has_been_read(message: dict[str, Any]) -> None:
    call = read_call(json.loads(json.dumps(message)), {})
    assert call.message() == message and call.ask == message["ask"]
    assert dict(call.tensors()) == {}


def test_tensors_travel_beside_the_message() -> None:
    state = ShardState(version=3, tensors={"params": torch.ones(2)}, accounts={1: Account(0, 5)})
    load = Load(state)
    again = read_call(json.loads(json.dumps(load.message())), load.tensors())
    assert isinstance(again, Load)
    assert (again.state.version, again.state.accounts) == (3, state.accounts)
    assert torch.equal(again.state.tensors["params"], torch.ones(2))
    lines = torch.tensor(list(b"a\n"), dtype=torch.uint8)
    sent = SendEvents("worker-1", "s", 4, lines)
    assert sent.message() == {"ask": "events", "name": "worker-1", "source": "s", "before": 4}
    received = read_call(sent.message(), sent.tensors())
    assert isinstance(received, SendEvents) and torch.equal(received.lines, lines)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({}, "unknown"),
        ({"ask": "dinner"}, "unknown"),
        ({"ask": ["status"]}, "unknown"),
        ({"ask": "want"}, "makes no sense"),
        ({"ask": "want", "version": "7"}, "version is '7'"),
        ({"ask": "load", "state": {}}, "makes no sense"),
        ({"ask": "load", "state": 5}, "makes no sense"),
        ({"ask": "events", "name": "worker-1", "source": "s", "before": 0}, "makes no sense"),
        ({"ask": "configure"}, "makes no sense"),
        ({**CONFIGURE, "epochs": {}}, "epochs is"),
    ],
)
def test_nonsense_is_told_apart(message: dict[str, Any], told: str) -> None:
    with pytest.raises(ConnectionClosedError, match=told):
        read_call(message, {})


def test_a_status_comes_back_as_it_was() -> None:
    status = Status(
        version=5,
        epoch=1,
        loaded=True,
        finished=frozenset({1}),
        present=frozenset({2, 0}),
        awaited=frozenset(),
        ready=False,
        staleness=[0, 1],
    )
    message = json.loads(json.dumps(status.message()))
    assert message["present"] == [0, 2]
    assert Status.read(message) == status


def test_events_survive_their_way() -> None:
    lines = {"worker-1": torch.tensor([1], dtype=torch.uint8)}
    events = Events(["s", 1], lines, ["nan"])
    assert Events.read(json.loads(json.dumps(events.message())), lines) == events


def test_every_call_is_known_by_a_name_of_its_own_and_only_here() -> None:
    kinds = [kind for kind in vars(calls).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, Call) and kind is not Call]
    assert sorted(kind.ask for kind in kinds) == sorted(calls.CALLS)
    package = Path(offbeat.__file__).parent
    for path in package.rglob("*.py"):
        keys = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant)
        ]
        assert path.name == "calls.py" or "ask" not in keys, path
