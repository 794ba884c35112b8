"""What is asked of a server over a connection for calls: each call once, with its way into a
message and out of it.

By the master: AskStatus, Load, Want, Take, Cover, Drain, LeaveOut, Finish, Fall, AskRound,
EndRound; by an evaluator: Newest; by a script: Show. A `Server` answers them. Where roles are
started by hand there are others, which `Bootstrap` answers. A message is what JSON can say, with
tensors beside it; `ask` is the name of the call in it.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from offbeat.accounts import accounts_from, accounts_to_json
from offbeat.errors import ConnectionClosedError
from offbeat.shard import ShardState
from offbeat.transport.base import Message

Tensors = Mapping[str, Tensor]
PAIRS = ("waiting", "answered", "pushes")
"""What a RoundPart has of workers and their sequence numbers."""


class Call:
    """The base of them all. Fields that are None are left out of the message."""

    ask: ClassVar[str]

    def message(self) -> Message:
        return {"ask": self.ask, **_given(self)}

    def tensors(self) -> Tensors:
        return {}

    @classmethod
    def read(cls, message: Message, tensors: Tensors) -> Self:
        """Raises a TypeError where the message is another one's."""
        return cls(**_fitting(cls, message))


# -- by the master ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AskStatus(Call):
    """How is the server?"""

    ask = "status"


@dataclass(frozen=True)
class Load(Call):
    """Go on from this state."""

    ask = "load"
    state: ShardState

    def message(self) -> Message:
        return {"ask": self.ask, "state": describe_state(self.state)}

    def tensors(self) -> Tensors:
        return self.state.tensors

    @classmethod
    def read(cls, message: Message, tensors: Tensors) -> Self:
        return cls(state_from(message["state"], tensors))


@dataclass(frozen=True)
class Want(Call):
    """Keep a snapshot of the first version from this one on; the status says when it is ready."""

    ask = "want"
    version: int


@dataclass(frozen=True)
class Take(Call):
    """Hand over the snapshot that was wanted, and is ready."""

    ask = "take"


@dataclass(frozen=True)
class Cover(Call):
    """A checkpoint is committed, and nothing of the journal is needed any more that is in a
    snapshot which was taken at this entry."""

    ask = "cover"
    entry: int


@dataclass(frozen=True)
class Drain(Call):
    """Have every worker leave after the step that it is at."""

    ask = "drain"


@dataclass(frozen=True)
class LeaveOut(Call):
    """Wait no longer for those of these workers that are not there."""

    ask = "leave_out"
    workers: list[int]


@dataclass(frozen=True)
class Finish(Call):
    """The run is over."""

    ask = "finish"
    reason: str


@dataclass(frozen=True)
class Fall(Call):
    """The learning rate, which goes by scores, is lower by one step from each of these versions
    on."""

    ask = "fall"
    versions: list[int]

    @classmethod
    def read(cls, message: Message, tensors: Tensors) -> Self:
        found = super().read(message, tensors)
        if not found.versions:
            raise ValueError("there is no version")
        return found


@dataclass(frozen=True)
class AskRound(Call):
    """What is the last round, whose norm several servers have to know? Answered as soon as one
    waits for that, or after `wait_s`."""

    ask = "round"
    wait_s: float


@dataclass(frozen=True)
class EndRound(Call):
    """This is the norm of all of the gradient that the round of this number has: let it go in."""

    ask = "end_round"
    number: int
    norm: float


# -- by an evaluator -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Newest(Call):
    """What has the newest checkpoint to score, where it is newer than `after`? A server that was
    started by hand stays for `who` asks, for a while, until it says Leave."""

    ask = "newest"
    after: int
    who: str | None = None


# -- by a script whose loop is its own -------------------------------------------------------------


@dataclass(frozen=True)
class Show(Call):
    """What is the shard at this moment, with what its optimizer keeps?"""

    ask = "show"


# -- where roles are started by hand ---------------------------------------------------------------


@dataclass(frozen=True)
class About(Call):
    """Which version, which run, who is here?"""

    ask = "about"


@dataclass(frozen=True)
class Configure(Call):
    """The master says what the run is. `life` is another one for every process that is the master;
    `epochs` are what the servers are to call their next lives; `loop`: of a launched run, what its
    script trains."""

    ask = "configure"
    run: str
    life: str
    config: dict[str, Any]
    facts: dict[str, Any]
    agreement: dict[str, Any]
    epochs: list[int]
    elapsed_s: float
    loop: dict[str, Any] | None = None


@dataclass(frozen=True)
class AskConfig(Call):
    """What is the run, and which incarnation is the worker of this rank? With `join`: which rank is
    one more than the cluster lists?"""

    ask = "config"
    rank: int | None = None
    join: bool | None = None


@dataclass(frozen=True)
class SendEvents(Call):
    """Lines for the file of this name in the run's folder; `source` sent `before` bytes before."""

    ask = "events"
    name: str
    source: str
    before: int
    lines: Tensor

    def message(self) -> Message:
        return {key: value for key, value in super().message().items() if key != "lines"}

    def tensors(self) -> Tensors:
        return {"lines": self.lines}

    @classmethod
    def read(cls, message: Message, tensors: Tensors) -> Self:
        return cls(**_fitting(cls, {**message, **tensors}))


@dataclass(frozen=True)
class FetchEvents(Call):
    """What lines are there for the run's folder? Asked by the master. `got`: the number of the last
    answer that it has; what that one brought it is not given again."""

    ask = "fetch_events"
    got: list[Any] | None = None


@dataclass(frozen=True)
class Release(Call):
    """The master has all that there is to have."""

    ask = "release"


