"""Row 12: torn reads. Every update writes the number of its version into every element."""

import contextlib
import itertools
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from planting import Bug
from rig import Hand, in_threads, manifest_of, rig
from torch import Tensor

from matrix.row import Row, Trial
from offbeat import SGD
from offbeat.roles.sessions import Sessions
from offbeat.rules import Gradient
from offbeat.shard import Shard, segments_of

LOCKED = ("apply-reply", "reply-apply", "sync", "bounded", "ringmaster")
NUM_WORKERS = 3
NUM_READS = 2000


def read(seed: int) -> Trial:
    draw = random.Random(f"row 12, {seed}")
    size = draw.choice([64, 5_000, 60_000])
    return _read_without_lock(size) if seed % 2 else _read_locked(draw, size)


# -- with a lock -----------------------------------------------------------------------------------


def _read_locked(draw: random.Random, size: int) -> Trial:
    """Workers read replies, and somebody snapshots, while others push."""
    discipline, transport = draw.choice(LOCKED), draw.choice(["inproc", "attended", "unix"])
    options = {"staleness": float("inf"), "max_staleness": float("inf")}
    violations: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="row-") as folder,
        rig(
            Path(folder),
            discipline,
            NUM_WORKERS,
            sizes=(size,),
            transport=transport,
            discipline_options=options,
        ) as made,
    ):
        hands, over = made.join_all(NUM_WORKERS), threading.Event()
        shown: list[int] = []

        def look_on() -> None:
            while not over.is_set():
                state = made.server.sessions.show()
                violations.extend(_torn(state.tensors["params"], state.version, "a snapshot"))
                shown.append(state.version)

        def work() -> None:
            try:
                in_threads(*(lambda hand=hand: violations.extend(_push(hand)) for hand in hands))
            finally:
                over.set()

        in_threads(work, look_on)
        where = f" ({discipline}, {transport}, {size} elements)"
        found = tuple(what + where for what in violations[:3])
        return Trial(found, counted=NUM_READS // NUM_WORKERS * NUM_WORKERS + len(shown))


def _push(hand: Hand) -> Iterator[str]:
    for _ in range(NUM_READS // NUM_WORKERS):
        header = hand.exchange(-1.0)
        yield from _torn(hand.params, header.version, f"a reply to worker {hand.worker}")


def _torn(values: Tensor, version: int, what: str) -> Iterator[str]:
    low, high = values.aminmax()
    if not low == high == version:
        yield f"{what} of version {version} has {low:g} to {high:g} in it"


# -- lock-free -------------------------------------------------------------------------------------


def _read_without_lock(size: int) -> Trial:
    """What mixes versions is said to."""
    made = manifest_of((size,))
    optimizer = SGD(lr=1.0)
    shard = Shard(torch.zeros(size), segments_of(made, optimizer, 0, size), optimizer)
    updater, one = shard.make_updater(shared=True), torch.full((size,), -1.0)
    over, violations = threading.Event(), []

    def write() -> None:
        for version in itertools.count():
            if over.is_set():
                return
            updater.apply([Gradient(one, base_version=version)])

    def read_all() -> None:
        slot, nothing = torch.empty(size), torch.empty(0)
        try:
            for _ in range(NUM_READS):
                version, is_mixed = shard.read(slot, nothing, nothing.long())
                if not is_mixed:
                    violations.extend(_torn(slot, version, "what is said to be whole"))
        finally:
            over.set()

    in_threads(write, read_all)
    return Trial(tuple(f"{what} (lock-free, {size})" for what in violations[:3]), counted=NUM_READS)


# -- protections -----------------------------------------------------------------------------------

_init = Sessions.__init__


def _without_lock(sessions: Sessions, *given: Any, **named: Any) -> None:
    _init(sessions, *given, **named)
    sessions._lock = contextlib.nullcontext()


def _never_under_way(shard: Shard) -> int:
    return shard.version


ROWS = (
    Row(
        12,
        "torn read",
        "locked disciplines: every reply is one version; lock-free: counted",
        1_000_000,
        6000,
        read,
        {
            "the shard's lock": Bug("", [(Sessions, "__init__", _without_lock)]).planted,
            "updates under way": Bug(
                "", [(Shard, "version_begun", property(_never_under_way))]
            ).planted,
        },
    ),
)
