"""Scripts of a user's own, launched: what they come to, and what becomes of them when somebody
dies."""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import offbeat
from offbeat.api import Result
from offbeat.cli import main
from offbeat.cli.commands import launch_line
from offbeat.comparison.grid import make_grid
from offbeat.comparison.runs import Comparison, run_grid
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.errors import (
    ConfigError,
    NonFiniteLossError,
    RoleError,
    ScriptEndedError,
    ScriptRefusedError,
)
from offbeat.launching import launch, relaunch
from offbeat.report.write import write_report
from offbeat.run.events import read_events
from offbeat.scripts import describe_script

HEAD = """
import sys
import torch
from torch import nn
import offbeat

torch.set_num_threads(1)

def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))

def batches(count):
    generator = torch.Generator().manual_seed(offbeat.rank())
    for number in range(count):
        x = torch.randn(8, 6, generator=generator)
        yield x, x[:, :3].argmax(1)

def compute(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss
"""

WITH_EVERYTHING = (
    HEAD
    + """
model = make_model()
weights, others = [p for p in model.parameters() if p.dim() > 1], [
    p for p in model.parameters() if p.dim() == 1
]
groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]
optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.99))
early = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
optimizer = offbeat.distribute(model, optimizer)
late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
seen = []
optimizer.register_step_post_hook(lambda *of_torch: seen.append(1))
for number, batch in enumerate(batches(24)):
    loss = compute(model, batch)
    if number % 2:  # two batches make a step
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        early.step()
        late.step()
        assert model[0].weight.grad is not None
        optimizer.zero_grad()
assert len(seen) == 12 and isinstance(optimizer, torch.optim.AdamW)
if offbeat.is_master():
    torch.save(model.state_dict(), sys.argv[1])
"""
)

WITH_A_CLOSURE = (
    HEAD
    + """
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
optimizer = offbeat.distribute(model, optimizer)
for batch in batches(10):
    loss = optimizer.step(lambda: compute(model, batch))  # gradients are never set to zero
    assert loss.item() > 0
    optimizer.param_groups[0]["momentum"] *= 0.9
torch.save(model.state_dict(), sys.argv[1])
"""
)

IN_PLACE = (
    HEAD
    + """
class Own(torch.optim.SGD):
    num_zeroed = 0
    def zero_grad(self, set_to_none=True):
        self.num_zeroed += 1
        super().zero_grad(set_to_none)

model = make_model()
rate = torch.tensor(0.1)
optimizer = offbeat.distribute(model, Own(model.parameters(), lr=rate))
for number, batch in enumerate(batches(10)):
    compute(model, batch)
    if number == 5:
        optimizer.register_step_pre_hook(lambda *of_torch: rate.mul_(0.5) and None)
    optimizer.step()
    rate.mul_(0.8)  # where it lies
    optimizer.zero_grad(set_to_none=number % 2 == 0)
assert optimizer.num_zeroed == 10
torch.save(model.state_dict(), sys.argv[1])
"""
)

THAWED = (
    HEAD
    + """
model = make_model()
optimizer = offbeat.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
model[0].requires_grad_(False)
for number, batch in enumerate(batches(10)):
    model[0].requires_grad_(number > 4)
    compute(model, batch)
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])
"""
)

AHEAD = (
    HEAD
    + """
model = make_model()
made = []
def watched():
    for number, batch in enumerate(batches(8)):
        made.append(number)
        yield batch
optimizer = offbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
seen = []
for number, batch in enumerate(offbeat.ahead(watched())):
    compute(model, batch)
    assert made[-1] == number, "none is made before a gradient is under way"
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
    seen.append(len(made) - number)
assert made == list(range(8))
if len(sys.argv) > 2:
    assert seen == [1, 2] * 3 + [1, 1], "and then one"
torch.save(model.state_dict(), sys.argv[1])
"""
)

FAILING = (
    HEAD
    + """
model = make_model()
optimizer = offbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
def broken():
    yield from batches(3)
    raise OSError("the disk is gone")
for batch in offbeat.ahead(broken()):
    compute(model, batch)
    optimizer.step()
    optimizer.zero_grad()
"""
)

