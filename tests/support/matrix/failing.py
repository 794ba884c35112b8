"""A disk that fails as the master saves checkpoints. Imported by the recipe of a run: it does so in
the master's process alone, for a while.

    fail("full", 40, 90)        # checkpoints of these versions
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matrix.protections import role_here
from offbeat.roles import master
from offbeat.run import checkpoint

WAYS = ("full", "write", "fsync", "folder", "mkdir", "rename")
CODES = {"full": errno.ENOSPC, "mkdir": errno.ENOSPC}
WORDS = {way: os.strerror(CODES.get(way, errno.EIO)) for way in WAYS}


def fail(way: str, first: int, last: int) -> None:
    if role_here() == "master":
        _Disk(way, range(first, last + 1)).put_in()


class _Disk:
    def __init__(self, way: str, when: range) -> None:
        self._way = way
        self._when = when
        self._fails = False

    def put_in(self) -> None:
        """Under what saves checkpoints, and nothing else."""
        save, plain = master.save_checkpoint, {"open": Path.open, "mkdir": Path.mkdir}
        rename = Path.rename
        disk = self

        def saving(folder: Path, found: checkpoint.Checkpoint) -> Path:
            with disk._saving(found.version):
                return save(folder, found)

        def opened(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
            file = plain["open"](path, mode, *given, **named)
            return _Half(file, disk) if disk._is_due(mode, path) else file

        def made(path: Path, *given: Any, **named: Any) -> None:
            disk._check("mkdir", path)
            plain["mkdir"](path, *given, **named)

        def renamed(path: Path, target: Path) -> Path:
            disk._check("rename", path)
            return rename(path, target)

        master.save_checkpoint = saving
        checkpoint.os = _System(disk)
        Path.open, Path.mkdir, Path.rename = opened, made, renamed

    @contextlib.contextmanager
    def _saving(self, version: int) -> Iterator[None]:
        self._fails = version in self._when
        try:
            yield
        finally:
            self._fails = False

    def fails(self, way: str) -> bool:
        return self._fails and way == self._way

    def raise_error(self) -> None:
        code = CODES.get(self._way, errno.EIO)
        raise OSError(code, os.strerror(code))

    def _check(self, way: str, path: Path) -> None:
        if self.fails(way) and path.name.endswith(".tmp"):
            self.raise_error()

    def _is_due(self, mode: str, path: Path) -> bool:
        return mode == "wb" and self._fails and path.parent.name.endswith(".tmp")


class _Half:
    """A file of which half is written."""

    def __init__(self, file: Any, disk: _Disk) -> None:
        self._file = file
        self._disk = disk

    def __enter__(self) -> "_Half":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, raw: bytes) -> None:
        if self._disk.fails("full") or self._disk.fails("write"):
            self._file.write(raw[: len(raw) // 2])
            self._disk.raise_error()
        self._file.write(raw)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())


class _System:
    """The module `os`, whose fsync may fail; then what was written is gone."""

    def __init__(self, disk: _Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if self._disk.fails("folder" if is_folder else "fsync"):
            if not is_folder:
                os.ftruncate(descriptor, 0)
            self._disk.raise_error()
        os.fsync(descriptor)
