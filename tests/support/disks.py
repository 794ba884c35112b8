"""Disks for journals: slow ones, failing ones, and one that loses what was not synced; and pictures
of runs, as they are when everything is killed."""

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offbeat.run.journal import Disk, File

TIMEOUT_S = 20.0


def taking_a_picture(
    loss: Callable[[Any, Any], Any], run_dir: Path, left: Path, at: int = 70
) -> Callable[[Any, Any], Any]:
    """A loss that, when it is asked for the `at`-th time, copies to `left` what its run has on the
    disk: what is left of it when everybody is killed then."""
    count = itertools.count()

    def found(model: Any, batch: Any) -> Any:
        if next(count) == at:
            for part in ("events", "checkpoints", "journal"):
                shutil.copytree(run_dir / part, left / part)
            shutil.copy(run_dir / "config.json", left)
            (left / "logs").mkdir()
        return loss(model, batch)

    return found


class SlowDisk(Disk):
    """One whose syncs wait until they may go on, and are counted."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.num_synced = 0

    def create(self, path: Path) -> File:
        return _Wrapped(super().create(path), self.sync)

    def sync(self, sync: Callable[[], None]) -> None:
        assert self.goes_on.wait(TIMEOUT_S)
        self.num_synced += 1
        sync()


class FailingDisk(Disk):
    """One whose next so many syncs or writes fail, after they have left half of it there."""

    def __init__(self, code: int, syncs: int = 0, writes: int = 0) -> None:
        self.code = code
        self.left = {"sync": syncs, "write": writes}

    def create(self, path: Path) -> File:
        return _Wrapped(super().create(path), self.sync, self.write)

    def sync(self, sync: Callable[[], None]) -> None:
        self._fail("sync")
        sync()

    def write(self, write: Callable[[Sequence[memoryview]], None], parts: Any) -> None:
        if self.left["write"] > 0:
            write(parts[: len(parts) // 2])
            self._fail("write")
        write(parts)

    def _fail(self, what: str) -> None:
        if self.left[what] > 0:
            self.left[what] -= 1
            raise OSError(self.code, os.strerror(self.code))


class _Wrapped(File):
    def __init__(
        self,
        file: File,
        sync: Callable[[Callable[[], None]], None],
        write: Callable[[Any, Any], None] = lambda write, parts: write(parts),
    ) -> None:
        self._file = file
        self._sync = sync
        self._write = write

    def write(self, parts: Sequence[memoryview]) -> None:
        self._write(self._file.write, parts)

    def sync(self) -> None:
        self._sync(self._file.sync)

    def close(self) -> None:
        self._file.close()


class Forgetful(Disk):
    """What is written and not synced is lost when the machine goes down: it is not there before."""

    def __init__(self, *, syncs: bool = True) -> None:
        self.syncs = syncs

    def create(self, path: Path) -> File:
        return _ForgetfulFile(super().create(path), syncs=self.syncs)


class _ForgetfulFile(File):
    def __init__(self, file: File, *, syncs: bool) -> None:
        self._file = file
        self._syncs = syncs
        self._held: list[bytes] = []

    def write(self, parts: Sequence[memoryview]) -> None:
        self._held += [bytes(part) for part in parts]

    def sync(self) -> None:
        if self._syncs:
            self._file.write([memoryview(part) for part in self._held])
            self._held.clear()

    def close(self) -> None:
        self._file.close()
