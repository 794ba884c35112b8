"""Servers on the GPU that workers compute on: the order of things on the CPU, the rest on a GPU."""

import functools
import itertools
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Spiced, cross_entropy, toy_data, toy_job, toy_recipe
from rig import Hand, in_threads, rig
from torch import nn

import offbeat
from offbeat import towers
from offbeat.bench.contenders.ceiling import NoNetwork
from offbeat.bench.processes import silent_log
from offbeat.engines import inproc
from offbeat.errors import ConfigError, NonFiniteLossError, RoleError
from offbeat.reading import Reading
from offbeat.roles import sessions
from offbeat.roles.worker import Worker
from offbeat.rules import Gradient
from offbeat.run.events import EventLog, read_events
from offbeat.shard import Updater
from offbeat.streams import NO_MARK, CpuStreams, Mark, make_mark, make_streams
from offbeat.towers import CPU, Towers
from offbeat.transport import base
from offbeat.transport.base import Layout, Slot
from offbeat.transport.inproc import InprocListener

GPU = torch.device("cuda", 0)


class Noted(Mark):
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def set(self) -> None:
        self.seen.append("set")

    def order(self) -> None:
        self.seen.append("order")


def test_on_the_cpu_there_is_nothing_to_order() -> None:
    assert make_mark(CPU) is NO_MARK and isinstance(make_streams(CPU), CpuStreams)
    slot = Slot.allocate(Layout(4, 1))
    assert slot.mark is NO_MARK and not slot.is_on_device


@pytest.mark.parametrize("discipline", ["sync", "apply-reply", "reply-apply", "lock-free"])
def test_every_reply_is_marked_by_the_server_that_filled_it(
    discipline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(base, "make_mark", lambda device: Noted(seen))
    with rig(tmp_path, discipline, 1) as made:
        hand = made.join(0)
        joined = ["set", "order", "set"]
        assert seen == joined, "what the worker made, and the welcome's parameters after that"
        for number in range(1, 4):
            hand.exchange(1.0)
            assert seen == joined + ["set"] * number
        hand.link.close()


def test_a_worker_orders_its_work_after_every_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(base, "make_mark", lambda device: Noted(seen))
    offbeat.train(
        toy_recipe(), run_dir=tmp_path / "run", engine="inproc", workers=1, servers=1, steps=5
    )
    assert seen == ["set", "order", *(["set", "order"] * 6)]


@pytest.mark.parametrize("transport", ["inproc", "attended"])
def test_what_a_locked_server_tells_a_device_comes_one_after_the_other(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sessions, "make_mark", lambda device: Noted(seen))
    with rig(tmp_path, "apply-reply", 3, transport=transport) as made:
        hands = made.join_all(3)

        def push(hand: Hand) -> None:
            for _ in range(30):
                hand.exchange(1.0)

        in_threads(*(functools.partial(push, hand) for hand in hands))
        made.snapshot()
        assert made.shard.version == 90
        for hand in hands:
            hand.link.close()
    assert seen == ["order", "set"] * (3 + 90 + 1), "joins, pushes, the snapshot"


def test_a_lock_free_server_orders_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sessions, "make_mark", lambda device: Noted(seen))
    with rig(tmp_path, "lock-free", 1, transport="attended") as made:
        hand = made.join(0)
        hand.exchange(1.0)
        hand.link.close()
    assert seen == []


