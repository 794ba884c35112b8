"""Row 24: a run is ended from outside, at any time: SIGTERM, Ctrl-C, its terminal closed."""

import contextlib
import os
import pty
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from chaos import ORACLE_FILE
from processes import leftovers

from matrix.protections import prelude, protections
from matrix.row import Row, Trial
from offbeat.cli.commands import INTERRUPTED
from offbeat.engines.forkserver import role_environment
from offbeat.errors import CheckpointError
from offbeat.run.checkpoint import list_checkpoints, newest_checkpoint
from offbeat.run.events import read_events

LIMIT_S = 30.0
"""For a machine that is busy with other trials; a quiet one takes a second or two."""
START_TIMEOUT_S = 120.0
CLOSED = "its terminal is closed"
WAYS = ("SIGTERM", "SIGINT", CLOSED)
ON_A_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)  # of a session that has none, so that it is its own
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
os.execv(sys.executable, [sys.executable, "-m", "offbeat", *sys.argv[2:]])
"""


class OnTerminal:
    """`offbeat train` on a terminal that can be closed."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.run_dir = folder / "run"
        recipe = folder / "oracle.py"
        recipe.write_text(prelude() + ORACLE_FILE)
        command = ["train", "--recipe", f"{recipe}:recipe", "--run-dir", str(self.run_dir)]
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self._said = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, os.ttyname(theirs), *command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=role_environment(),
            start_new_session=True,
        )
        os.close(theirs)
        self._is_closed = False

    def goes_on(self, for_s: float) -> bool:
        """Wait so long, and read what it says, or it would have to wait; False: it has ended."""
        deadline_s, pause = time.monotonic() + for_s, threading.Event()
        while (left_s := deadline_s - time.monotonic()) > 0 and self.process.poll() is None:
            self._listen()
            pause.wait(min(0.01, left_s))
        return self.process.poll() is None

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # nothing new, or it is over
            while not self._is_closed and (said := os.read(self._ours, 1 << 16)):
                self._said += said

    def text(self) -> str:
        return self._said.decode(errors="replace")

    def end(self, way: str) -> None:
        if way == CLOSED:
            self._is_closed = True
            os.close(self._ours)
        else:
            self.process.send_signal(signal.Signals[way])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if not self._is_closed:
            os.close(self._ours)

    def num_steps(self) -> int:
        return sum(e["kind"] == "step" for e in read_events(self.run_dir / "events", "worker-*"))


def end_run(seed: int) -> Trial:
    draw = random.Random(f"row 24, {seed}")
    way, is_early = WAYS[seed % len(WAYS)], draw.random() < 0.25
    discipline = draw.choice(["sync", "apply-reply", "lock-free", "buffer"])
    flags = ["--discipline", discipline, "--servers", draw.choice("12"), "--steps", "100000"]
    flags += ["--checkpoint-every", "100000"]
    flags += ["--workers", draw.choice("23"), "--threads", "1", "--device", "cpu"]
    flags += ["--rule", "sum"] if discipline in ("sync", "buffer") else []
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-faults-", ignore_cleanup_errors=True) as folder,
        contextlib.closing(OnTerminal(Path(folder), *flags)) as run,
    ):
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not is_early and run.goes_on(0.05) and not run.num_steps():
            if time.monotonic() > deadline_s:
                return Trial(("no step was done",))
        run.goes_on(draw.uniform(0.0, 4.0 if is_early else 1.5))
        has_begun = run.num_steps() > 0
        began_s = time.monotonic()
        run.end(way)
        has_ended = not run.goes_on(LIMIT_S)
        took_s = time.monotonic() - began_s
        violations = list(_about_end(run, has_ended, has_begun))
        when = f"{way}, {'before' if not has_begun else 'after'} the first step ({discipline})"
        return Trial(tuple(f"{when}: {what}" for what in violations), recovery_s=took_s)


def _about_end(run: OnTerminal, has_ended: bool, has_begun: bool) -> Iterator[str]:
    code = run.process.poll()
    if not has_ended:
        yield f"it does not end within {LIMIT_S:g} s: {run.text()[-300:]!r}"
        return
    if has_begun and code != INTERRUPTED:
        yield f"it ended with {code}: {run.text()[-300:]!r}"
    if left := _left_behind(run.run_dir):
        yield f"left behind: {left}"
    if has_begun or list_checkpoints(run.run_dir / "checkpoints"):
        yield from _about_kept(run.run_dir, has_begun)


def _left_behind(run_dir: Path, within_s: float = 10.0) -> list[str]:
    """Who was started in the last moment needs one to see that nobody is there any more."""
    deadline_s, pause = time.monotonic() + within_s, threading.Event()
    while (left := leftovers(run_dir)) and time.monotonic() < deadline_s:
        pause.wait(0.1)
    return left


def _about_kept(run_dir: Path, has_begun: bool) -> Iterator[str]:
    """The last checkpoint has what its accounts say, and something."""
    try:
        kept = newest_checkpoint(run_dir / "checkpoints")
    except CheckpointError as error:
        yield str(error)
        return
    if has_begun and not kept.version:
        yield "what was learned is not in a checkpoint"
    is_locked = "lock-free" not in (run_dir / "config.json").read_text()
    for index, shard in enumerate(kept.shards):
        applied = sum(account.applied for account in shard.accounts.values())
        counts = {-int(value) for value in shard.tensors["params"]}
        if is_locked and counts != {applied}:
            yield f"shard {index}: {counts} are in, {applied} in the books"


ROWS = (
    Row(
        24,
        "SIGTERM, Ctrl-C, terminal closed",
        "checkpoint, exit within the limit, no orphan, nothing in /dev/shm",
        200,
        1,
        end_run,
        protections("a last checkpoint"),
    ),
)