IN_EPOCHS = (
    HEAD
    + """
model = make_model()
optimizer = offbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
state = offbeat.State(epoch=0, seen=torch.zeros(2))
print("begins with epoch", state.epoch, state.seen.tolist(), flush=True)
for epoch in range(state.epoch, 6):
    for batch in batches(10):
        compute(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    state.keep(epoch=epoch + 1, seen=state.seen + 1)
"""
)


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer | None]:
    with fork_server("local") as server:
        yield server


def write(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def run(
    folder: Path, text: str, *arguments: str, forks: ForkServer | None, **options: Any
) -> Result:
    options = {"run_dir": str(folder / "run"), "workers": 1, "threads": 1, **options}
    said: list[str] = []
    return launch(write(folder, text), arguments, options, say=said.append, forks=forks)


def alone(folder: Path, text: str, *arguments: str) -> None:
    """As `python train.py` would, without a process's start."""
    threads, argv = torch.get_num_threads(), sys.argv
    file = write(folder, text)
    sys.argv = [file, *arguments]
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        sys.argv = argv
        torch.set_num_threads(threads)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("script", [WITH_EVERYTHING, WITH_A_CLOSURE, IN_PLACE, THAWED, AHEAD])
def test_one_worker_comes_to_what_the_script_alone_does(
    script: str, servers: int, tmp_path: Path, forks: ForkServer | None
) -> None:
    alone(tmp_path, script, str(tmp_path / "alone.pt"))
    run(tmp_path, script, str(tmp_path / "one.pt"), "launched", servers=servers, forks=forks)
    expected, found = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "one"))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    kept = offbeat.load(tmp_path / "run")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("discipline", ["sync", "lock-free", "bounded:1", "reply-apply"])
def test_every_gradient_of_several_workers_is_in(
    discipline: str, tmp_path: Path, forks: ForkServer | None
) -> None:
    result = run(tmp_path, IN_EPOCHS, workers=3, servers=2, discipline=discipline, forks=forks)
    assert result.summary["status"] == "finished"
    assert result.summary["gradients"] == 180
    for shard in result.summary["kept"]:
        assert shard["applied"] == shard["gradients"] == 180
    assert result.summary["updates"] == (60 if discipline == "sync" else 180)
    assert "begins with epoch 0" in (tmp_path / "run" / "logs" / "worker-1.log").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_goes_on_where_it_was(
    rank: int, tmp_path: Path, forks: ForkServer | None, capfd: pytest.CaptureFixture[str]
) -> None:
    kills = f"{rank}@35"
    result = run(tmp_path, IN_EPOCHS, workers=2, servers=2, kill_worker=kills, forks=forks)
    assert result.summary["restarts"] == 1
    for shard in result.summary["kept"]:
        assert shard["applied"] == shard["gradients"] == 120
    log = tmp_path / "run" / "logs" / "worker-1.log"
    shown = log.read_text() if rank else capfd.readouterr().out
    assert "begins with epoch 0 [0.0, 0.0]" in shown
    assert "begins with epoch 3 [3.0, 3.0]" in shown


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scripts_gradients_travel_as_a_codec_has_them(
    rank: int, tmp_path: Path, forks: ForkServer | None
) -> None:
    """Its rates as they are; and what was left out is there in its next life."""
    coding = {"compress": "int8", "compress_replies": "bf16", "compress_always": True}
    kills = f"{rank}@35"
    result = run(
        tmp_path, IN_EPOCHS, workers=2, servers=2, kill_worker=kills, forks=forks, **coding
    )
    assert result.summary["restarts"] == 1 and result.summary["compress_ratio"] > 1
    for shard in result.summary["kept"]:
        assert shard["applied"] == shard["gradients"] == 120
    states = sorted((tmp_path / "run" / "states" / f"worker-{rank}").glob("kept-*.safetensors"))
    assert states[-1].name == "kept-00000060.safetensors"
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert "going on after step 34" in logs and "begins anew" not in logs


