"""Checkpoints: complete or absent, and every byte accounted for."""

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, small_model
from helpers import toy_job
from safetensors.torch import load_file
from scripted import ScriptedNetwork, ScriptedServer, a_master, run_master

import offbeat
from offbeat.accounts import Account
from offbeat.errors import CheckpointError, ConfigError
from offbeat.flat import FlatModel
from offbeat.optim import BY_NAME, KINDS, Optimizer
from offbeat.rules import Gradient
from offbeat.run import checkpoint as checkpoints
from offbeat.run.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from offbeat.run.rundir import RunFolder
from offbeat.shard import Shard, ShardState, partition, segments_of


def test_what_was_saved_is_loaded_and_fits_the_model(tmp_path: Path) -> None:
    saved = make_checkpoint()
    path = save_checkpoint(tmp_path, saved)
    assert path == tmp_path / "00000012"
    loaded = load_checkpoint(path)
    assert loaded.manifest == saved.manifest
    accounts = {0: Account(1, 5, applied=3, dropped=1, lost=1)}
    assert [(s.version, s.accounts) for s in loaded.shards] == [(12, accounts), (13, accounts)]
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


def test_a_disk_that_is_full_for_a_while_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on meanwhile, with the last checkpoint that there was room for."""
    write, told, seen = checkpoints._write, [], []

    def failing(path: Path, raw: bytes) -> None:
        seen.append(int(path.parent.name.split(".")[1]))
        if seen[-1] in (4, 8):
            raise OSError(28, "No space left on device")
        write(path, raw)

    monkeypatch.setattr(checkpoints, "_write", failing)
    job, folder = toy_job(workers=1, checkpoint_every=4, eval_every=0), RunFolder(tmp_path)
    network = ScriptedNetwork([ScriptedServer([0, 4, 8, 12, 16])])
    with a_master(folder, job, network, say=told.append) as master:
        assert master.run() == "finished"
    assert {4, 8, 12} <= set(seen)
    assert len(told) == 2, told
    assert "00000004: No space left on device; training goes on" in told[0]
    assert told[1] == "checkpoints are kept again, at version 12"
    assert newest_checkpoint(folder.checkpoints).version == 16


def test_an_old_one_that_cannot_be_removed_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, **given: bool) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoints.shutil, "rmtree", failing)
    job, folder = toy_job(workers=1, checkpoint_every=4, keep=1), RunFolder(tmp_path)
    assert run_master(folder, job, [ScriptedServer([0, 4, 8])]) == "finished"
    assert newest_checkpoint(folder.checkpoints).version == 8
    with pytest.raises(CheckpointError, match=r"cannot remove .*: Input/output error"):
        prune_checkpoints(folder.checkpoints, 1)


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container its successor has the same number."""
    for number in (os.getpid(), 1):
        left = tmp_path / f".00000003.{number}.tmp"
        left.mkdir()
        (left / "shard-0.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path, make_checkpoint(version=3))
    assert [p.name for p in tmp_path.iterdir()] == ["00000003"]
    assert newest_checkpoint(tmp_path).version == 3


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


@pytest.mark.parametrize("kind", ["Adam", "ASGD", "SGD"])
def test_an_optimizers_state_of_an_earlier_format_is_read(tmp_path: Path, kind: str) -> None:
    flat = FlatModel(small_model())
    options = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.1}
    optimizer = Optimizer(kind=kind, options=options)
    size = flat.manifest.num_elements
    buffers = {"floats": torch.zeros(6), "ints": torch.zeros(1, dtype=torch.int64)}
    segments = segments_of(flat.manifest, optimizer, 0, size)
    shard = Shard(flat.params.clone(), segments, optimizer, **buffers)
    updater = shard.make_updater()
    updater.apply([Gradient(torch.ones(size), [True, False, True, True, True])])
    now = shard.state({})
    before = {"params": now.tensors["params"], **buffers}
    for key, values in now.tensors.items():
        match key.split("."):
            case ["optimizer", "has", _, "momentum_buffer"]:
                before["optimizer.begun"] = values
            case ["optimizer", "element" | "scalar", name]:
                before[f"optimizer.{name}"] = values
    old = ShardState(version=1, tensors=before, accounts={})
    saved = Checkpoint(version=1, manifest=flat.manifest, shards=(old,), frozen={})
    path = save_checkpoint(tmp_path, saved)
    text = json.dumps({**json.loads((path / "manifest.json").read_text()), "format": 2})
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_text(checkpoints._sha256(text.encode()))
    (read,) = load_checkpoint(path).shards
    assert read.tensors.keys() == now.tensors.keys() != before.keys()
    assert all(torch.equal(read.tensors[key], value) for key, value in now.tensors.items())


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_checkpoint_can_be_cut_anew_and_back(tmp_path: Path, name: str) -> None:
    """From 3 shards to 2 and to 3 again: nothing is lost, also where step counts differ."""
    flat = FlatModel(small_model())
    optimizer = BY_NAME[name]()

    def cuts(num_shards: int) -> list[tuple[int, int]]:
        return partition(flat.manifest.num_elements, num_shards)

    def shards_of(num_shards: int) -> list[Shard]:
        slices = cuts(num_shards)
        segments = [segments_of(flat.manifest, optimizer, lo, hi) for lo, hi in slices]
        made = [
            Shard(torch.zeros(hi - lo), s, optimizer, ema_decay=0.9)
            for (lo, hi), s in zip(slices, segments, strict=True)
        ]
        made[0].floats = torch.zeros(flat.manifest.num_floats)
        return made

    states = []
    generator = torch.Generator().manual_seed(2)
    for shard in shards_of(3):
        updater = shard.make_updater()
        for number in range(4):
            mask = [True, True, number != 2, True, True]
            values = torch.randn(len(shard.params), generator=generator)
            updater.apply([Gradient(values, mask)])
        states.append(shard.state({}))
    states[0].tensors["floats"] = torch.arange(float(flat.manifest.num_floats))
    made = Checkpoint(version=4, manifest=flat.manifest, shards=tuple(states), frozen={})
    two = Checkpoint(version=4, manifest=flat.manifest, shards=made.recut(cuts(2)), frozen={})
    assert [len(s.tensors["params"]) for s in two.shards] == [
        hi - lo for lo, hi in partition(flat.manifest.num_elements, 2)
    ]
    assert "floats" in two.shards[0].tensors and "floats" not in two.shards[1].tensors
    for shard, state in zip(shards_of(2), two.shards, strict=True):
        shard.load(state)
        shard.make_updater()
        assert shard.state({}).tensors.keys() - {"floats"} == state.tensors.keys() - {"floats"}
    for before, after in zip(states, two.recut(cuts(3)), strict=True):
        assert before.tensors.keys() == after.tensors.keys()
        for key, value in before.tensors.items():
            assert torch.equal(value, after.tensors[key]), key


