"""Row 20: programs where data are expected: nobody runs them.

A canary is a pickle that makes a folder when it is loaded, and a line of Python that does when it
is evaluated. It is put wherever something is read of what may have come from somebody else.
"""

import contextlib
import json
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checkpoints import small_model

from offbeat.config import make_config
from offbeat.data.datasets import load_dataset
from offbeat.data.fetch import get
from offbeat.errors import OffbeatError
from offbeat.run.checkpoint import newest_checkpoint, read_weights
from offbeat.run.events import read_events
from offbeat.run.initial import read_initial
from offbeat.transport.wire import ANSWER, CALL, HELLO, PUSH, Connection, json_frame, pack

from .archives import CONTENT, known, tar_of, zip_of
from .desks import Desk, Tape, a_folder, call_of, hello_of
from .forged import a_checkpoint, signed
from .row import Row, Trial


class Canary:
    """Its pickle makes a folder."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.mkdir, (self.where,))

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(self)

    @property
    def line(self) -> str:
        return f"__import__('pathlib').Path({str(self.where)!r}).mkdir()"

    @property
    def is_alive(self) -> bool:
        return not self.where.exists()


Place = Callable[[Path, Canary], object]


def _hear(*frames: bytes) -> None:
    desk = Desk("apply-reply")
    with contextlib.closing(desk):
        desk.hear(frames)
        if desk.server.failure is not None:
            raise desk.server.failure


def _in_hellos(folder: Path, canary: Canary) -> None:
    _hear(pack(HELLO, length=len(canary.pickled)) + canary.pickled)
    said = {"worker": 0, "incarnation": 0, "fingerprint": "same", "model": [], "shard": 0}
    for name in said:
        _hear(b"".join(json_frame(HELLO, {**said, name: canary.line})))


def _in_pushes(folder: Path, canary: Canary) -> None:
    _hear(hello_of(0), pack(PUSH, length=len(canary.pickled)) + canary.pickled)


def _in_calls(folder: Path, canary: Canary) -> None:
    hello = hello_of(0, calls=True)
    _hear(hello, pack(CALL, length=len(canary.pickled)) + canary.pickled)
    _hear(hello, call_of({"ask": canary.line}))
    for said in ({"ask": "want", "version": canary.line}, {"ask": "finish", "reason": canary.line}):
        _hear(hello, call_of(said))
    for table in ([[canary.line, "float32", [1]]], [["a", canary.line, [1]]], [["a", "load", [1]]]):
        raw = json.dumps({"message": {"ask": "status"}, "tensors": table}).encode()
        _hear(hello, pack(CALL, length=len(raw)) + raw + canary.pickled)


def _in_answers(folder: Path, canary: Canary) -> None:
    raw = canary.pickled
    connection = Connection(Tape([pack(ANSWER, length=len(raw)) + raw]))
    frame = connection.receive(1.0)
    assert frame is not None
    connection.read_json(frame.length)


def _in_checkpoints(folder: Path, canary: Canary) -> None:
    names = ("manifest.json", "shard-0.safetensors", "frozen.safetensors")
    for number, name in enumerate(names):
        for form in (canary.pickled, _saved_by_torch(canary), canary.line.encode()):
            own = folder / f"{number}-{len(form)}"
            path = a_checkpoint(own)
            (path / name).write_bytes(form)
            signed(path)
            with contextlib.suppress(OffbeatError):
                newest_checkpoint(own)
    _in_manifests(folder, canary)


def _in_manifests(folder: Path, canary: Canary) -> None:
    """Wherever there is a text."""
    path = a_checkpoint(folder / "texts")
    text = (path / "manifest.json").read_text()
    for word in ('"float32"', '"2.weight"', "null"):
        (path / "manifest.json").write_text(text.replace(word, json.dumps(canary.line)))
        signed(path)
        with contextlib.suppress(OffbeatError):
            newest_checkpoint(path.parent).state_dict()


def _saved_by_torch(canary: Canary) -> bytes:
    with tempfile.TemporaryFile() as file:
        torch.save({"0.weight": canary}, file)
        file.seek(0)
        return file.read()


def _in_weights(folder: Path, canary: Canary) -> None:
    for number, form in enumerate((canary.pickled, _saved_by_torch(canary))):
        for name in ("weights.safetensors", "model.pt", "model.pkl"):
            path = folder / f"{number}-{name}"
            path.write_bytes(form)
            with contextlib.suppress(OffbeatError):
                read_initial(path, small_model())
            with contextlib.suppress(OffbeatError):
                read_weights(path)


def _in_datasets(folder: Path, canary: Canary) -> None:
    names = {
        "mnist": [f"{part}-{kind}" for part in ("train", "t10k") for kind in _KINDS],
        "cifar-10-batches-bin": [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"],
        "cifar-100-binary": ["train.bin", "test.bin"],
    }
    for form in (canary.pickled, _saved_by_torch(canary), canary.line.encode()):
        for kind, files in names.items():
            (folder / kind).mkdir(exist_ok=True)
            for name in files:
                (folder / kind / name).write_bytes(form)
        for dataset in ("mnist", "cifar10", "cifar100"):
            with contextlib.suppress(OffbeatError):
                load_dataset(dataset, folder)


_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def _in_archives(folder: Path, canary: Canary) -> None:
    members = dict.fromkeys(CONTENT, canary.pickled)
    members |= {"__init__.py": canary.line.encode(), "data.pkl": canary.pickled}
    for number, packed in enumerate((tar_of(members), zip_of(members), canary.pickled)):
        source = folder / f"source-{number}"
        source.write_bytes(packed)
        with known(), contextlib.suppress(OffbeatError):
            get("tiny", folder / "data", source=source)


def _in_events(folder: Path, canary: Canary) -> None:
    (folder / "ps-0.jsonl").write_bytes(canary.pickled + b"\n" + canary.line.encode() + b"\n")
    (folder / "ps-1.jsonl.gz").write_bytes(canary.pickled)
    list(read_events(folder))


def _in_options(folder: Path, canary: Canary) -> None:
    for name in ("discipline", "rule", "compress", "optimizer", "lr"):
        with contextlib.suppress(OffbeatError):
            make_config({name: canary.line})


PLACES: tuple[Place, ...] = (
    *(_in_hellos, _in_pushes, _in_calls, _in_answers, _in_checkpoints, _in_weights),
    *(_in_datasets, _in_archives, _in_events, _in_options),
)


def payloads_trial(seed: int) -> Trial:
    place = PLACES[seed % len(PLACES)]
    where = place.__name__.strip("_").replace("_", " ")
    with a_folder() as folder:
        canary = Canary(folder / "it-was-run")
        (folder / "here").mkdir()
        found = []
        try:
            place(folder / "here", canary)
        except OffbeatError:
            pass
        except Exception as error:
            found.append(f"{where}: {error!r}")
        if not canary.is_alive:
            found.append(f"{where}: it was run")
    return Trial(tuple(found))


@contextlib.contextmanager
def pickles_read() -> Iterator[None]:
    """Where JSON is read, a pickle would do."""
    loads = json.loads

    def read(raw: Any, **how: Any) -> Any:
        if isinstance(raw, bytes | bytearray) and raw[:1] == b"\x80":
            return pickle.loads(raw)
        return loads(raw, **how)

    with mock.patch.object(json, "loads", read):
        yield


PAYLOADS = Row(
    20,
    "a pickle, or a line of Python, on the wire, in checkpoints, weights, datasets, archives, "
    "events and options",
    "never run",
    len(PLACES),
    len(PLACES),
    payloads_trial,
    {"nothing but JSON": pickles_read},
)