def test_a_script_that_keeps_nothing_goes_through_its_loop_again(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    out = str(tmp_path / "x.pt")
    result = run(tmp_path, WITH_A_CLOSURE, out, workers=2, kill_worker="1@6", forks=forks)
    (shard,) = result.summary["kept"]
    assert shard["applied"] == shard["gradients"] == 20


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, forks: ForkServer | None) -> None:
    """Its script stops by itself, as one that a batch system's limit ends would."""
    text = IN_EPOCHS.replace(
        "    state.keep(", '    if not epoch % 4: open("x").close()\n    state.keep('
    )
    with pytest.raises(RoleError, match=r"failed at step 10: .*FileNotFoundError"):
        run(tmp_path, text, checkpoint_every=10, forks=forks)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    write(tmp_path, IN_EPOCHS)
    result = relaunch(tmp_path / "run", {}, say=lambda line: None, forks=forks)
    assert result.summary["status"] == "finished"
    (shard,) = result.summary["kept"]
    assert shard["applied"] == shard["gradients"] == 60


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import offbeat", "without a call of offbeat.distribute"),
        (HEAD + "offbeat.distribute(make_model(), None)", "takes one of torch's optimizers"),
        (
            HEAD + "m = make_model()\no = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)\n"
            "offbeat.distribute(m, o)",
            "a parameter that is not the model's",
        ),
        (
            HEAD + "m = make_model()\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
            "offbeat.distribute(m, o)\no.add_param_group({'params': []})",
            "has its parameter groups from the start",
        ),
        (
            HEAD + "m = make_model()\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
            "offbeat.distribute(m, o)\noffbeat.distribute(m, o)",
            "distribute was called before",
        ),
        (HEAD + "offbeat.State(epoch=0)", "comes after offbeat.distribute"),
        (HEAD + "offbeat.log(accuracy=0.5)", "scores come after offbeat.distribute"),
        (
            HEAD + "def make(base):\n    class Inner(base): pass\n    return Inner\n"
            "m = make_model()\noffbeat.distribute(m, make(torch.optim.SGD)(m.parameters()))",
            "cannot have the optimizer's class make.<locals>.Inner out of train.py",
        ),
        (
            HEAD + "m = make_model()\noffbeat.distribute(m, torch.optim.LBFGS(m.parameters()))\n"
            "compute(m, next(batches(1)))\no.step()",
            "LBFGS cannot be used: it computes the loss several times in a step",
        ),
        (
            HEAD + "m = make_model()\nm.register_buffer('b', torch.empty(3, device='meta'))\n"
            "offbeat.distribute(m, torch.optim.SGD(m.parameters()))",
            "buffer b is on meta, where it has no values",
        ),
    ],
    ids=[
        *(
            "no call",
            "no optimizer",
            "another model",
            "a late group",
            "twice",
            "early",
        ),
        *("early scores", "inside", "not served", "on meta"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    text: str, says: str, tmp_path: Path, forks: ForkServer | None
) -> None:
    with pytest.raises(ScriptRefusedError, match=says) as refused:
        run(tmp_path, text, forks=forks)
    assert "failed" not in str(refused.value)
    assert not (tmp_path / "run").exists(), "the next try may have that name"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise SystemExit(3)", "the script ended with exit code 3"),
        (
            HEAD + "m = make_model()\nm[0].requires_grad_(False)\n"
            "o = offbeat.distribute(m, torch.optim.SGD(m.parameters(), lr=0.1))\n"
            "m[0].requires_grad_(True)\ncompute(m, next(batches(1)))\no.step()",
            "0.weight has a gradient, and was frozen when offbeat.distribute was called",
        ),
    ],
    ids=["exit", "thawed"],
)
def test_a_script_that_fails_has_a_folder(
    text: str, says: str, tmp_path: Path, forks: ForkServer | None
) -> None:
    with pytest.raises(RoleError, match=says):
        run(tmp_path, text, forks=forks)
    assert (tmp_path / "run" / "summary.json").exists()


LOOP = (
    HEAD
    + """
import os
from pathlib import Path
model = make_model()
optimizer = offbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for number, batch in enumerate(batches(6)):
    loss = compute(model, batch)
    {when_computed}
    optimizer.step()
    {when_stepped}
    optimizer.zero_grad()
"""
)


def looping(when_computed: str = "pass", when_stepped: str = "pass") -> str:
    return LOOP.format(when_computed=when_computed, when_stepped=when_stepped)