@pytest.mark.parametrize("kind", [*KINDS, "dampening"])
def test_training_goes_on_with_the_same_bits_after_a_cut(kind: str) -> None:
    """From 2 shards to 3, where one tensor had no gradient so far."""
    flat = FlatModel(small_model())
    options = {"lr": 0.01}
    if kind == "dampening":
        kind, options = "SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}
    optimizer = Optimizer(kind=kind, options=options)
    generator = torch.Generator().manual_seed(2)
    size = flat.manifest.num_elements
    before, after = (torch.randn(3, size, generator=generator) for _ in range(2))

    def shards_of(num_shards: int) -> list[Shard]:
        return [
            Shard(
                flat.params[lo:hi].clone(), segments_of(flat.manifest, optimizer, lo, hi), optimizer
            )
            for lo, hi in partition(size, num_shards)
        ]

    def apply(shards: list[Shard], gradients: torch.Tensor, mask: list[bool] | None) -> None:
        for shard, (lo, hi) in zip(shards, partition(size, len(shards)), strict=True):
            updater = shard.updaters[0] if shard.updaters else shard.make_updater()
            for values in gradients:
                updater.apply([Gradient(values[lo:hi], mask)])

    whole, two, three = shards_of(1), shards_of(2), shards_of(3)
    mask = [True, False, True, True, True]
    for shards in (whole, two):
        apply(shards, before, mask)
    states = tuple(shard.state({}) for shard in two)
    kept = Checkpoint(version=3, manifest=flat.manifest, shards=states, frozen={})
    for shard, state in zip(three, kept.recut(partition(size, 3)), strict=True):
        shard.load(state)
    for shards in (whole, three):
        apply(shards, after, None)
    assert torch.equal(torch.cat([shard.params for shard in three]), whole[0].params)


def test_recutting_keeps_each_workers_last_gradient_and_the_newest_version() -> None:
    flat = FlatModel(small_model())
    states = []
    for k, (lo, hi) in enumerate(partition(flat.manifest.num_elements, 2)):
        tensors = {"params": torch.zeros(hi - lo)}
        accounts = {0: Account(0, 10 - k, applied=10 - k), 1: Account(k, 3, applied=3)}
        states.append(ShardState(version=5 + k, tensors=tensors, accounts=accounts))
    made = Checkpoint(version=5, manifest=flat.manifest, shards=tuple(states), frozen={})
    size = flat.manifest.num_elements
    (one,) = made.recut(partition(size, 1))
    assert one.version == 6
    assert one.accounts == {0: Account(0, 10, applied=10), 1: Account(1, 3, applied=3)}
    assert made.applied() == {0: (0, 10), 1: (1, 3)}
    assert made.recut(partition(size, 2)) == made.shards


@pytest.mark.parametrize("name", ["model.pt", "model.PTH", "m.bin", "m.ckpt", "m.onnx", "m.h5"])
def test_a_name_that_promises_another_format_is_refused(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "checkpoints", make_checkpoint())
    with pytest.raises(ConfigError, match=r"call it (m|model)\.safetensors$"):
        offbeat.export(tmp_path, tmp_path / name)
    assert not (tmp_path / name).exists()
    for allowed in ("weights", "m.safetensors", "m.v2"):
        offbeat.export(tmp_path, tmp_path / allowed)
        assert load_file(tmp_path / allowed).keys() == offbeat.load(tmp_path).keys()