def test_a_gradient_that_is_lent_is_pushed_where_it_lies(tmp_path: Path) -> None:
    with rig(tmp_path, "reply-apply", 1, transport="attended") as made:
        hand = made.join(0)
        mine = torch.zeros(4)
        hand.link.lend(mine)
        for number in range(1, 4):
            hand.exchange(float(number))
            assert mine.tolist() == [number] * 4
        assert made.shard.params.tolist() == [-6] * 4, "each is in before the next"
        hand.link.close()
    with rig(tmp_path, "reply-apply", 1) as made:
        hand = made.join(0)
        hand.link.lend(mine)
        hand.exchange(7.0)
        assert mine.tolist() == [3] * 4, "the server may be at it while the next is computed"
        hand.link.close()


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do themselves what the servers do for them, as on a GPU."""
    monkeypatch.setattr(inproc, "InprocListener", lambda attended: InprocListener(attended=True))


@pytest.mark.usefixtures("attended")
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "discipline", ["sync", "sync:1", "apply-reply", "reply-apply", "lock-free", "bounded:1"]
)
def test_workers_that_do_the_servers_work_lose_nothing(
    discipline: str, servers: int, tmp_path: Path
) -> None:
    result = offbeat.train(
        toy_recipe(),
        run_dir=tmp_path / "run",
        engine="inproc",
        discipline=discipline,
        workers=3,
        servers=servers,
        steps=40,
        checkpoint_every=7,
    )
    assert result.summary["gradients"] == 120 and result.summary["lost_updates"] == 0
    for shard in result.summary["kept"]:
        assert shard["applied"] + shard["dropped"] == 120


@pytest.mark.usefixtures("attended")
@pytest.mark.parametrize("discipline", ["sync", "apply-reply", "lock-free"])
def test_one_of_them_that_fails_ends_the_run(discipline: str, tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        if threading.current_thread().name == "worker-1":
            raise ZeroDivisionError("as it happens")
        return cross_entropy(model, batch)

    with pytest.raises(RoleError, match=r"worker 1 failed at step 1.*as it happens"):
        offbeat.train(
            toy_recipe(loss=loss),
            run_dir=tmp_path / "run",
            engine="inproc",
            discipline=discipline,
            workers=2,
            steps=10_000,
        )


@pytest.mark.usefixtures("attended")
def test_an_update_that_fails_in_a_workers_thread_is_the_servers_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(self: Any, gradients: Any) -> int:
        raise ZeroDivisionError("in the update")

    monkeypatch.setattr(Updater, "apply", apply)
    with pytest.raises(RoleError, match=r"server 0 failed.*in the update"):
        offbeat.train(toy_recipe(), run_dir=tmp_path / "run", engine="inproc", steps=10)


@pytest.mark.usefixtures("attended")
def test_while_somebody_is_ahead_of_a_device_a_push_is_no_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are where reports look for them, and add up."""
    monkeypatch.setattr(Towers, "is_told", property(lambda self: True))
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    steps: list[Any] = []
    monkeypatch.setattr(EventLog, "record_line", lambda self, write, *v: steps.append(v[-1]))
    job = toy_job(workers=1, engine="inproc", steps=3)
    events = EventLog(tmp_path / "events.jsonl")
    worker = Worker(
        job,
        0,
        job.make_towers(0, job.make_model()),
        NoNetwork(),
        events=events,
        log=silent_log(),
        clock=lambda: float(next(now)),
        stop=threading.Event(),
    )
    worker._exchange.join()
    worker._train()
    events.close()
    for step in steps:
        assert (step.compute_s, step.prepare_s, step.exchange_s) == (2, 1, 1)


class Late(Reading):
    """What it was told to take is there when it was waited for, and not before."""

    def take(self, loss: torch.Tensor, gradient: torch.Tensor) -> None:
        self._numbers.fill_(torch.nan)
        self._taken = (loss.clone(), gradient.clone())

    def wait(self) -> tuple[float, bool]:
        super().take(*self._taken)
        return super().wait()


