"""Checkpoints whose files say something odd, and say it with the right digests: for whoever reads
them.

An attacker who may write into a run's folder can make digests that fit; so what is tested is what
is behind them: the tree of manifest.json, the header of each safetensors file, the tensors.
"""

import contextlib
import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint

from offbeat.errors import CheckpointError
from offbeat.run.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from offbeat.shard import partition

from .mutation import HOSTILE, ODD, spoilt


def a_checkpoint(folder: Path, version: int = 12) -> Path:
    return save_checkpoint(folder, make_checkpoint(version))


def signed(path: Path) -> None:
    """Have the digests fit what the files hold, as far as there is a place for them."""
    manifest = path / "manifest.json"
    try:
        described = json.loads(manifest.read_bytes())
        files = described["files"]
        for name in files:
            if isinstance(files[name], str) and (path / name).is_file():
                files[name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
        manifest.write_text(json.dumps(described))
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):
        pass  # no table of files is left: then the text alone is signed
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    (path / "manifest.sha256").write_text(digest)


_NOTHING_LEFT = (
    *(AttributeError, LookupError, RecursionError, TypeError, ValueError),
    struct.error,
)
"""Of a file that was spoilt before: then it stays as it is."""


def spoil_file(path: Path, rng: random.Random) -> None:
    """One of a checkpoint's files, in one place."""
    name = rng.choice(
        (
            "manifest.json",
            "manifest.json",
            "shard-0.safetensors",
            "shard-1.safetensors",
            "frozen.safetensors",
        )
    )
    file = path / name
    raw = file.read_bytes()
    if rng.random() < 0.1:
        raw = rng.choice((b"", raw[: rng.randrange(len(raw))], raw + b"x", *HOSTILE))
    else:
        with contextlib.suppress(*_NOTHING_LEFT):
            is_json = name == "manifest.json"
            raw = _spoilt_tree(raw, rng) if is_json else _spoilt_tensors(raw, rng)
    file.write_bytes(raw)


def _spoilt_tree(raw: bytes, rng: random.Random) -> bytes:
    return json.dumps(spoilt(json.loads(raw), rng)).encode()


def _spoilt_tensors(raw: bytes, rng: random.Random) -> bytes:
    """The header's tree, or a length, or an offset; with the length that fits, mostly."""
    (length,) = struct.unpack_from("<Q", raw)
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    if rng.random() < 0.3:
        names = list(header)
        header[rng.choice(("params", "ema", "optimizer.element.x", "../x"))] = header.pop(
            rng.choice(names)
        )
    elif rng.random() < 0.3:
        one = header[rng.choice(list(header))]
        if isinstance(one, dict):
            one[rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(
                (*ODD, "I64", "BF16", "F8_E4M3", "C64", [1], [2, 2], [0, 2**63], [4, 0])
            )
    else:
        header = spoilt(header, rng)
    text = json.dumps(header).encode()
    told = len(text) if rng.random() < 0.9 else rng.choice((0, 7, 2**32, 2**63, 2**64 - 1))
    return struct.pack("<Q", told) + text + raw[8 + length :]


def checkpoints_that_lie(folder: Path, rng: random.Random, count: int) -> list[str]:
    """What did not hold when so many of them were read."""
    found = []
    a_checkpoint(folder, 5)
    path = a_checkpoint(folder, 12)
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    for _ in range(count):
        for name, raw in whole.items():
            (path / name).write_bytes(raw)
        for _ in range(rng.choice((1, 1, 2))):
            spoil_file(path, rng)
        signed(path)
        found += _read(folder, path)
    return found


def _read(folder: Path, path: Path) -> list[str]:
    """It is what a checkpoint has to be, and can be used; or it is refused in a line with its name,
    and the one before it is used."""
    said = (path / "manifest.json").read_bytes()[:2000]
    try:
        loaded = load_checkpoint(path)
    except CheckpointError as error:
        if "\n" in str(error) or path.name not in str(error):
            return [f"refused with {str(error)[:300]!r}"]
        if newest_checkpoint(folder).version != 5:
            return ["the one before it was not used"]
        return []
    except BaseException as error:
        return [f"load_checkpoint raised {error!r} on {said!r}"]
    try:
        loaded.state_dict(), loaded.state_dict(ema=True)
        size = loaded.manifest.num_elements
        loaded.recut(partition(size, 1)), loaded.recut(partition(size, 3))
        loaded.applied(), loaded.batches(), loaded.next_incarnation
        loaded.for_optimizer("SGD").recut(partition(size, 3))
    except Exception as error:
        return [f"what was loaded cannot be used: {error!r}: {said!r}"]
    return []
