"""Runs that are done again come out as they were, to the bit; and where one does not, that is
seen."""

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import taking_a_picture
from helpers import Spiced, cross_entropy, toy_data, toy_recipe
from processes import LocalRun
from torch import nn

import offbeat
from offbeat.cli import main
from offbeat.errors import ConfigError, RunDirError
from offbeat.run.events import read_events
from offbeat.shard import partition

LOCKED = (
    "sync",
    "apply-reply",
    "reply-apply",
    "bounded:1",
    "ringmaster:2",
    "rennala:3",
    "buffer:2",
)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def lossy(batch: Any, generator: torch.Generator) -> Any:
    return batch[0] + 0.1 * torch.randn(batch[0].shape, generator=generator), batch[1]


RECIPES = {
    "plain": lambda: toy_recipe(epochs=3),
    "rich": lambda: toy_recipe(
        model=normalised,
        optimizer=offbeat.AdamW(lr=0.01),
        augment=lossy,
        ema=0.9,
        schedule=offbeat.cosine(warmup=5),
        epochs=3,
    ),
}


def train(run_dir: Path, recipe: str = "plain", **options: Any) -> offbeat.Result:
    given = {"engine": "inproc", "workers": 3, "threads": 1, **options}
    given = {"checkpoint_every": 10, "eval_every": 10, **given}
    return offbeat.train(RECIPES[recipe](), run_dir=str(run_dir), quiet=True, **given)


