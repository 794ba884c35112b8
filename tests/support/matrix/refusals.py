"""Rows 13 and 14: gradients with one bad element, and workers that mean another run."""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from helpers import toy_job, toy_model, toy_recipe
from rig import Hand, Rig, knock, wait_until
from strangers import Stranger
from torch import Tensor, nn

from offbeat import SGD, AdamW
from offbeat.accounts import REJECTED
from offbeat.errors import ConnectionClosedError
from offbeat.optim import Optimizer
from offbeat.run.job import Job
from offbeat.transport.codecs import Bf16
from offbeat.transport.wire import FORMAT, PROTOCOL, WELCOME, Connection, Frame, pack

from . import switched_off
from .desks import Tape, a_folder
from .row import Row, Trial

BAD = (float("nan"), float("inf"), float("-inf"), 1e38, -1e38, 3e19)
"""The last ones have squares that are no float32."""
GRADIENTS = 100
"""Of a trial."""


def _states(rig: Rig) -> dict[str, Tensor]:
    return rig.shard.state({}).tensors


def _differ(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [
        name
        for name in {**before, **after}
        if name not in before
        or name not in after
        or before[name].numpy().tobytes() != after[name].numpy().tobytes()
    ]


def bad_gradients_trial(seed: int) -> Trial:
    rng = random.Random(seed)
    discipline = rng.choice(("apply-reply", "reply-apply", "lock-free", "sync", "buffer"))
    optimizer = rng.choice((AdamW(lr=0.01), SGD(lr=0.1, momentum=0.9)))
    options: dict[str, Any] = {"sizes": (rng.choice((4, 300)), 7), "ema_decay": 0.9}
    if rng.random() < 0.2:
        options["make_codec"] = Bf16
    transport = rng.choice(("tcp", "unix", "inproc"))
    with a_folder() as folder:
        rig = Rig(
            folder,
            discipline,
            1,
            transport=transport,
            optimizer=optimizer,
            discipline_options={"buffer_size": 1},
            **options,
        )
        lines = _listen(rig.log)
        with contextlib.closing(rig):
            found = list(_push_bad_ones(rig, rng))
        if not any("worker 0" in line for line in lines):
            found.append("the worker is not named in the log")
    return Trial(tuple(found), counted=GRADIENTS)


def _listen(log: logging.Logger) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    return lines


def _push_bad_ones(rig: Rig, rng: random.Random) -> Iterator[str]:
    hand = rig.join(0)
    size = rig.shard.params.numel()
    for _ in range(2):
        hand.exchange(torch.tensor([rng.uniform(-1, 1) for _ in range(size)]))
    before, version = _states(rig), rig.shard.version
    for number in range(GRADIENTS):
        values = torch.tensor([rng.uniform(-1, 1) for _ in range(size)])
        values[rng.randrange(size)] = bad = rng.choice(BAD)
        reply = hand.exchange(values)
        if reply.status != REJECTED:
            yield f"gradient {number} with {bad} was {reply.status}"
            return
        if rig.shard.version != version:
            yield f"version {rig.shard.version} after a gradient with {bad}"
        if changed := _differ(before, _states(rig)):
            yield f"{', '.join(changed)} changed by a gradient with {bad}"
            return
    account = rig.server.ledger.accounts[0]
    if account.rejected != GRADIENTS:
        yield f"{account.rejected} of {GRADIENTS} are counted"
    if (good := hand.exchange(0.5)).status == REJECTED:
        yield f"a good one after them is {good.status}"
    else:  # which some disciplines apply after the answer
        wait_until(lambda: rig.shard.version > version, "it is in")


BAD_GRADIENTS = Row(
    13,
    "NaN, Inf or 1e38 in one element of a gradient",
    "refused and counted; parameters, average and optimizer's state the same to the bit; the "
    "worker is named",
    10_000,
    1,
    bad_gradients_trial,
    {"finite check": switched_off.FINITE},
)


# -- another run -----------------------------------------------------------------------------------


class Wider(nn.Module):
    def __init__(self, size: int = 6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(size, 7, dtype=dtype)
        self.last = nn.Linear(7, 3)


def _job(
    model: Callable[[], nn.Module] = Wider, optimizer: Optimizer | None = None, **options: Any
) -> Job:
    recipe = toy_recipe(model=model, optimizer=optimizer or SGD(lr=0.1))
    return toy_job(recipe, workers=1, **options)


OTHERS: dict[str, dict[str, Any]] = {
    "shape": {"model": partial(Wider, size=5)},
    "dtype": {"model": partial(Wider, dtype=torch.bfloat16)},
    "model": {"model": toy_model},
    "optimizer": {"optimizer": SGD(lr=0.1, momentum=0.5)},
    "optimizer's class": {"optimizer": AdamW(lr=0.1)},
    "learning rate": {"optimizer": Optimizer(kind="SGD", options={"lr": 0.2})},
    "servers": {"servers": 2},
    "codec": {"compress": "int8"},
    "codec of replies": {"compress_replies": "bf16"},
}
HELLOS: dict[str, dict[str, Any]] = {
    "protocol": {"protocol": PROTOCOL + 1, "fingerprint": "other"},
    "fingerprint": {"fingerprint": "other"},
    "fingerprint's kind": {"fingerprint": 5},
    "shard": {"shard": 1},
    "num_shards": {"num_shards": 3},
    "worker": {"worker": -1},
    "worker's kind": {"worker": "0"},
    "worker too large": {"worker": 1 << 32},
    "incarnation": {"incarnation": -1},
    "incarnation's kind": {"incarnation": None},
    "last_round": {"last_round": [[0]]},
    "model": {"model": None, "fingerprint": "other"},
}
CASES = (*OTHERS, *(f"hello's {name}" for name in HELLOS), "header's version", "server's version")


def other_runs_trial(seed: int) -> Trial:
    """One field that is another one; then a worker that means the same."""
    case = CASES[seed % len(CASES)]
    ours = _job()
    with a_folder() as folder:
        options: dict[str, Any] = {"agreement": ours.agreement}
        rig = Rig(
            folder,
            "apply-reply",
            1,
            manifest=ours.manifest,
            transport="tcp",
            server_options=options,
        )
        with contextlib.closing(rig):
            found = [f"{case}: {line}" for line in _come_with(case, rig, ours)]
            hello = {"worker": 0, "incarnation": 0, **ours.agreement}
            hand = Hand(knock(rig.listener, hello, rig.layout), 0)
            rig.hands.append(hand)
            hand.exchange(1.0)
            if rig.shard.version != 1 or rig.server.failure is not None:
                found.append(f"{case}: the server does not go on: {rig.server.failure!r}")
    return Trial(tuple(found))


def _come_with(case: str, rig: Rig, ours: Job) -> Iterator[str]:
    if case == "server's version":
        yield from _read_other_version()
        return
    if case == "header's version":
        yield from _say_other_version(rig)
        return
    theirs = _job(**OTHERS[case]).agreement if case in OTHERS else ours.agreement
    more = HELLOS.get(case.removeprefix("hello's "), {}) if case not in OTHERS else {}
    hello = {"worker": 0, "incarnation": 0, **theirs, **more}
    try:
        knock(rig.listener, hello, rig.layout).close()
    except ConnectionClosedError as error:
        said = str(error)
        if not error.refused:
            yield f"sent away, but not refused: {said}"
        if "\n" in said or not any(word in said for word in ("there", "server", "hello", "model")):
            yield f"that says nothing: {said!r}"
        return
    yield "taken in"


def _say_other_version(rig: Rig) -> Iterator[str]:
    """In a frame's header: there is nobody who could read a refusal."""
    with Stranger(rig.listener) as stranger:
        stranger.read_frame()
        raw = bytearray(pack(WELCOME))
        raw[4:6] = (PROTOCOL + 1).to_bytes(2, "little")
        stranger.socket.sendall(raw)
        stranger.wait_for_the_end()
    try:
        Frame(raw)
    except ConnectionClosedError as error:
        if not error.refused or str(PROTOCOL + 1) not in str(error):
            yield f"that says nothing: {error}"
        return
    yield "read"


def _read_other_version() -> Iterator[str]:
    raw = bytearray(pack(WELCOME))
    raw[4:6] = (PROTOCOL - 1).to_bytes(2, "little")
    try:
        Connection(Tape([bytes(raw)])).receive(1.0)
    except ConnectionClosedError as error:
        if error.refused and "of the protocol" in str(error):
            return
        yield f"that says nothing: {error}"
        return
    yield f"read, {FORMAT.size} bytes"


OTHER_RUNS = Row(
    14,
    "wrong model, shape, dtype, optimizer, servers, codec, protocol, rank",
    "refused at the handshake with what differs; the server goes on",
    len(CASES),
    len(CASES),
    other_runs_trial,
    {"agreement": switched_off.AGREEMENT, "protocol's version": switched_off.PROTOCOL},
)
ROWS = (BAD_GRADIENTS, OTHER_RUNS)