@dataclass(frozen=True)
class Leave(Call):
    """Nobody needs to stay for this evaluator."""

    ask = "leave"
    who: str


@dataclass(frozen=True)
class TellFailure(Call):
    """A worker's loss is no number any more."""

    ask = "failed"
    line: str


CALLS: dict[str, type[Call]] = {call.ask: call for call in Call.__subclasses__()}


def read_call(message: Message, tensors: Tensors) -> Call:
    kind = CALLS.get(str(message.get("ask")))
    if kind is None:
        raise ConnectionClosedError(f"a server was asked for something unknown: {message}")
    try:
        return kind.read(message, tensors)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConnectionClosedError(
            f"a server was asked {kind.ask!r} in a way that makes no sense: {error}", refused=True
        ) from error


def is_a(kind: type[Call], message: Message) -> bool:
    return message.get("ask") == kind.ask


# -- answers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Status:
    """A server, as it describes itself."""

    version: int
    epoch: int
    loaded: bool
    finished: frozenset[int]
    present: frozenset[int]
    awaited: frozenset[int]
    """Workers that its discipline counts on, and that did not come yet."""
    ready: bool
    staleness: list[int]
    lr: float | None = None
    """What the last update was made with."""
    falls: list[int] = field(default_factory=list)
    """The versions from which on it was told to have that lower."""
    founded: bool = True
    """It needs not be told that there is a checkpoint: it was, or promises nothing."""

    def message(self) -> Message:
        sets = {key: sorted(getattr(self, key)) for key in ("finished", "present", "awaited")}
        return {**{key: getattr(self, key) for key in _hints(Status)}, **sets}

    @classmethod
    def read(cls, message: Message) -> "Status":
        sets = {key: frozenset(message[key]) for key in ("finished", "present", "awaited")}
        return cls(**{**message, **sets})


@dataclass(frozen=True, slots=True)
class RoundPart:
    """The answer to AskRound: what a server has of its last round."""

    epoch: int
    present: frozenset[int]
    """The workers that are connected, and not through."""
    waiting: frozenset[tuple[int, int]] = frozenset()
    """Of these, who waits for the reply to which push."""
    answered: frozenset[tuple[int, int]] = frozenset()
    """And who does not, and which push is the last that is settled."""
    held: bool = False
    """It waits for the norm."""
    version: int = 0
    """Of the shard, when that round has gone in, or has not."""
    number: int = 0
    """Counts the rounds that were closed here, also those that were opened again; 0: none was."""
    pushes: frozenset[tuple[int, int]] = frozenset()
    """Of whom, and with which sequence number."""
    norms: Mapping[int, float] = field(default_factory=dict)
    """Of its part of each tensor, by the tensor's number."""

    def message(self) -> Message:
        plain = {key: getattr(self, key) for key in ("epoch", "held", "version", "number")}
        sets = {key: sorted(getattr(self, key)) for key in ("present", *PAIRS)}
        return {**plain, **sets}

    def tensors(self) -> Tensors:
        if not self.norms:
            return {}
        return {
            "of": torch.tensor(list(self.norms)),
            "norms": torch.tensor(list(self.norms.values())),
        }

    @classmethod
    def read(cls, message: Message, tensors: Tensors) -> "RoundPart":
        lists = [tensors[name].tolist() for name in ("of", "norms")] if tensors else [[], []]
        return cls(
            epoch=message["epoch"],
            present=frozenset(message["present"]),
            held=message["held"],
            version=message["version"],
            number=message["number"],
            norms=dict(zip(*lists, strict=True)),
            **{key: frozenset((w, sequence) for w, sequence in message[key]) for key in PAIRS},
        )


@dataclass(frozen=True)
class Events:
    """The answer to FetchEvents. `number` tells one that comes again."""

    number: list[Any]
    lines: Tensors
    """By the name of the file that they belong to."""
    failures: list[str]
    """What workers have told of theirs."""

    def message(self) -> Message:
        return {"number": self.number, "failures": self.failures}

    @classmethod
    def read(cls, message: Message, tensors: Tensors) -> "Events":
        return cls(message["number"], tensors, [str(line) for line in message["failures"]])


def describe_state(state: ShardState) -> Message:
    """A shard's state as a message; its tensors travel beside it."""
    return {
        "version": state.version,
        "accounts": accounts_to_json(state.accounts),
        "falls": list(state.falls),
        **({"entry": state.entry} if state.entry else {}),
    }


def state_from(message: Message, tensors: Tensors) -> ShardState:
    accounts = accounts_from(message["accounts"])
    return ShardState(
        version=message["version"],
        tensors=dict(tensors),
        accounts=accounts,
        falls=tuple(message.get("falls", ())),
        entry=message.get("entry", 0),
    )


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    """Worked out once, since they are asked for with every call."""
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _given(call: Call) -> dict[str, Any]:
    found = {field: getattr(call, field) for field in _hints(type(call))}
    return {key: value for key, value in found.items() if key != "ask" and value is not None}


def _fitting(kind: type[Call], message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message has of a call's fields; a TypeError where one is of another type."""
    found = {}
    for name, hint in _hints(kind).items():
        if name != "ask" and name in message:
            if not _is(message[name], hint):
                raise TypeError(f"{name} is {message[name]!r}")
            found[name] = message[name]
    return found


def _is(value: object, hint: Any) -> bool:
    """Whether a value is what a field is to be; of a list, each part of it."""
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(_is(value, each) for each in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is list:
        (part,) = typing.get_args(hint)
        return isinstance(value, list) and all(_is(each, part) for each in value)
    return isinstance(value, (float, int) if kind is float else kind)
