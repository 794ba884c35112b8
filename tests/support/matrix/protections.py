"""What guards against faults of processes, to be switched off: in this process, where the engine
is, and in the roles' processes, which import a recipe that does it (`prelude`).

`without(NAME)` is what a row has for each of its protections.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planting import Bug
from simulated.bugs import BUGS as SIMULATED

from matrix.row import Protection
from offbeat.disciplines import Sync
from offbeat.engines.succession import Succession
from offbeat.engines.supervisor import Decision, Member, StartAgain, Supervisor
from offbeat.ledger import Ledger
from offbeat.roles import master
from offbeat.roles.master import Master, Patience
from offbeat.run import checkpoint
from offbeat.run.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from offbeat.run.journal import Journal

_ended, _bring = Supervisor.ended, Journal._bring
_off: list[str] = []
"""What is switched off now, in whatever this process starts."""


def _as_before(supervisor: Supervisor, member: Member, how: str | None, **more: Any) -> Decision:
    decision = _ended(supervisor, member, how, **more)
    if isinstance(decision, StartAgain):
        member.generation -= 1
    return decision


def _bring_slowly(journal: Journal, batch: Sequence[Any]) -> None:
    """As slow disks do; nobody minds who waits for them."""
    journal._closing.wait(0.05)
    _bring(journal, batch)


def _write_whatever(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        with contextlib.suppress(OSError):
            checkpoint.os.fsync(file.fileno())


def _oldest_checkpoint(folder: Path) -> Checkpoint:
    return load_checkpoint(list_checkpoints(folder)[0])


BUGS = {
    bug.name: bug
    for bug in (
        SIMULATED["goes on a step too far"],
        SIMULATED["accounts not saved"],
        SIMULATED["late gradient accepted in sync"],
        Bug("rounds close after their timeout", [(Sync, "on_tick", lambda *given: [])]),
        Bug("same incarnation", [(Supervisor, "ended", _as_before)]),
        Bug(
            "answered before it is on the disk",
            [(Ledger, "withholds", lambda *given: False), (Journal, "_bring", _bring_slowly)],
        ),
        Bug("who is gone is not waited for", [(Patience, "given_up", lambda patience: set())]),
        Bug("an epoch of its own", [(Succession, "remember", lambda *given: None)]),
        Bug("a last checkpoint", SIMULATED["no last checkpoint"].patches),
        Bug("digests", [(checkpoint, "_sha256", lambda raw: "0" * 64)]),
        Bug("journal not read", [(Journal, "read", lambda journal: iter(()))]),
        Bug("a failed save ends nothing", [(Master, "_try_to_commit", Master._commit_if_new)]),
        Bug("a failed fsync is no save", [(checkpoint, "_write", _write_whatever)]),
        Bug("a clock that never goes back", [(time, "monotonic", lambda: time.time())]),
        Bug("oldest checkpoint", [(master, "newest_checkpoint", _oldest_checkpoint)]),
    )
}


def without(name: str) -> Protection:
    """With this bug of `BUGS` in it."""
    bug = BUGS[name]

    @contextlib.contextmanager
    def switched_off() -> Iterator[None]:
        _off.append(name)
        try:
            with bug.planted():
                yield
        finally:
            _off.remove(name)

    return switched_off


def protections(*names: str) -> dict[str, Protection]:
    return {name: without(name) for name in names}


def prelude() -> str:
    """What a recipe begins with, so that its roles lack the same as this process."""
    return f"from matrix.protections import plant\nplant({_off!r})\n" if _off else ""


def role_here() -> str:
    """Which role's process this is; empty: none's."""
    return sys.argv[2] if sys.argv[1:2] == ["role"] else ""


def plant(names: Sequence[str]) -> None:
    """Where a role imports its recipe; the engine, which does so too, is not to keep it."""
    if role_here():
        for name in names:
            BUGS[name].plant()
