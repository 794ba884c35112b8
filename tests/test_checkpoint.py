"""Checkpoints: complete or absent, and every byte accounted for."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from offbeat import checkpoint as checkpoints
from offbeat.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from offbeat.errors import CheckpointError
from offbeat.flat import FlatModel
from offbeat.shard import ShardState, partition


def small_model() -> nn.Module:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    module[0].bias.requires_grad_(False)
    return module


def make_checkpoint(version: int = 12, num_shards: int = 2, ema: bool = True) -> Checkpoint:
    flat = FlatModel(small_model())
    floats, ints = torch.zeros(6), torch.zeros(1, dtype=torch.int64)
    flat.write_buffers(floats, ints)
    shards = []
    for k, (lo, hi) in enumerate(partition(len(flat.params), num_shards)):
        tensors = {"params": flat.params[lo:hi].clone()}
        if ema:
            tensors["ema"] = flat.params[lo:hi] * 2
        if k == 0:
            tensors |= {"floats": floats, "ints": ints}
        shards.append(ShardState(version=version + k, tensors=tensors, applied={0: (1, 5)}))
    return Checkpoint(
        version=version, manifest=flat.manifest, shards=tuple(shards), frozen=flat.frozen()
    )


def test_what_was_saved_is_loaded_and_fits_the_model(tmp_path: Path) -> None:
    saved = make_checkpoint()
    path = save_checkpoint(tmp_path, saved)
    assert path == tmp_path / "00000012"
    loaded = load_checkpoint(path)
    assert loaded.manifest == saved.manifest
    assert [(s.version, s.applied) for s in loaded.shards] == [(12, {0: (1, 5)}), (13, {0: (1, 5)})]
    module = small_model()
    expected = {k: v.clone() for k, v in module.state_dict().items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.load_state_dict(loaded.state_dict())
    assert all(torch.equal(v, expected[k]) for k, v in module.state_dict().items())


def test_the_moving_average_is_given_where_there_is_one(tmp_path: Path) -> None:
    with_ema = load_checkpoint(save_checkpoint(tmp_path / "a", make_checkpoint()))
    plain, average = with_ema.state_dict(), with_ema.state_dict(ema=True)
    assert torch.equal(average["2.weight"], plain["2.weight"] * 2)
    without = load_checkpoint(save_checkpoint(tmp_path / "b", make_checkpoint(ema=False)))
    assert torch.equal(without.state_dict(ema=True)["2.weight"], plain["2.weight"])


def test_every_flipped_byte_is_noticed_and_the_file_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint())
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), 7):
            spoilt = bytearray(whole)
            spoilt[place] ^= 1 << (place % 8)
            file.write_bytes(spoilt)
            with pytest.raises(CheckpointError, match=r"manifest|shard|frozen"):
                load_checkpoint(path)
        file.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
        file.write_bytes(whole)
    load_checkpoint(path)


def test_a_damaged_newest_one_is_passed_over(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_checkpoint(version=10))
    newest = save_checkpoint(tmp_path, make_checkpoint(version=9_999_999_999))
    assert newest_checkpoint(tmp_path).version == 9_999_999_999
    (newest / "shard-1.safetensors").write_bytes(b"")
    assert newest_checkpoint(tmp_path).version == 10
    (tmp_path / "00000010" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no valid checkpoint.*shard-1.*manifest"):
        newest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="there is none"):
        newest_checkpoint(tmp_path / "nowhere")


def test_one_that_cannot_be_finished_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, make_checkpoint(version=1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(tmp_path, make_checkpoint(version=2))
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for version in (5, 1, 9, 7):
        save_checkpoint(tmp_path, make_checkpoint(version=version))
    (tmp_path / ".00000011.1.tmp").mkdir()
    prune_checkpoints(tmp_path, keep=2)
    assert [int(p.name) for p in list_checkpoints(tmp_path)] == [7, 9]


def test_another_format_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint())
    text = json.dumps({**json.loads((path / "manifest.json").read_text()), "format": 99})
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_text(checkpoints._sha256(text.encode()))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(path)