def test_a_loss_that_is_told_and_not_finite_ends_the_run(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    text = looping("offbeat.log(loss=loss.item() if number < 3 else float('nan'))")
    with pytest.raises(NonFiniteLossError, match="the loss became nan in worker 0 at step 4"):
        run(tmp_path, text, forks=forks)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 3


def test_gradients_that_were_refused_are_told_in_the_last_line(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    text = looping("model[0].weight.grad.fill_(float('inf' if number else 0))")
    result = run(tmp_path, text, forks=forks)
    said = launch_line(result.summary, result.run_dir)
    assert "6 gradients (5 of them refused, as not finite)" in said


def test_changes_by_hand_are_told_once(
    tmp_path: Path, forks: ForkServer | None, capfd: pytest.CaptureFixture[str]
) -> None:
    by_hand = "torch.no_grad()(model[0].weight.clamp_)(-0.1, 0.1)"
    run(tmp_path, looping(when_stepped=by_hand), workers=1, forks=forks)
    assert capfd.readouterr().err.count("changed by something else than the optimizer's step") == 1
    run(tmp_path, looping(), workers=1, run_dir=str(tmp_path / "other"), forks=forks)
    assert "changed by" not in capfd.readouterr().err


def test_a_script_whose_process_vanishes_in_good_order_is_started_again(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    mark = tmp_path / "mark"
    text = looping(
        when_stepped=f"mark = Path({str(mark)!r}); offbeat.rank() and not mark.exists() "
        f"and (mark.touch(), os._exit(0))"
    )
    result = run(tmp_path, text, workers=2, forks=forks)
    assert result.summary["restarts"] == 1 and result.summary["status"] == "finished"
    (shard,) = result.summary["kept"]
    assert shard["applied"] == shard["gradients"] == 12


def test_a_script_that_only_says_how_it_is_used_leaves_nothing(
    tmp_path: Path, forks: ForkServer | None, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import argparse\nargparse.ArgumentParser().parse_args()"
    with pytest.raises(ScriptEndedError) as ended:
        run(tmp_path, text, "--help", forks=forks)
    assert ended.value.exit_code == 0 and not (tmp_path / "run").exists()
    assert "usage: train.py" in capfd.readouterr().out
    with pytest.raises(RoleError, match="the script ended with exit code 2"):
        run(tmp_path, text, "--wrong", forks=forks)
    shown = capfd.readouterr().err
    assert "unrecognized arguments: --wrong" in shown and "Traceback" not in shown


def test_what_fails_ahead_fails_where_it_is_asked_for(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    with pytest.raises(RoleError, match="failed at step 3: OSError: the disk is gone"):
        run(tmp_path, FAILING, forks=forks)


def test_ranks_that_train_different_models_are_told_so(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    text = HEAD + (
        "m = nn.Linear(3, 2 + offbeat.rank())\n"
        "o = offbeat.distribute(m, torch.optim.SGD(m.parameters(), lr=0.1))\n"
    )
    with pytest.raises(RoleError, match=r"worker 1 failed.*weight \[2, 3\].*weight \[3, 3\]"):
        run(tmp_path, text, workers=2, forks=forks)


def test_there_has_to_be_a_script_or_a_launched_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no script"):
        launch(str(tmp_path / "none.py"), [], {}, say=lambda line: None)
    assert not (tmp_path / "runs").exists()


SHORT = (
    HEAD
    + """
model = make_model()
optimizer = torch.optim.{made}
optimizer = offbeat.distribute(model, optimizer)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
for batch in batches(5):
    compute(model, batch)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])
"""
)


@pytest.mark.parametrize(
    "made",
    ["Adafactor(model.parameters(), lr=0.05)", "SGD(model.parameters(), lr=1)"],
    ids=["of whole tensors", "a rate that begins whole"],
)
def test_optimizers_of_other_kinds_come_to_the_same(
    made: str, tmp_path: Path, forks: ForkServer | None
) -> None:
    script = SHORT.replace("{made}", made)
    alone(tmp_path, script, str(tmp_path / "alone.pt"))
    run(tmp_path, script, str(tmp_path / "one.pt"), servers=2, forks=forks)
    expected, found = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "one"))
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    write_report([tmp_path / "run"])  # of a run that told no loss
    assert "learning rate over time" in (tmp_path / "run" / "report.html").read_text()
    first = 0.05 if "Adafactor" in made else 1.0
    pushes = [e for e in read_events(tmp_path / "run" / "events") if e["kind"] == "push"]
    for push in pushes:
        assert push["lr"] == pytest.approx(first * 0.5 ** (push["version"] - 1))
    assert len(pushes) == 10


WITH_ROWS = SHORT.replace(
    "model = make_model()",
    """
torch.sparse.check_sparse_tensor_invariants.disable()
model = nn.EmbeddingBag(40, 3, sparse=True, mode="sum")
nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(5))

def batches(count):
    generator = torch.Generator().manual_seed(offbeat.rank())
    for number in range(count):
        x = torch.randint(0, 40, (8, 3), generator=generator)
        yield x, x.sum(1) % 3
""",
)


@pytest.mark.parametrize(
    "made",
    ["SparseAdam(model.parameters(), lr=0.05)", "Adagrad(model.parameters(), lr=0.05)"],
)
def test_sparse_gradients_come_to_the_same(
    made: str, tmp_path: Path, forks: ForkServer | None
) -> None:
    script = WITH_ROWS.replace("{made}", made)
    alone(tmp_path, script, str(tmp_path / "alone.pt"))
    run(tmp_path, script, str(tmp_path / "one.pt"), servers=2, forks=forks)
    expected, found = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "one"))
    assert torch.equal(expected["weight"], found["weight"])


COMPILED = SHORT.replace("{made}", "SGD(model.parameters(), lr=1)").replace(
    "model = make_model()", 'model = torch.compile(make_model(), backend="eager")'
)


@pytest.mark.slow
def test_a_compiled_model_leaves_the_names_of_the_plain_one(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    alone(tmp_path, COMPILED, str(tmp_path / "alone.pt"))
    run(tmp_path, COMPILED, str(tmp_path / "one.pt"), servers=2, forks=forks)
    expected = torch.load(tmp_path / "alone.pt")
    assert all(name.startswith("_orig_mod.") for name in expected), "as torch has them"
    kept = offbeat.load(tmp_path / "run")
    assert {f"_orig_mod.{name}" for name in kept} == expected.keys()
    assert all(
        torch.equal(kept[name.removeprefix("_orig_mod.")], expected[name]) for name in expected
    )


def test_another_model_is_not_given_the_checkpoints_weights(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    text = IN_EPOCHS.replace("range(state.epoch, 6)", "range(state.epoch, 1)")
    run(tmp_path, text, forks=forks)
    write(tmp_path, text.replace("nn.Linear(6, 16), nn.Tanh()", "nn.Linear(6, 16)"))
    with pytest.raises(RoleError, match="the model is not the one in the checkpoint"):
        relaunch(tmp_path / "run", {}, say=lambda line: None, forks=forks)


def test_a_launched_run_is_no_recipes(
    tmp_path: Path, forks: ForkServer | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, IN_EPOCHS, forks=forks)
    path = str(tmp_path / "run")
    (tmp_path / "options.toml").write_text("steps = 3\n")
    config = str(tmp_path / "options.toml")
    for command, says in {
        ("train", "--resume", path): f"go on with offbeat launch --resume {path}",
        ("eval", path): "its script is what scores it",
        ("launch", "--config", config, "train.py"): "steps is for recipes",
    }.items():
        assert main(list(command)) == 2
        assert says in capsys.readouterr().err


IN_TWO_PARTS = (
    HEAD
    + """
class Scaled(nn.Module):  # a number of its own, and a layer that gets no gradient
    def __init__(self):
        super().__init__()
        self.layers, self.unused = make_model(), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.layers(x)

model = Scaled()
optimizer = torch.optim.{made}
source, target, first, last, when = sys.argv[1:6]
kept = torch.load(source) if source != "none" else None
if kept and when == "early":
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
optimizer = offbeat.distribute(model, optimizer)
if kept and when == "late":
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
seen = []
optimizer.register_step_post_hook(lambda *of_torch: seen.append(1))
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for batch in list(batches(12))[int(first):int(last)]:
    compute(model, batch)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
assert len(seen) == int(last) - int(first)
if offbeat.rank() == offbeat.world_size() - 1:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target)
"""
)


def same(found: Any, expected: Any, where: str = "") -> None:
    """All of it, to the bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(
    ("servers", "made"),
    [
        (
            3,
            "AdamW([{'params': model.layers[0].parameters()}, {'params': [model.scale, "
            "*model.layers[2:].parameters()], 'lr': 0.003}], lr=0.01, amsgrad=True)",
        ),
        (1, "SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)"),
        (3, "Adafactor(model.parameters(), lr=0.05)"),
        (1, "Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)"),
    ],
    ids=["AdamW", "SGD", "Adafactor", "Adagrad"],
)
def test_what_the_servers_keep_is_saved_and_loaded_like_torchs(
    made: str, servers: int, tmp_path: Path, forks: ForkServer | None
) -> None:
    """A script saves its optimizer half-way, launched or alone; alone or launched it goes on."""
    script = IN_TWO_PARTS.replace("{made}", made)

    def path(name: str) -> str:
        return str(tmp_path / f"{name}.pt")

    alone(tmp_path, script, "none", path("half alone"), "0", "6", "")
    alone(tmp_path, script, path("half alone"), path("whole alone"), "6", "12", "early")
    half, whole = torch.load(path("half alone")), torch.load(path("whole alone"))
    for number, (source, first, when) in enumerate(
        [("none", 0, ""), ("half", 6, "early"), ("half alone", 6, "late")]
    ):
        target = path("half" if not first else f"whole {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        source = path(source) if first else source
        arguments = (source, target, str(first), str(first + 6), when)
        run(folder, script, *arguments, servers=servers, forks=forks)
        same(torch.load(target), whole if first else half)
    alone(tmp_path, script, path("half"), path("again alone"), "6", "12", "early")
    same(torch.load(path("again alone")), whole)


@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_every_rank_can_ask_what_the_servers_keep(
    discipline: str, tmp_path: Path, forks: ForkServer | None
) -> None:
    script = IN_TWO_PARTS.replace("{made}", "Adam(model.parameters(), lr=0.01)")
    target = str(tmp_path / "last.pt")
    arguments = ("none", target, "0", "12", "")
    run(tmp_path, script, *arguments, workers=2, servers=2, discipline=discipline, forks=forks)
    kept = torch.load(target)["optimizer"]
    assert kept["state"][1]["exp_avg"].shape == (16, 6)
    steps = int(kept["state"][1]["step"])
    assert steps == 12 if discipline == "sync" else 12 <= steps <= 24


def test_another_state_does_not_come_between_steps(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    text = WITH_A_CLOSURE + "optimizer.load_state_dict(optimizer.state_dict())\n"
    with pytest.raises(RoleError, match="load_state_dict came after the first step"):
        run(tmp_path, text, str(tmp_path / "x.pt"), forks=forks)


def test_a_script_that_begins_anew_leaves_the_servers_their_state(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    """It loads what it did at the first time, and so do all ranks."""
    script = IN_TWO_PARTS.replace("{made}", "Adam(model.parameters(), lr=0.01)")
    half, last = str(tmp_path / "half.pt"), str(tmp_path / "last.pt")
    alone(tmp_path, script, "none", half, "0", "6", "")
    options = {"workers": 2, "discipline": "sync", "kill_worker": "0@3"}
    run(tmp_path, script, half, last, "6", "12", "late", forks=forks, **options)
    assert torch.load(last)["optimizer"]["state"][0]["step"] == 12


BEGUN_TWICE = """
import os, signal, sys, threading, time
import torch
import offbeat
from offbeat.loops import seat

model = torch.nn.Linear(2, 2)
optimizer = offbeat.distribute(model, torch.optim.Adam(model.parameters(), lr=0.0))
here = seat.taken

def die():
    if here.incarnation == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def die_when_the_run_begins():
    while not here.folder.model.exists():
        time.sleep(0.001)
    die()

state = offbeat.State(phase="new")
if sys.argv[2] == "begun":
    threading.Thread(target=die_when_the_run_begins, daemon=True).start()
loaded = optimizer.state_dict()
with torch.no_grad():
    model.weight.fill_(7.0)
for number, p in enumerate(model.parameters()):
    averages = {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
    loaded["state"][number] = {"step": torch.tensor(5.0), **averages}
optimizer.load_state_dict(loaded)
state.keep(phase="loaded")
if sys.argv[2] == "kept":
    die()
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[1])
"""


@pytest.mark.parametrize("when", ["begun", "kept"])
def test_rank_0_that_dies_before_the_run_has_begun_begins_it_later(
    when: str, tmp_path: Path, forks: ForkServer | None
) -> None:
    target = str(tmp_path / "last.pt")
    result = run(tmp_path, BEGUN_TWICE, target, when, servers=2, forks=forks)
    assert result.summary["restarts"] == 1
    found = torch.load(target)
    assert found["model"]["weight"].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert found["optimizer"]["state"][0]["step"] == 8


WITH_ITS_OWN_OPTIMIZER = (
    "from __future__ import annotations\n"
    + HEAD
    + """
DECAY = 0.9

def smoothed(value, gradient):
    return value.mul_(DECAY).add_(gradient, alpha=1 - DECAY)

class Base(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

class Signs(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter]
                    kept.setdefault("mean", torch.zeros_like(parameter))
                    step = smoothed(kept["mean"], parameter.grad).sign()
                    parameter.sub_(step, alpha=group["lr"])
        return loss

model = make_model()
optimizer = offbeat.distribute(model, Signs(model.parameters(), lr=0.02))
for batch in batches(6):
    loss = compute(model, batch)
    step = optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])
"""
)

OF_MATRICES = (
    HEAD
    + """
model = make_model()
matrices = [p for p in model.parameters() if p.dim() == 2]
optimizer = offbeat.distribute(model, torch.optim.Muon(matrices, lr=0.01))
for batch in batches(6):
    loss = compute(model, batch)
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])
"""
)
"""What is no matrix is not trained, frozen or not."""


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (WITH_ITS_OWN_OPTIMIZER, {"servers": 2}),
        (OF_MATRICES, {"servers": 2}),
        (OF_MATRICES.replace("matrices, lr", "[model[0].weight], lr"), {"servers": 3}),
        (OF_MATRICES.replace("matrices =", "model[2].requires_grad_(False)\nmatrices ="), {}),
    ],
    ids=["of the script's own", "of matrices", "a server with nothing to step", "frozen"],
)
def test_special_optimizers_come_to_the_same(
    script: str, options: dict[str, Any], tmp_path: Path, forks: ForkServer | None
) -> None:
    alone(tmp_path, script, str(tmp_path / "alone.pt"))
    run(tmp_path, script, str(tmp_path / "one.pt"), forks=forks, **options)
    same(torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "alone.pt"))


def test_lock_free_steps_nothing_but_what_the_optimizer_has(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    targets = [str(tmp_path / f"{name}.pt") for name in ("alone", "two")]
    alone(tmp_path, OF_MATRICES, targets[0])
    run(tmp_path, OF_MATRICES, targets[1], workers=2, discipline="lock-free", forks=forks)
    expected, found = torch.load(targets[0]), offbeat.load(tmp_path / "run")
    assert torch.equal(found["0.bias"], expected["0.bias"])
    assert not torch.equal(found["0.weight"], expected["0.weight"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("DECAY = 0.9", "DECAY = next(batches(1))[0]", "failed when it was tried out"),
        ("DECAY = 0.9", "with torch.no_grad():\n    DECAY = 0.9", "tried out: NameError"),
    ],
    ids=["a value that does not fit", "a value that is not there"],
)
def test_a_class_that_cannot_be_had_without_the_script_is_told_of(
    old: str, new: str, says: str, tmp_path: Path, forks: ForkServer | None
) -> None:
    with pytest.raises(ScriptRefusedError, match=says):
        run(tmp_path, WITH_ITS_OWN_OPTIMIZER.replace(old, new), "x", forks=forks)


SCORED = IN_EPOCHS + (
    "    accuracy = epoch / 10 if offbeat.is_master() else 1.0\n"
    "    offbeat.log(accuracy=accuracy, test_loss=torch.tensor(2.0 - epoch))\n"
    "    offbeat.log(bits=3.0 - epoch, higher_is_better=False)\n"
)


class Watching(offbeat.Callback):
    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []

    def on_evaluation(self, evaluation: Any) -> None:
        self.told.append(dict(evaluation.scores))


def test_what_rank_0_scores_is_what_the_run_is_judged_by(
    tmp_path: Path, forks: ForkServer | None
) -> None:
    watching, said = Watching(), []
    options = {"run_dir": str(tmp_path / "run"), "workers": 2, "threads": 1, "kill_worker": "0@35"}
    file = write(tmp_path, SCORED)
    result = launch(file, [], options, say=said.append, forks=forks, callbacks=[watching])
    summary = result.summary
    last = {"accuracy": 0.5, "loss": -3.0, "bits": -2.0}
    assert (summary["metric"], summary["test_accuracy"], result.test_loss) == ("accuracy", 0.5, -3)
    assert result.test_scores == last
    assert summary["higher_is_better"] == {"accuracy": True, "loss": False, "bits": False}
    assert summary["best"]["metric"] == 0.5
    assert watching.told[-1] == last and watching.told[-2].keys() == {"accuracy", "loss"}
    accuracies = [scores["accuracy"] for scores in watching.told]
    assert accuracies == sorted(accuracies)  # those of the first epochs were not told again
    assert any("test accuracy 0.5000, test loss -3.0000" in line for line in said)
    page = write_report([tmp_path / "run"], target=("bits", -1.0))[1].read_text()
    assert "test accuracy over time" in page and "test bits over time" in page


def test_tensorboard_shows_what_the_script_tells(tmp_path: Path, forks: ForkServer | None) -> None:
    text = SCORED.replace("compute(model, batch)\n", "offbeat.log(loss=compute(model, batch))\n")
    text = text.replace("range(state.epoch, 6)", "range(state.epoch, 1)")
    run(tmp_path, text, tensorboard=True, forks=forks)
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    points = {tag: shown.Scalars(tag)[-1] for tag in shown.Tags()["scalars"]}
    assert {(tag, point.step) for tag, point in points.items() if tag.startswith("test/")} == {
        *(("test/accuracy", 10), ("test/loss", 10), ("test/bits", 10))
    }
    assert points["loss"].value > 0


def compared(
    folder: Path, text: str, forks: ForkServer | None, *, resume: bool = False, **axes: Any
) -> Comparison:
    script = None if resume else describe_script(write(folder, text), ["--lr", "1"])
    out = folder / "compared"
    grid = make_grid({"threads": 1, "quiet": True}, axes, out if resume else None, script)
    return run_grid(grid, out, resume=resume, forks=forks)


def test_a_script_is_compared_by_what_it_tells(tmp_path: Path, forks: ForkServer | None) -> None:
    text = SCORED.replace("range(state.epoch, 6)", "range(state.epoch, 2)").replace(
        "epoch / 10", "(epoch + offbeat.seed()) / 10"
    )
    text += "assert sys.argv[1:] == ['--lr', '1']\n"
    axes = {"disciplines": ["sync", "lock-free"], "workers": [2], "servers": [2]}
    done = compared(tmp_path, text, forks, seeds=1, **axes)
    assert [summary["num_servers"] for summary in done.summaries.values()] == [2, 2]
    done = compared(tmp_path, text, forks, resume=True, seeds=2)
    found = {name: summary["test_accuracy"] for name, summary in done.summaries.items()}
    assert found == {
        f"{discipline}-2w-2s/seed-{seed}": 0.1 * (seed + 1)
        for discipline in ("sync", "lock-free")
        for seed in (0, 1)
    }
    assert not done.failed
    page = (tmp_path / "compared" / "report.md").read_text()
    assert "best test accuracy" in page and "| 0.15 ± 0.071 |" in page


def test_a_script_that_tells_no_score_is_told_how(
    tmp_path: Path, forks: ForkServer | None, capsys: pytest.CaptureFixture[str]
) -> None:
    script = describe_script(
        write(tmp_path, SHORT.replace("{made}", "SGD(model.parameters())")),
        [str(tmp_path / "x.pt")],
    )
    grid = make_grid({}, {"disciplines": ["sync"], "workers": [1], "seeds": 2}, None, script)
    run_grid(grid, tmp_path / "compared", forks=forks)
    assert capsys.readouterr().out.count("told no score") == 1
