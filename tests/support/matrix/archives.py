"""Row 21: archives that want to write elsewhere, or to be larger than they are, and data files that
are not what they should be; and checkpoints that lie (checkpoints.py)."""

import contextlib
import gzip
import hashlib
import io
import random
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

from offbeat.data import catalog, files
from offbeat.data.catalog import DataFile, Dataset
from offbeat.data.datasets import load_dataset
from offbeat.data.fetch import get
from offbeat.errors import DataError

from . import switched_off
from .desks import a_folder
from .forged import checkpoints_that_lie
from .row import Row, Trial

CONTENT = {
    "train-images-idx3-ubyte": bytes(range(256)) * 200,
    "train-labels-idx1-ubyte": b"labels" * 100,
}
MOST_BYTES = 12 << 20
"""Of memory, to find out that a small file says that it is a large one."""
LYING_CHECKPOINTS = 12
"""Beside each case."""


@contextlib.contextmanager
def known(content: Mapping[str, bytes] = CONTENT) -> Iterator[Dataset]:
    """A dataset of two small files."""
    described = tuple(
        DataFile(name=name, size=len(body), sha256=hashlib.sha256(body).hexdigest())
        for name, body in content.items()
    )
    dataset = Dataset(name="tiny", about="", folder="tiny", files=described, hosts=())
    with mock.patch.dict(catalog.DATASETS, {"tiny": dataset}):
        yield dataset


# -- archives --------------------------------------------------------------------------------------