@pytest.mark.usefixtures("attended")
def test_a_worker_that_is_ahead_of_its_device_does_what_one_that_is_not_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch is made, and the last step written down, while a device is at work."""
    options: dict[str, Any] = {"engine": "inproc", "workers": 1, "steps": 30, "quiet": True}
    options |= {"devices": "cpu,cpu", "batch_size": 10}
    plain = offbeat.train(toy_recipe(), run_dir=tmp_path / "plain", **options)
    monkeypatch.setattr(towers, "Reading", Late)
    monkeypatch.setattr(Towers, "is_told", property(lambda self: True))
    ahead = offbeat.train(toy_recipe(), run_dir=tmp_path / "ahead", **options)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ahead.state_dict()[name])
    steps = [
        [
            (e["step"], e["epoch"], e["loss"], e["examples"])
            for e in read_events(run / "events")
            if e["kind"] == "step"
        ]
        for run in (tmp_path / "plain", tmp_path / "ahead")
    ]
    assert len(steps[0]) == 30 and steps[0] == steps[1]


def test_the_loss_of_a_worker_that_is_ahead_is_looked_at_before_its_gradient_goes_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, labels = toy_data(200)
    inputs[130] = torch.nan
    recipe = toy_recipe(data=lambda config: ((inputs, labels), None))
    monkeypatch.setattr(towers, "Reading", Late)
    monkeypatch.setattr(Towers, "is_told", property(lambda self: True))
    with pytest.raises(NonFiniteLossError, match=r"worker 0 at step \d+; 6 of the .* in its") as e:
        offbeat.train(
            recipe,
            run_dir=tmp_path / "run",
            engine="inproc",
            workers=1,
            devices="cpu,cpu",
            batch_size=5,
            epochs=1,
        )
    events = list(read_events(tmp_path / "run" / "events"))
    (failed_at,) = map(int, re.findall(r"at step (\d+)", str(e.value)))
    assert sum(event["kind"] == "push" for event in events) == failed_at - 1


def test_a_loss_that_is_no_number_is_told_where_data_cannot_be_gone_through_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, labels = toy_data(40)
    inputs[30] = torch.nan

    class Once(torch.utils.data.IterableDataset[Any]):
        is_used = False

        def __iter__(self) -> Any:
            assert not self.is_used
            self.is_used = True
            return zip(inputs, labels, strict=True)

    monkeypatch.setattr(towers, "Reading", Late)
    monkeypatch.setattr(Towers, "is_told", property(lambda self: True))
    with pytest.raises(NonFiniteLossError, match=r"worker 0 at step 4; a lower --lr is the usual"):
        offbeat.train(
            toy_recipe(data=lambda config: (Once(), None), batch_size=5),
            run_dir=tmp_path / "run",
            engine="inproc",
            workers=1,
            devices="cpu,cpu",
            epochs=1,
        )


def test_a_lock_free_reply_is_mixed_while_another_ones_update_is_under_way() -> None:
    shard = toy_job(discipline="lock-free", workers=2).make_shard(0)
    mine, other = shard.make_updater(shared=True), shard.make_updater(shared=True)
    slot = Slot.allocate(Layout(len(shard.params), 1))
    for updater in (mine, other):
        updater.apply([Gradient(torch.zeros_like(shard.params))])

    class Pending(Mark):
        def is_reached(self) -> bool:
            return False

    for updater, found in ((None, (2, False)), (mine, (2, False)), (other, (1, True))):
        mine.mark = other.mark = NO_MARK
        if updater is not None:
            updater.mark = Pending()
        assert shard.read(slot.values, slot.floats, slot.ints, mine) == found
    assert shard.version == 2


def test_the_servers_are_on_the_cpu_where_workers_share_no_gpu() -> None:
    assert toy_job(workers=2, engine="inproc").server_device == CPU
    assert toy_job(workers=2, engine="inproc").layout(0).device == CPU
    with pytest.raises(ConfigError, match="the servers cannot be on cuda"):
        toy_job(workers=2, server_device="cuda")


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"engine": "inproc", "device": "cuda:0"}, GPU),
        ({"engine": "inproc", "device": "cuda:0", "server_device": "cpu"}, CPU),
        ({"engine": "local", "device": "cuda:0"}, CPU),
        ({"engine": "inproc"}, CPU),  # two GPUs, of which each worker gets one
        ({"engine": "inproc", "workers": 1}, GPU),
        ({"engine": "inproc", "devices": "cuda:0,cuda:1"}, CPU),
    ],
)
def test_they_are_on_the_gpu_that_all_share(
    options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert toy_job(**{"workers": 2, **options}).server_device == device


# -- on a GPU --------------------------------------------------------------------------------------

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def train(run_dir: Path, **options: Any) -> offbeat.Result:
    recipe = toy_recipe(
        model=options.pop("model", Spiced), optimizer=options.pop("optimizer", None)
    )
    given = {"engine": "inproc", "workers": 1, "steps": 40, "quiet": True, **options}
    return offbeat.train(recipe, run_dir=run_dir, **given)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name].float(), other[name].float(), atol=1e-4) for name in one
    )


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("servers", [1, 3])
    @pytest.mark.parametrize("discipline", ["sync", "apply-reply", "reply-apply", "lock-free"])
    @pytest.mark.parametrize(
        "optimizer", [offbeat.SGD(lr=0.1), offbeat.SGD(lr=0.1, momentum=0.9), offbeat.Adam(lr=0.01)]
    )
    def test_one_worker_gets_the_parameters_of_servers_on_the_cpu(
        self, tmp_path: Path, servers: int, discipline: str, optimizer: Any
    ) -> None:
        class Plain(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(
                    nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
                )

        found = [
            train(
                tmp_path / device / capture,
                server_device=device,
                capture=capture,
                servers=servers,
                discipline=discipline,
                optimizer=optimizer,
                model=Plain,
            ).state_dict()
            for device in ("cpu", "cuda")
            for capture in ("off", "auto")
        ]
        assert all(close(found[0], other) for other in found[1:])

    @pytest.mark.parametrize("discipline", ["sync", "apply-reply", "lock-free", "bounded:1"])
    def test_several_workers_learn_and_lose_nothing(self, tmp_path: Path, discipline: str) -> None:
        result = train(
            tmp_path / "run", workers=4, servers=2, discipline=discipline, server_device="cuda"
        )
        assert result.test_accuracy is not None and result.test_accuracy > 0.8
        summary = result.summary
        assert summary["lost_updates"] == 0 and summary["gradients"] == 160
        for shard in summary["kept"]:
            assert shard["applied"] == 160

    @pytest.mark.parametrize("servers", [1, 2])
    def test_several_workers_in_rounds_get_the_parameters_of_a_cpu(
        self, tmp_path: Path, servers: int
    ) -> None:
        options: dict[str, Any] = {"workers": 4, "servers": servers, "discipline": "sync"}
        options |= {"model": lambda: nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))}
        found = [
            train(tmp_path / device, device=device, **options).state_dict()
            for device in ("cpu", "cuda")
        ]
        assert close(*found)

    @pytest.mark.parametrize("discipline", ["apply-reply", "reply-apply", "bounded:1", "sync"])
    def test_every_gradient_of_several_workers_is_in(self, tmp_path: Path, discipline: str) -> None:
        """Each of them ones, at a rate of one: the parameters count them."""

        class Zeros(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(1 << 20))

        recipe = toy_recipe(
            model=Zeros,
            loss=lambda model, batch: model.weight.sum(),
            metric=lambda model, batch: (float(model.weight[0]), 1),
            optimizer=offbeat.SGD(lr=1.0),
        )
        result = offbeat.train(
            recipe,
            run_dir=tmp_path / "run",
            engine="inproc",
            workers=4,
            steps=300,
            discipline=discipline,
            rule="sum" if discipline == "sync" else "mean",
        )
        (weight,) = result.state_dict().values()
        assert bool((weight == -1200).all())

    def test_a_run_is_resumed_on_the_other_kind_of_memory(self, tmp_path: Path) -> None:
        momentum = offbeat.SGD(lr=0.1, momentum=0.9)
        whole = train(tmp_path / "whole", steps=40, optimizer=momentum, server_device="cuda")
        train(tmp_path / "part", steps=20, optimizer=momentum, server_device="cuda")
        resumed = offbeat.resume(
            tmp_path / "part",
            recipe=toy_recipe(model=Spiced, optimizer=momentum),
            steps=40,
            server_device="cpu",
        )
        assert resumed.summary["updates"] == 40
        assert whole.test_accuracy is not None and resumed.test_accuracy is not None