def edit(run_dir: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Every event of a file."""
    path = run_dir / "events" / f"{name}.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        change(event)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("discipline", LOCKED)
def test_a_run_comes_out_as_it_was(
    run_dir: Path, discipline: str, servers: int, recipe: str
) -> None:
    result = train(run_dir, recipe, discipline=discipline, servers=servers)
    found = offbeat.replay(run_dir, recipe=RECIPES[recipe]())
    assert (found.difference, found.stopped) == (None, None)
    assert found.num_checked == found.num_gradients > 20 and found.num_others == 0
    assert len(found.checkpoints) > 1 and all(same for _, same in found.checkpoints)
    state, mine = result.state_dict(), found.state_dict()
    assert all(torch.equal(state[name], mine[name]) for name in state)
    assert found.scores == pytest.approx(result.test_scores)


@pytest.mark.parametrize(
    ("options", "discipline"),
    [
        ({"rule": "dc-asgd", "accumulate": 2, "servers": 3}, "apply-reply"),
        ({"rule": "dana", "split": "shared"}, "bounded:1"),
        ({"clip_norm": 0.1, "lying_worker": "1:-2x"}, "reply-apply"),
        ({"clip_value": 0.01, "overlap": True}, "apply-reply"),
        ({"devices": "cpu,cpu", "rule": "median"}, "sync"),
        ({"local_steps": 3}, "sync"),
        ({"local_steps": 3, "recipe": "rich"}, "ringmaster:2"),
        ({"local_steps": 2, "overlap": True, "rule": "delayed-nesterov"}, "apply-reply"),
        ({"local_steps": "4:auto", "slow_worker": "1:3x"}, "apply-reply"),
        ({"compress": "int8"}, "apply-reply"),
        ({"compress": "int8", "compress_always": True, "servers": 2}, "apply-reply"),
        (
            {"compress": "topk:0.2", "compress_replies": "delta", "compress_always": True},
            "ringmaster:2",
        ),
        ({"compress": "bf16", "compress_replies": "bf16", "compress_always": True}, "sync"),
        ({"clip_norm": 0.2}, "sync"),
        ({"clip_norm": 0.2, "servers": 2, "rule": "sum"}, "sync"),
        ({"backup_workers": 1, "partition": "tensors", "servers": 2}, "sync"),
    ],
)
def test_options_that_change_gradients_are_known(
    run_dir: Path, options: dict[str, Any], discipline: str
) -> None:
    options = {"recipe": "plain", **options}
    recipe = options["recipe"]
    train(run_dir, discipline=discipline, **options)
    found = offbeat.replay(run_dir, recipe=RECIPES[recipe]())
    assert found.is_same and all(same for _, same in found.checkpoints), found.lines()
    assert found.num_checked > 15


def test_a_run_that_went_on_is_one(run_dir: Path) -> None:
    train(run_dir, "rich", discipline="apply-reply", servers=2, stop_at=0.5, eval_every=10)
    recipe = RECIPES["rich"]()
    offbeat.resume(run_dir, recipe=recipe, stop_at=float("inf"))
    found = offbeat.replay(run_dir, recipe=recipe)
    assert found.is_same and found.version == 72, found.lines()


@pytest.mark.parametrize(
    ("discipline", "name"), [("sync", "rich"), ("apply-reply", "rich"), ("buffer:3", "plain")]
)
def test_what_was_had_out_of_a_journal_is_no_other_run(
    run_dir: Path, tmp_path: Path, discipline: str, name: str
) -> None:
    """A picture of the folder is what a run leaves that is killed then, everybody at once."""
    left = tmp_path / "left"
    options = {"discipline": discipline, "ack": "durable", "checkpoint_every": 1000}
    given = {"engine": "inproc", "workers": 3, "threads": 1, "eval_every": 0, **options}
    loss = taking_a_picture(cross_entropy, run_dir, left)
    recipe = dataclasses.replace(RECIPES[name](), loss=loss)
    offbeat.train(recipe, run_dir=str(run_dir), quiet=True, **given)
    (half := left / "events" / "ps-0.jsonl.gz.tmp").write_bytes(b"as it was archived")
    result = offbeat.resume(left, recipe=recipe)
    (kept,) = result.summary["kept"]
    assert (kept["applied"], kept["lost"]) == (72, 0)
    loads = [e for e in read_events(left / "events") if e.get("phase") == "load"]
    num_again = sum(1 for e in read_events(left / "events") if e.get("again"))
    assert [load["version"] > 0 for load in loads] == [False, False, True] and num_again > 40
    found = offbeat.replay(left, recipe=recipe)
    assert found.is_same and all(same for _, same in found.checkpoints), found.lines()
    assert not (left / "journal").exists() and not half.exists()


Brought = tuple[int, int, int]
"""Worker, sequence, and the version of the shard that it was computed on."""


def recorded(run_dir: Path, *of_shards: list[Brought]) -> None:
    """A run in which each shard was brought just these gradients, in this order."""
    train(run_dir, discipline="apply-reply", servers=len(of_shards), workers=3)
    for shard, brought in enumerate(of_shards):
        path = run_dir / "events" / f"ps-{shard}.jsonl"
        events = list(map(json.loads, path.read_text().splitlines()))
        some = next(event for event in events if event["kind"] == "push")
        lines = events[:1]
        for version, (worker, sequence, base) in enumerate(brought, 1):
            known = {"worker": worker, "sequence": sequence, "batch": sequence - 1}
            made = {"base_version": base, "version": version, "received_s": sequence + worker / 10}
            lines.append({**some, **known, **made})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (run_dir / "events").glob("[!p]*"):
        path.unlink()


def test_no_shard_can_make_its_first_update_before_all_have_begun(run_dir: Path) -> None:
    """Worker 1 was late at the second server, and worker 0 has seen what it made of the first."""
    recorded(run_dir, [(1, 1, 0), (0, 1, 1)], [(0, 1, 0), (1, 1, 0)])
    found = offbeat.replay(run_dir, recipe=RECIPES["plain"]())
    assert found.is_same, found.lines()
    assert (found.num_gradients, found.num_updates) == (2, 4)


def test_one_shard_goes_further_than_asked_for_where_another_one_needs_that(
    run_dir: Path, tmp_path: Path
) -> None:
    """Workers 0 and 2 were late at the first server, when worker 1 had seen them at the second."""
    late, first = [(0, 1, 0), (2, 1, 0)], (1, 1, 0)
    recorded(run_dir, [first, (1, 2, 1), *late], [*late, first, (1, 2, 3)])
    found = offbeat.replay(run_dir, recipe=RECIPES["plain"](), to=2)
    assert found.is_same and found.version == 2, found.lines()
    assert (found.num_gradients, found.num_updates) == (4, 2 + 3)
    recorded(tmp_path / "on_time", [first, *late], [*late, first])
    on_time = offbeat.replay(tmp_path / "on_time", recipe=RECIPES["plain"](), to=2)
    assert on_time.is_same and on_time.num_updates == 2 + 2
    mine, other = (torch.cat([t.flatten() for t in r.state.values()]) for r in (found, on_time))
    _, (half, _) = partition(len(mine), 2)
    assert torch.equal(mine[half:], other[half:]), "what went further is not in it"
    assert not torch.equal(mine[:half], other[:half])


def test_what_was_pushed_to_the_next_server_had_seen_the_former(
    run_dir: Path, tmp_path: Path
) -> None:
    """As if the second server had died and come back with nothing, and so lacks the first step."""
    steps = [(0, 1, 0), (0, 2, 1)]
    recorded(run_dir, steps, steps)
    path = run_dir / "events" / "ps-1.jsonl"
    load, first, second = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(event) + "\n" for event in (load, first)))
    later = {**load, "epoch": 1}, {**second, "base_version": 0, "version": 1}
    again = path.with_name("ps-1.1.jsonl")
    again.write_text("".join(json.dumps(event) + "\n" for event in later))
    anew = {"kind": "anew", "worker": 0, "shard": 1, "sequence": 2, "epoch": 1, "at_s": 1.5}
    anew |= {"former_epoch": 0, "base_version": 1}
    rejoin = {**anew, "kind": "rejoin", "seen_version": 1, "version": 0}
    told = "".join(json.dumps(event) + "\n" for event in (rejoin, anew))
    (run_dir / "events" / "worker-0.jsonl").write_text(told)
    found = offbeat.replay(run_dir, recipe=RECIPES["plain"]())
    assert found.is_same and (found.num_gradients, found.num_updates) == (2, 4), found.lines()
    recorded(tmp_path / "whole", steps, steps)
    after = [offbeat.replay(tmp_path / "whole", recipe=RECIPES["plain"](), to=n) for n in (0, 1, 2)]
    lost, none, one, two = (
        torch.cat([t.flatten() for t in each.state.values()]) for each in (found, *after)
    )
    _, (half, _) = partition(len(lost), 2)
    assert torch.equal(lost[:half], two[:half])
    torch.testing.assert_close((lost - none)[half:], (two - one)[half:])


def test_it_goes_as_far_as_one_wants(run_dir: Path, tmp_path: Path) -> None:
    train(run_dir, discipline="sync", keep=10)
    out = tmp_path / "out.safetensors"
    found = offbeat.replay(run_dir, to=10, out=out, recipe=RECIPES["plain"]())
    assert (found.version, found.num_gradients, found.num_updates) == (10, 30, 10)
    assert found.checkpoints == [(0, True), (10, True)]
    from safetensors.torch import load_file

    assert all(torch.equal(v, found.state[name]) for name, v in load_file(out).items())
    with pytest.raises(ConfigError, match="no version 25 of every shard"):
        offbeat.replay(run_dir, to=25, recipe=RECIPES["plain"]())


def test_what_a_worker_has_brought_can_be_left_out(run_dir: Path) -> None:
    """What the others do is what they did, so that nothing is compared."""
    train(run_dir, discipline="apply-reply", lying_worker="2:-3x")
    with_all, without = (
        offbeat.replay(run_dir, recipe=RECIPES["plain"](), without_worker=rank)
        for rank in (None, 2)
    )
    assert (with_all.num_gradients, without.num_gradients) == (72, 48)
    assert without.scores["loss"] < with_all.scores["loss"], "he was a liar"
    assert not without.checkpoints and not without.num_checked
    with pytest.raises(ConfigError, match="no worker 3 of 3"):
        offbeat.replay(run_dir, recipe=RECIPES["plain"](), without_worker=3)


def test_the_first_gradient_that_differs_is_named(run_dir: Path) -> None:
    """As if it had been computed on the version before."""
    train(run_dir, discipline="apply-reply", servers=2)

    def older(event: dict[str, Any]) -> None:
        if event["kind"] == "push" and event["version"] == 30:
            event["base_version"] -= 1

    edit(run_dir, "ps-0", older)
    found = offbeat.replay(run_dir, recipe=RECIPES["plain"]())
    assert not found.is_same and found.num_others >= 1
    assert found.difference is not None and "its loss was" in found.difference
    assert "of shard 0 and version" in found.difference
    assert [same for version, same in found.checkpoints if version < 30] != []
    assert all(same for version, same in found.checkpoints if version < 30)
    assert not found.checkpoints[-1][1]


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 30).sqrt()


def rooted() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), Root(), nn.Linear(7, 3))


def with_an_outlier(config: Any) -> Any:
    x, y = toy_data()
    x[17] *= 1000
    return (x, y), (x, y)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("discipline", ["apply-reply", "sync"])
def test_where_a_loss_became_nan_is_found(run_dir: Path, discipline: str, servers: int) -> None:
    small = offbeat.SGD(lr=0.001)  # parameters hardly move, whoever's gradients come first
    recipe = toy_recipe(model=rooted, data=with_an_outlier, optimizer=small)
    given: dict[str, Any] = {"discipline": discipline, "engine": "inproc", "workers": 2}
    with pytest.raises(offbeat.RunError, match="the loss became"):
        offbeat.train(recipe, run_dir=str(run_dir), quiet=True, servers=servers, **given)
    found = offbeat.replay(run_dir, until_nan=True, recipe=recipe)
    assert found.is_same, found.lines()
    assert "of worker" in found.found[0] and "on version" in found.found[0]
    assert found.found[1].startswith("  the largest number of its parameters is 0.")
    assert "the first output that is not finite is that of 1 (Root): " in found.found[2]
    assert found.found[3] == "  its loss is nan"


def test_where_a_gradient_became_nan_is_found(run_dir: Path) -> None:
    """One that was refused, in a run that went on."""
    marked = toy_recipe().data(None)[0][0][17]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if torch.is_grad_enabled() and bool((batch[0] == marked).all(-1).any()):
            root = (model[2].bias - model[2].bias.detach()).sum().abs().sqrt()
            value = value + root  # its derivative is infinite at 0
        return value

    recipe = toy_recipe(loss=loss, epochs=1)
    given: dict[str, Any] = {"discipline": "apply-reply", "engine": "inproc", "workers": 2}
    summary = offbeat.train(recipe, run_dir=str(run_dir), quiet=True, **given).summary
    assert summary["rejected"] == 1
    found = offbeat.replay(run_dir, until_nan=True, recipe=recipe)
    assert found.is_same and found.num_gradients < 24
    assert found.found[-1].endswith("and the gradient is not finite in: 2.bias (3 of 3)")
    whole = offbeat.replay(run_dir, recipe=recipe)
    assert whole.is_same and not whole.found


def test_where_nothing_became_nan_that_is_said(run_dir: Path) -> None:
    train(run_dir, discipline="sync")
    said: list[str] = []
    found = offbeat.replay(run_dir, until_nan=True, recipe=RECIPES["plain"](), say=said.append)
    assert said == ["no loss and no gradient of this run was found not to be finite"]
    assert found.is_same and not found.found and found.version == 24
    with pytest.raises(ConfigError, match="until_nan says itself how far to go"):
        offbeat.replay(run_dir, until_nan=True, to=3, recipe=RECIPES["plain"]())


def test_a_checkpoint_that_differs_is_named(run_dir: Path) -> None:
    train(run_dir, discipline="sync")

    def another(event: dict[str, Any]) -> None:
        if event.get("phase") == "checkpoint" and event["version"] == 10:
            event["shards"][0][1] = "0" * 64

    edit(run_dir, "master", another)
    found = offbeat.replay(run_dir, recipe=RECIPES["plain"]())
    assert found.difference == "the checkpoint of version 10 is the first that is not the same"
    assert found.num_others == 0


def test_other_options_show(run_dir: Path) -> None:
    train(run_dir, discipline="sync")
    described = json.loads((run_dir / "config.json").read_text())
    described["config"]["lr"] = 0.05
    (run_dir / "config.json").write_text(json.dumps(described))
    found = offbeat.replay(run_dir, recipe=RECIPES["plain"]())
    assert found.difference is not None
    assert "made with the learning rate 0.1, and would be made with 0.05" in found.difference


def test_events_that_are_missing_end_it_there(run_dir: Path) -> None:
    train(run_dir, discipline="apply-reply", servers=2)
    path = run_dir / "events" / "ps-1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"version": 40,' not in line))
    found = offbeat.replay(run_dir, recipe=RECIPES["plain"]())
    assert found.stopped is not None and not found.is_same and found.difference is None
    assert "of shard 0 cannot be made again" in found.stopped or "version 40 of" in found.stopped
    assert found.num_others == 0 and found.num_checked >= 35


def test_a_version_that_is_missing_is_told(run_dir: Path) -> None:
    train(run_dir, discipline="bounded:2")
    path = run_dir / "events" / "ps-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"version": 70,' not in line))
    found = offbeat.replay(run_dir, recipe=RECIPES["plain"]())
    assert found.stopped == "version 70 of shard 0 is in no event" and found.version == 69


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discipline": "lock-free"}, "lock-free applies gradients with no lock"),
    ],
)
def test_what_cannot_be_done_again_is_refused(
    run_dir: Path, options: dict[str, Any], message: str
) -> None:
    train(run_dir, **options)
    with pytest.raises(ConfigError, match=message):
        offbeat.replay(run_dir, recipe=RECIPES["plain"]())


def test_a_folder_without_events_is_refused(run_dir: Path) -> None:
    train(run_dir, discipline="sync")
    for path in (run_dir / "events").glob("ps-*"):
        path.unlink()
    with pytest.raises(RunDirError, match="no events of servers"):
        offbeat.replay(run_dir, recipe=RECIPES["plain"]())


def test_random_numbers_of_threads_are_nobodys(run_dir: Path) -> None:
    """Threads share torch's generator: what one of them draws nobody has written down, and that
    is seen."""
    recipe = toy_recipe(model=Spiced)
    given: dict[str, Any] = {"discipline": "apply-reply", "engine": "inproc", "threads": 1}
    offbeat.train(recipe, run_dir=str(run_dir), workers=2, quiet=True, **given)
    assert not offbeat.replay(run_dir, recipe=recipe).is_same


@pytest.mark.slow
def test_processes_dropout_and_a_death(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--discipline", "apply-reply", "--workers", "4", "--servers", "2", "--steps", "40")
    more = ("--slow-worker", "0:5x", "--kill-worker", "1@15", "--checkpoint-every", "40")
    run = LocalRun(tmp_path, *flags, *more, recipe="dropout")
    assert run.wait() == 0, run.text()
    capsys.readouterr()
    code = main(["replay", str(run.run_dir)])
    lines = capsys.readouterr().out.splitlines()
    if code:  # the one that died may have reached one of the servers, and not the other
        assert "since its worker died as it sent it" in lines[-1], lines
    else:
        assert "losses, " in lines[-1]
    assert "computed" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("a_server_dies", [False, True])
def test_rounds_with_deaths_come_out_as_they_were(tmp_path: Path, a_server_dies: bool) -> None:
    """What a server that is killed had not written down yet nobody knows: there it may end."""
    flags = ("--discipline", "sync", "--workers", "4", "--servers", "2", "--steps", "120")
    slow = ("--slow-worker", "0:20x,1:20x,2:20x,3:20x", "--checkpoint-every", "25")
    run = LocalRun(tmp_path, *flags, *slow, "--kill-worker", "1@30", recipe="dropout")
    run.wait_for_steps(45, 0)
    if a_server_dies:
        run.kill("ps --index 1")
    run.wait_for_steps(80, 0)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    on = LocalRun(tmp_path, "--resume", str(run.run_dir), run="on")
    assert on.wait() == 0, on.text()
    found = offbeat.replay(run.run_dir)
    assert found.difference is None and all(same for _, same in found.checkpoints), found.lines()
    if found.stopped is None:
        assert found.num_gradients > 400 and len(found.checkpoints) > 8
    else:
        assert a_server_dies and "events are missing" in found.stopped


def test_the_command_says_what_came_of_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shape = {"workers": 2, "epochs": 1, "batch_size": 100, "engine": "inproc", "threads": 1}
    offbeat.train("fashion-cnn", run_dir=str(run_dir), quiet=True, discipline="sync", **shape)
    out = tmp_path / "w.safetensors"
    capsys.readouterr()
    assert main(["replay", str(run_dir), "--to", "3", "--out", str(out)]) == 0
    first, scores, last = capsys.readouterr().out.splitlines()
    assert first.startswith("6 gradients computed, 3 updates made in ") and "version 3" in first
    assert scores.startswith("precision @ 1 = ")
    assert last == "to the bit as it was: 6 of 6 losses, 1 of 1 checkpoints" and out.exists()
    assert main(["replay", str(tmp_path)]) == 2
    assert main(["replay", str(run_dir), "--to", "-1"]) == 2
