"""A disk, and the files that the program has in its memory and not yet there.

What was written is there for every process at once; what is on the disk itself is what was brought
there with fsync: of a file its bytes, of a folder which names are in it. When the power fails a
file that was not brought there is as it was, empty, cut off or full of zeros, and of the changes to
a folder's names the first few were made. `Place` stands where the program expects a path.

    disk = Disk(world)
    folder = Place(disk, "/run")
    disk.lose_power()
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from types import SimpleNamespace, TracebackType
from typing import Self

from simulated.tasks import World

OPERATION_S = 0.0005
"""How long a disk takes for one."""


@dataclass(eq=False)
class File:
    content: bytes = b""
    on_disk: bytes = b""
    is_synced: bool = True
    pages: int = 0


@dataclass(eq=False)
class Folder:
    names: dict[str, "File | Folder"] = field(default_factory=dict)
    on_disk: dict[str, "File | Folder"] = field(default_factory=dict)
    changes: list[Callable[[dict[str, "File | Folder"]], None]] = field(default_factory=list)
    """To the names, since the last fsync."""

    def change(self, what: Callable[[dict[str, "File | Folder"]], None]) -> None:
        what(self.names)
        self.changes.append(what)

    def sync(self) -> None:
        self.on_disk = dict(self.names)
        self.changes.clear()


class Disk:
    def __init__(self, world: World) -> None:
        self.world = world
        self.root = Folder()
        self.fails = 0.0
        """How likely it is that what is asked of it fails."""
        self.has_failed = False
        self._opened: dict[int, File | Folder] = {}
        self._count = 2

    def work(self, what: str, *, may_fail: bool = True) -> None:
        """Whoever asks for something may die before it is done."""
        world = self.world
        world.check()
        if world._current is None:
            return
        world.pause(OPERATION_S * world.draw.random())
        world.check()
        if may_fail and self.fails and world.draw.random() < self.fails:
            self.has_failed = True
            raise OSError(28, f"no space left for {what}")

    def find(self, parts: tuple[str, ...]) -> "File | Folder | None":
        at: File | Folder | None = self.root
        for part in parts:
            if not isinstance(at, Folder):
                return None
            at = at.names.get(part)
        return at

    def folder(self, parts: tuple[str, ...]) -> Folder:
        found = self.find(parts)
        if not isinstance(found, Folder):
            raise FileNotFoundError(2, f"no such folder: /{'/'.join(parts)}")
        return found

    # -- as the module os has it ---------------------------------------------------------------

    def open(self, place: "Place", flags: int = 0) -> int:
        found = self.find(place.parts)
        if found is None:
            raise FileNotFoundError(2, f"no such file: {place}")
        return self.hold(found)

    def hold(self, what: "File | Folder") -> int:
        self._count += 1
        self._opened[self._count] = what
        return self._count

    def let_go(self, descriptor: int) -> None:
        del self._opened[descriptor]

    def fsync(self, descriptor: int) -> None:
        self.work("fsync")
        found = self._opened[descriptor]
        if isinstance(found, Folder):
            found.sync()
        else:
            found.on_disk, found.is_synced = found.content, True

    # -- what befalls it -----------------------------------------------------------------------

    def lose_power(self) -> None:
        """Only what is on the disk is left, and as much of the rest as chance has it."""
        self._opened.clear()
        self._after(self.root, {})

    def _after(self, folder: Folder, seen: dict[int, bool]) -> None:
        if seen.setdefault(id(folder), False):
            return
        seen[id(folder)] = True
        for change in folder.changes[: self.world.draw.randint(0, len(folder.changes))]:
            change(folder.on_disk)
        folder.names = dict(folder.on_disk)
        folder.changes.clear()
        for inside in folder.names.values():
            if isinstance(inside, Folder):
                self._after(inside, seen)
            elif not inside.is_synced:
                self._tear(inside)

    def _tear(self, file: File) -> None:
        whole, draw = file.content, self.world.draw
        cut = whole[: draw.randint(0, len(whole))]
        found = [whole, cut, cut + bytes(len(whole) - len(cut)), bytes(len(whole)), file.on_disk]
        file.content = file.on_disk = draw.choice([*found, b""])
        file.is_synced = True


class Place:
    """A path, as much of one as the program asks for."""

    def __init__(self, disk: Disk, *parts: str) -> None:
        self._disk = disk
        self.parts = parts

    def __truediv__(self, name: "str | Place") -> "Place":
        return Place(self._disk, *self.parts, str(name))

    def __str__(self) -> str:
        return f"/{'/'.join(self.parts)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    @property
    def name(self) -> str:
        return self.parts[-1]

    @property
    def _parent(self) -> Folder:
        return self._disk.folder(self.parts[:-1])

    def with_name(self, name: str) -> "Place":
        return Place(self._disk, *self.parts[:-1], name)

    def exists(self) -> bool:
        return self._disk.find(self.parts) is not None

    def is_dir(self) -> bool:
        return isinstance(self._disk.find(self.parts), Folder)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        self._disk.work(f"mkdir {self}")
        if self.exists():
            if exist_ok:
                return
            raise FileExistsError(17, f"{self} is there")
        if parents and len(self.parts) > 1:
            Place(self._disk, *self.parts[:-1]).mkdir(parents=True, exist_ok=True)
        made, name = Folder(), self.name
        self._parent.change(lambda names: names.__setitem__(name, made))

    def open(self, mode: str = "rb") -> "Writing":
        assert mode == "wb", "the program opens files to write bytes"
        self._disk.work(f"open {self}")
        found = self._disk.find(self.parts)
        if not isinstance(found, File):
            made, name = File(), self.name
            self._parent.change(lambda names: names.__setitem__(name, made))
            found = made
        return Writing(self._disk, found)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        with self.open("wb") as file:
            file.write(text.encode(encoding))

    def read_bytes(self) -> bytes:
        self._disk.work(f"read {self}", may_fail=False)
        found = self._disk.find(self.parts)
        if not isinstance(found, File):
            raise FileNotFoundError(2, f"no such file: {self}")
        return found.content

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def rename(self, target: "Place") -> "Place":
        """Both are in one folder."""
        self._disk.work(f"rename {self}")
        folder, name, new = self._parent, self.name, target.name
        moved = folder.names[name]

        def move(names: dict[str, File | Folder]) -> None:
            names.pop(name, None)
            names[new] = moved

        folder.change(move)
        return target

    replace = rename

    def unlink(self, missing_ok: bool = False) -> None:
        self._disk.work(f"unlink {self}", may_fail=False)
        name = self.name
        if name in self._parent.names:
            self._parent.change(lambda names: names.pop(name, None) and None)
        elif not missing_ok:
            raise FileNotFoundError(2, f"no such file: {self}")

    def glob(self, pattern: str) -> Iterator["Place"]:
        found = self._disk.find(self.parts)
        if isinstance(found, Folder):
            yield from [self / name for name in found.names if fnmatch(name, pattern)]


class Writing:
    """A file that is open."""

    def __init__(self, disk: Disk, file: File) -> None:
        self._disk = disk
        self._file = file
        self._descriptor = disk.hold(file)
        file.content, file.is_synced = b"", False

    def write(self, raw: bytes) -> None:
        self._disk.work("write")
        self._file.content += raw
        self._file.is_synced = False

    def flush(self) -> None:
        return

    def fileno(self) -> int:
        return self._descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._disk._opened.pop(self._descriptor, None)


def os_of(disk: Disk) -> SimpleNamespace:
    """What modules find in the place of os."""
    return SimpleNamespace(
        O_RDONLY=0,
        getpid=lambda: 1,
        open=disk.open,
        close=disk.let_go,
        fsync=disk.fsync,
    )


def shutil_of(disk: Disk) -> SimpleNamespace:
    def rmtree(place: Place, ignore_errors: bool = False) -> None:
        """Name by name, as it is done."""
        found = disk.find(place.parts)
        if isinstance(found, Folder):
            for name in list(found.names):
                (place / name).unlink()
        place.unlink(missing_ok=True)

    return SimpleNamespace(rmtree=rmtree)
