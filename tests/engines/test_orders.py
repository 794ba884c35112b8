"""What somebody who looks on asks of a run is done, by every engine that can."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import offbeat
from offbeat import Recipe
from offbeat.config import make_config
from offbeat.engines.ordered import OrderTaker
from offbeat.recipes.callbacks import Callback, Steps
from offbeat.run import callbacks
from offbeat.run.checkpoint import list_checkpoints
from offbeat.run.events import read_events
from offbeat.run.job import Job
from offbeat.run.orders import Order, OrderBox
from offbeat.run.rundir import RunFolder

ENDLESS = 1_000_000
Done = Callable[[list[dict[str, Any]]], bool]


class Asks(Callback):
    """Gives one order after the other, each when the one before is seen to be done."""

    def __init__(self, run_dir: Path, *orders: tuple[Order, Done]) -> None:
        self.folder = RunFolder(run_dir)
        self.orders = list(orders)
        self.done: Done = lambda events: True

    def on_step(self, steps: Steps) -> None:
        if self.orders and self.done(list(read_events(self.folder.events))):
            order, self.done = self.orders.pop(0)
            OrderBox(self.folder.orders).give(order)


def given(events: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [e for e in events if e.get("phase") == "order" and e["what"] == what]


def is_given(what: str) -> Done:
    return lambda events: bool(given(events, what))


def has_new_checkpoint(events: list[dict[str, Any]]) -> bool:
    return any(e.get("phase") == "checkpoint" and e["version"] > 0 for e in events)


def steps_of(events: list[dict[str, Any]], worker: int) -> list[dict[str, Any]]:
    return [e for e in events if e["kind"] == "step" and e["worker"] == worker]


def others_go_on(events: list[dict[str, Any]]) -> bool:
    """Ten steps after worker 2's last one, when it was told to stop."""
    if not given(events, "stop_worker"):
        return False
    last_s = max(e["start_s"] for e in steps_of(events, 2))
    return sum(e["start_s"] > last_s for e in steps_of(events, 1)) > 10


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "TELL_EVERY_S", 0.05)


@pytest.mark.parametrize("discipline", ["sync", "bounded:1"])
def test_all_orders_in_one_process(discipline: str, run_dir: Path, recipe: Recipe) -> None:
    check_orders(run_dir, recipe, discipline=discipline, engine="inproc")


def check_orders(run_dir: Path, recipe: Recipe | str, **options: Any) -> None:
    """The discipline would wait for a worker that is gone, if nobody told it not to."""
    asks = Asks(
        run_dir,
        (Order("checkpoint"), has_new_checkpoint),
        (Order("slow", 1, 20.0), is_given("slow")),
        (Order("stop_worker", 0), is_given("stop_worker")),
        (Order("stop_worker", 2), others_go_on),
        (Order("stop"), is_given("stop")),
    )
    result = offbeat.train(
        recipe,
        workers=3,
        servers=2,
        steps=ENDLESS,
        eval_every=0,
        checkpoint_every=ENDLESS,
        run_dir=str(run_dir),
        quiet=True,
        callbacks=[asks],
        **options,
    )
    events = list(read_events(run_dir / "events"))
    assert result.interrupted and not asks.orders
    assert [e["version"] > 0 for e in events if e.get("phase") == "checkpoint"].count(True) == 2
    assert len(list_checkpoints(run_dir / "checkpoints")) == 3
    refused, done = given(events, "stop_worker")
    assert "the master's" in refused["refused"] and "refused" not in done
    assert not any(e.get("phase") == "restart" for e in events), "nobody takes its place"
    check_slowness(events, given(events, "slow")[0]["at_s"])


def check_slowness(events: list[dict[str, Any]], since_s: float) -> None:
    """A step of worker 1 takes many times as long as it did; 20 times, were it alone."""
    before = [e["compute_s"] for e in steps_of(events, 1) if e["start_s"] < since_s - 0.05]
    after = [e["compute_s"] for e in steps_of(events, 1) if e["start_s"] > since_s + 0.05]
    assert sorted(after)[len(after) // 2] > 4 * sorted(before)[len(before) // 2]


def test_what_lay_there_before_the_run_is_not_done(run_dir: Path, recipe: Recipe) -> None:
    result = offbeat.train(
        recipe, engine="inproc", steps=20, run_dir=str(run_dir), quiet=True, eval_every=0
    )
    OrderBox(run_dir / "orders").give(Order("stop"))
    result = offbeat.resume(run_dir, recipe, steps=40, quiet=True)
    assert not result.interrupted and result.summary["status"] == "finished"
    assert not any(e.get("phase") == "order" for e in read_events(run_dir / "events"))


def test_who_is_told_nonsense_goes_on(run_dir: Path, recipe: Recipe) -> None:
    class Nonsense(Callback):
        has_said = False

        def on_step(self, steps: Steps) -> None:
            if not self.has_said:
                (run_dir / "orders").mkdir()
                (run_dir / "orders" / "1.json").write_text('{"what": "rm"}')
            self.has_said = True

    asks = Asks(run_dir, (Order("stop"), is_given("stop")))
    result = offbeat.train(
        recipe,
        engine="inproc",
        steps=ENDLESS,
        run_dir=str(run_dir),
        quiet=True,
        eval_every=0,
        callbacks=[Nonsense(), asks],
    )
    events = list(read_events(run_dir / "events"))
    assert result.interrupted
    assert [bool(e.get("refused")) for e in events if e.get("phase") == "order"] == [True, False]


@pytest.mark.parametrize(
    ("discipline", "order", "why"),
    [
        ("sync", Order("stop_worker", 0), "the master's"),
        ("sync", Order("stop_worker", 5), "none that the run's engine looks after"),
        ("sync", Order("slow", 1, 2.0), None),
        ("allreduce", Order("stop_worker", 1), "no servers"),
        ("allreduce", Order("stop"), None),
    ],
)
def test_what_is_refused(discipline: str, order: Order, why: str | None, run_dir: Path) -> None:
    run_dir.mkdir()
    recorded: list[dict[str, Any]] = []
    done: list[Order] = []
    taker = OrderTaker(
        cast(Job, SimpleNamespace(config=make_config({"discipline": discipline}))),
        RunFolder(run_dir),
        record=lambda phase, **more: recorded.append({"phase": phase, **more}),
        carry_out=done.append,
        ranks=lambda: (0, 1),
    )
    OrderBox(run_dir / "orders").give(order)
    taker.look()
    assert recorded[0]["words"] == order.words and done == ([] if why else [order])
    assert why is None or why in recorded[0]["refused"]


@pytest.mark.slow
def test_without_servers_nobody_can_leave(run_dir: Path) -> None:
    asks = Asks(
        run_dir,
        (Order("stop_worker", 1), is_given("stop_worker")),
        (Order("stop"), is_given("stop")),
    )
    result = offbeat.train(
        "toy:recipe",
        discipline="allreduce",
        steps=ENDLESS,
        run_dir=str(run_dir),
        quiet=True,
        eval_every=0,
        callbacks=[asks],
    )
    events = list(read_events(run_dir / "events"))
    assert result.interrupted and "no servers" in given(events, "stop_worker")[0]["refused"]


@pytest.mark.slow
def test_all_orders_between_processes(run_dir: Path) -> None:
    check_orders(run_dir, "toy:recipe", discipline="sync", engine="local")
    events = list(read_events(run_dir / "events"))
    placed = {(e["role"], e["index"]): e["pid"] for e in events if e.get("phase") == "placed"}
    assert {("ps", 1), ("master", 0), ("worker", 2)} <= set(placed)
    assert len(set(placed.values())) == len(placed)