def tar_of(members: Mapping[str, bytes], mode: str = "w:gz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:  # type: ignore[call-overload]
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return packed.getvalue()


def zip_of(members: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return packed.getvalue()


def _tar_with(kind: bytes, link: str = "/etc/passwd", name: str = "") -> bytes:
    """Members that are no plain files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for each in CONTENT:
            info = tarfile.TarInfo(name or each)
            info.type, info.linkname = kind, link
            tar.addfile(info)
    return packed.getvalue()


def _sized(size: int) -> bytes:
    """A member that says it is so large, and has a few bytes."""
    info = tarfile.TarInfo("train-images-idx3-ubyte")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(2048)


def _sparse(size: int) -> bytes:
    """A GNU sparse file: a hole of that size, for which nothing stands in the archive."""
    info = tarfile.TarInfo("train-images-idx3-ubyte")
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[156:157] = b"S"
    raw[386:398], raw[398:410] = b"%011o\0" % (size - 1), b"%011o\0" % 1
    raw[483:495] = b"%011o\0" % size
    raw[124:136] = b"%011o\0" % 1
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    return bytes(raw) + b"x" + bytes(511 + 1024)


def _pax(**fields: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, body in CONTENT.items():
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(body), dict(fields)
            tar.addfile(info, io.BytesIO(body))
    return packed.getvalue()


def _patched_zip(at: bytes, offset: int, value: bytes) -> bytes:
    """With other bytes at a place behind every header that begins like this."""
    raw = bytearray(zip_of(CONTENT))
    place = raw.find(at)
    while place >= 0:
        raw[place + offset : place + offset + len(value)] = value
        place = raw.find(at, place + 1)
    return bytes(raw)


_LOCAL, _CENTRAL = b"PK\3\4", b"PK\1\2"
_BOMB = bytes(40 << 20)
EVIL = {"../evil": b"evil", "/tmp/offbeat-evil": b"evil", "a/../../evil": b"evil"}


def _flipped(packed: bytes) -> bytes:
    """With a bit in its midst that is another one."""
    raw = bytearray(packed)
    raw[len(raw) // 2] ^= 1
    return bytes(raw)


def _elsewhere(pack: Callable[[Mapping[str, bytes]], bytes]) -> bytes:
    return pack({**{f"../../{name}": body for name, body in CONTENT.items()}, **EVIL})


def _two_of_a_name() -> bytes:
    """The right one first, which counts."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for body in (None, b"other"):
            for name, right in CONTENT.items():
                info = tarfile.TarInfo(f"{len(body or b'')}/{name}")
                info.size = len(right if body is None else body)
                tar.addfile(info, io.BytesIO(right if body is None else body))
    return packed.getvalue()


def _gzipped(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


ACCEPTED = {
    "tar with ..": lambda: _elsewhere(tar_of),
    "zip with ..": lambda: _elsewhere(zip_of),
    "absolute names": lambda: tar_of({f"/tmp/{name}": body for name, body in CONTENT.items()}),
    "two of a name": _two_of_a_name,
}
"""Their files are the right ones: they are written where they belong, and nothing else is."""
REFUSED: dict[str, Callable[[], bytes]] = {
    "symlink": lambda: _tar_with(tarfile.SYMTYPE),
    "symlink to a folder": lambda: _tar_with(tarfile.SYMTYPE, "/tmp"),
    "hard link": lambda: _tar_with(tarfile.LNKTYPE),
    "link to itself": lambda: _tar_with(tarfile.LNKTYPE, "train-images-idx3-ubyte"),
    "fifo": lambda: _tar_with(tarfile.FIFOTYPE),
    "device": lambda: _tar_with(tarfile.CHRTYPE),
    "folder of that name": lambda: _tar_with(tarfile.DIRTYPE),
    "unknown kind": lambda: _tar_with(b"Z"),
    "member of 8 GB": lambda: _sized(8 << 30),
    "member of 8 EB": lambda: _sized(8 << 60),
    "negative member": lambda: _sized(-(1 << 40)),
    "sparse file of 8 GB": lambda: _sparse((8 << 30) - 1),
    "pax size": lambda: _pax(size="99999999999999999999"),
    "pax size that is none": lambda: _pax(size="many"),
    "pax path": lambda: _pax(path="/etc/passwd"),
    "pax sparse": lambda: _pax(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
    "pax sparse map": lambda: _pax(**{"GNU.sparse.map": "0,x"}),
    "other content": lambda: tar_of({name: body[:-1] + b"?" for name, body in CONTENT.items()}),
    "short": lambda: tar_of({name: body[:-1] for name, body in CONTENT.items()}),
    "long": lambda: tar_of({name: body + b"x" for name, body in CONTENT.items()}),
    "tar bomb": lambda: tar_of(dict.fromkeys(CONTENT, _BOMB)),
    "zip bomb": lambda: zip_of(dict.fromkeys(CONTENT, _BOMB)),
    "gz bomb in a tar": lambda: tar_of(
        dict.fromkeys([f"{n}.gz" for n in CONTENT], _gzipped(_BOMB))
    ),
    "gz that is none": lambda: tar_of({f"{name}.gz": b"no gzip" for name in CONTENT}),
    "gz with more behind it": lambda: tar_of(
        {f"{name}.gz": _gzipped(body) + b"more" for name, body in CONTENT.items()}
    ),
    "gz that is cut": lambda: tar_of({f"{n}.gz": _gzipped(b)[:-9] for n, b in CONTENT.items()}),
    "cut tar": lambda: tar_of(CONTENT)[:-40],
    "cut in a member": lambda: tar_of(CONTENT, "w")[:3000],
    "cut xz": lambda: tar_of(CONTENT, "w:xz")[:-60],
    "flipped xz": lambda: _flipped(tar_of(CONTENT, "w:xz")),
    "cut bz2": lambda: tar_of(CONTENT, "w:bz2")[:-60],
    "flipped bz2": lambda: _flipped(tar_of(CONTENT, "w:bz2")),
    "flipped gz": lambda: _flipped(tar_of(CONTENT)),
    "cut zip": lambda: zip_of(CONTENT)[:-30],
    "empty": bytes,
    "zeros": lambda: bytes(10240),
    "encrypted zip": lambda: _patched_zip(_CENTRAL, 8, b"\1\0"),
    "zip of an unknown method": lambda: _patched_zip(_CENTRAL, 10, b"\x63\0"),
    "zip whose check fails": lambda: _patched_zip(_CENTRAL, 16, b"\0\0\0\0"),
    "zip whose sizes lie": lambda: _patched_zip(_CENTRAL, 20, b"\1\0\0\0\1\0\0\0"),
    "zip whose places lie": lambda: _patched_zip(_CENTRAL, 42, b"\xff\xff\xff\x7f"),
    "zip without members": lambda: _patched_zip(_LOCAL, 0, b"XX"),
    "name with a newline": lambda: tar_of({f"{name}\nx": body for name, body in CONTENT.items()}),
}


def _take(packed: bytes, is_accepted: bool) -> Iterator[str]:
    with a_folder() as folder, known() as dataset:
        (folder / "in").mkdir()
        source = folder / "in" / "source"
        source.write_bytes(packed)
        data = folder / "a" / "b"
        try:
            with memory_of() as peak:
                get("tiny", data, source=source)
            if not is_accepted:
                yield "it was taken"
        except DataError as error:
            if is_accepted:
                yield f"refused: {error}"
            if "\n" in str(error):
                yield f"more than a line: {str(error)!r}"
        except Exception as error:
            yield f"raised {error!r}"
        if peak[0] > MOST_BYTES:
            yield f"{peak[0]} bytes were allocated"
        there = {path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}
        right = {data / dataset.folder / name for name in CONTENT}
        if there - {source, *right} or (is_accepted and not right <= there):
            yield f"written: {sorted(map(str, there - {source}))}"
        for path in there & right:  # what came before what is wrong may stay
            if path.read_bytes() != CONTENT[path.name]:
                yield f"{path.name} holds something else"
        if Path("/tmp/offbeat-evil").exists():
            yield "written outside of everything"


@contextlib.contextmanager
def memory_of() -> Iterator[list[int]]:
    """The most that Python allocated meanwhile."""
    peak = [0]
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak[0] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


# -- data files ------------------------------------------------------------------------------------


def idx_of(shape: list[int], body: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


GOOD = idx_of([2, 28, 28], bytes(2 * 784))
BAD_IDX: dict[str, bytes] = {
    "short": GOOD[:-1],
    "long": GOOD + b"x",
    "cut in its head": GOOD[:9],
    "empty": b"",
    "other magic": b"PK\3\4" + GOOD[4:],
    "of floats": bytes([0, 0, 13, 3]) + GOOD[4:],
    "of two dimensions": idx_of([2, 784], bytes(2 * 784)),
    "of 64 GB": idx_of([2**32 - 1, 28, 28], b""),
    "overflowing": idx_of([2**32 - 1] * 3, bytes(100)),
    "that wraps to something small": idx_of([2**31, 2**31, 4], bytes(100)),
    "of 2 GB that are not there": idx_of([2**31 // 784, 28, 28], bytes(784)),
    "of nothing": idx_of([0, 28, 28], b""),
    "of other images": idx_of([2, 32, 32], bytes(2048)),
    "of other many": idx_of([3, 28, 28], bytes(3 * 784)),
}


def _read_idx(raw: bytes, *, zipped: bool, labels: bytes = b"\0\1") -> Iterator[str]:
    with a_folder() as folder:
        place = folder / "mnist"
        place.mkdir()
        for part in ("train", "t10k"):
            (place / f"{part}-labels-idx1-ubyte").write_bytes(idx_of([2], labels))
            (place / f"{part}-images-idx3-ubyte").write_bytes(GOOD)
        name = "train-images-idx3-ubyte"
        (place / name).unlink()
        name += ".gz" if zipped else ""
        (place / name).write_bytes(_gzipped(raw) if zipped else raw)
        yield from _is_refused("mnist", folder, "train-")


def _read_cifar(name: str, raw: bytes) -> Iterator[str]:
    kind, where = (
        ("cifar10", "cifar-10-batches-bin") if "_" in name else ("cifar100", "cifar-100-binary")
    )
    with a_folder() as folder, mock.patch.object(files, "CIFAR_RECORDS_PER_FILE", 2):
        (folder / where).mkdir()
        good = {f"data_batch_{n}.bin": bytes(2 * 3073) for n in range(1, 6)}
        good |= {"test_batch.bin": bytes(2 * 3073), "test.bin": bytes(2 * 3074)}
        for each, body in {**good, "train.bin": bytes(10 * 3074), name: raw}.items():
            (folder / where / each).write_bytes(body)
        yield from _is_refused(kind, folder, name)


def _is_refused(kind: str, folder: Path, name: str) -> Iterator[str]:
    with memory_of() as peak:
        try:
            load_dataset(kind, folder)
            yield "it was read"
        except DataError as error:
            if name not in str(error) or "\n" in str(error):
                yield f"that says nothing: {str(error)!r}"
        except Exception as error:
            yield f"raised {error!r}"
    if peak[0] > MOST_BYTES:
        yield f"{peak[0]} bytes were allocated"


BAD_CIFAR: dict[str, tuple[str, bytes]] = {
    "short": ("data_batch_3.bin", bytes(3073)),
    "long": ("test_batch.bin", bytes(2 * 3073 + 1)),
    "label": ("data_batch_1.bin", b"\x0a" + bytes(2 * 3073 - 1)),
    "fine label": ("train.bin", b"\0\x64" + bytes(10 * 3074 - 2)),
    "empty": ("test.bin", b""),
}


def cases() -> dict[str, Callable[[], Iterator[str]]]:
    made: dict[str, Callable[[], Iterator[str]]] = {}
    made["idx: label"] = lambda: _read_idx(GOOD, zipped=False, labels=b"\0\x0a")
    for keep in (0, 5, 20, -5):
        cut = _gzipped(GOOD)[:keep]
        made[f"idx.gz: cut at {keep}"] = lambda cut=cut: _read_raw_gz(cut)  # type: ignore[misc]
    for name, (file, raw) in BAD_CIFAR.items():
        made[f"cifar: {name}"] = lambda file=file, raw=raw: _read_cifar(file, raw)  # type: ignore[misc]
    for name, pack in ACCEPTED.items():
        made[f"archive: {name}"] = lambda pack=pack: _take(pack(), True)  # type: ignore[misc]
    for name, pack in REFUSED.items():
        made[f"archive: {name}"] = lambda pack=pack: _take(pack(), False)  # type: ignore[misc]
    for name, raw in BAD_IDX.items():
        for zipped in (False, True):
            made[f"idx{'.gz' if zipped else ''}: {name}"] = (
                lambda raw=raw, zipped=zipped: _read_idx(raw, zipped=zipped)  # type: ignore[misc]
            )
    return made


def _read_raw_gz(raw: bytes) -> Iterator[str]:
    with a_folder() as folder:
        (folder / "mnist").mkdir()
        (folder / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(raw)
        (folder / "mnist" / "train-labels-idx1-ubyte").write_bytes(idx_of([2], b"\0\1"))
        yield from _is_refused("mnist", folder, "train-images")


CASES = cases()


def files_trial(seed: int) -> Trial:
    name = list(CASES)[seed % len(CASES)]
    found = [f"{name}: {line}" for line in CASES[name]()]
    with a_folder() as folder:
        found += checkpoints_that_lie(folder, random.Random(seed), LYING_CHECKPOINTS)
    return Trial(tuple(found), counted=1 + LYING_CHECKPOINTS)


FILES = Row(
    21,
    "archives with .., absolute names, links, huge members; wrong hashes; bad idx and CIFAR files; "
    "checkpoints that lie and have the right digests",
    "refused in a line; nothing written elsewhere; no memory for what is not there",
    10_000,
    20 * (1 + LYING_CHECKPOINTS),
    files_trial,
    {"digest of data": switched_off.DATA_DIGEST, "labels": switched_off.LABELS},
)
