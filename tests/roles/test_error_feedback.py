"""What error feedback keeps: over connections, deaths at every moment of an exchange, other numbers
of servers, and whole runs over TCP."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_job, toy_recipe
from processes import LocalRun
from torch import Tensor, nn

import offbeat
from offbeat.accounts import APPLIED
from offbeat.api import _notices
from offbeat.bench.cells import Network as Speed
from offbeat.bench.linked import Trip, train_over
from offbeat.config import make_config
from offbeat.errors import ConnectionClosedError
from offbeat.roles.coding import Codecs, parted
from offbeat.roles.exchange import Exchange
from offbeat.roles.keeping import Keeper
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.transport.base import (
    HEADER_BYTES,
    CallEnd,
    Layout,
    Network,
    PushHeader,
    ReplyHeader,
    Slot,
    WelcomeHeader,
    WorkerEnd,
)

NUM_STEPS = 12


class DiedError(Exception):
    """What stands for a SIGKILL."""


class Shard:
    """What a server has of one worker: the sum of what it decoded, each step once."""

    def __init__(self, job: Job, index: int) -> None:
        lo, hi = job.slices[index]
        self.codec = job.make_codec()
        self.total = torch.zeros(hi - lo)
        self.settled = 0

    def take(self, header: PushHeader, wire: Tensor) -> None:
        if header.sequence <= self.settled:
            return
        assert self.codec is not None
        values = torch.zeros_like(self.total)
        self.codec.decode(wire, values)
        self.total += values
        self.settled = header.sequence


class Line(WorkerEnd):
    """To a shard that is there at once; `dies` ends the worker in the midst of a push."""

    def __init__(self, shard: Shard, layout: Layout, dies: Callable[[int], bool]) -> None:
        self.shard = shard
        self.welcome = WelcomeHeader(shard.settled, shard.settled)
        self.num_coded = layout.num_coded
        self.reply_slot = Slot.allocate(layout.reply)
        self._slot = Slot.allocate(layout.gradient)
        self._dies = dies
        self._pushed = 0

    @property
    def gradient_slot(self) -> Slot:
        return self._slot

    pushed_slot = gradient_slot

    def push(self, header: PushHeader) -> None:
        if self._dies(header.sequence):
            raise DiedError
        self._pushed = header.sequence
        self.shard.take(header, self._slot.filled(header).values)

    def wait_reply(self, timeout_s: float) -> ReplyHeader:
        return ReplyHeader(self._pushed, self.shard.settled, APPLIED)

    def beat(self) -> None:
        pass

    def finish(self, sequence: int) -> None:
        if self.shard.settled >= sequence:
            raise ConnectionClosedError("the run is finished", over=True)

    def close(self) -> None:
        pass


class Lines(Network):
    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.dies: dict[int, Callable[[int], bool]] = {}

    def connect(
        self, shard: int, hello: Any, layout: Layout, timeout_s: float, params: Tensor
    ) -> WorkerEnd:
        return Line(self.shards[shard], layout, self.dies.get(shard, lambda step: False))

    def connect_for_calls(self, *args: Any) -> CallEnd:
        raise AssertionError("nobody calls")


class Place:
    gradient: Tensor | None = None

    def __init__(self, size: int) -> None:
        self.landing = torch.zeros(size)

    def adopt(self, landing: Tensor) -> None:
        self.landing = landing

    def forget(self) -> None:
        pass


def gradient_of(step: int, size: int) -> Tensor:
    """Of whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-50, 50, (size,), generator=generator).float()


class Lives:
    """A worker's, one after the other: each goes on until it dies, as roles/worker.py does."""

    def __init__(self, folder: Path, codec: str, servers: int = 2) -> None:
        self.job = toy_job(workers=1, servers=servers, compress=codec, compress_always=True)
        self.size = self.job.slices[-1][1]
        self.shards = [Shard(self.job, index) for index in range(servers)]
        self.folder = folder
        self.log = logging.Logger("test")
        self.told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.told.append(record.getMessage())  # type: ignore[method-assign]
        self.log.addHandler(handler)
        self.residual = torch.zeros(self.size)

    @contextlib.contextmanager
    def exchange(self, network: Lines) -> Iterator[Exchange]:
        events = EventLog(self.folder / "worker-0.jsonl")
        with (
            contextlib.closing(events),
            Exchange(
                self.job,
                0,
                Place(self.size),
                network,
                events=events,
                log=self.log,
                clock=lambda: 0.0,
                stop=threading.Event(),
            ) as exchange,
        ):
            yield exchange

    def live(
        self,
        until: int = NUM_STEPS,
        *,
        dies_at: int = 0,
        where: str = "",
        folder: str | None = "state",
    ) -> None:
        """Up to a step, or to where it dies: before or after what it keeps is on disk, after one
        server has its push, or all of them."""
        network = Lines(self.shards)
        keeper = Keeper(None if folder is None else self.folder / folder, False, self.log)
        if where == "between shards":
            network.dies[1] = lambda step: step == dies_at
        with self.exchange(network) as exchange:
            done = exchange.join()
            kept = keeper.load(done)
            if kept is not None:
                assert exchange.codecs.restore(parted(kept[0])[0])
            for step in range(done + 1, until + 1):
                if self.steps(exchange, keeper, step, where if step == dies_at else ""):
                    return
            self.residual = torch.cat([*exchange.codecs.state().values()])

    def steps(self, exchange: Exchange, keeper: Keeper, step: int, where: str) -> bool:
        """One of them; whether it has died."""

        def made() -> None:
            if where == "before":
                raise DiedError
            keeper.save(step, exchange.codecs.state(), {})
            if where == "after":
                raise DiedError

        gradient = gradient_of(step, self.size)
        for slot, (lo, hi) in zip(exchange.gradient_slots, self.job.slices, strict=True):
            slot.values.copy_(gradient[lo:hi])
        try:
            exchange.push(step, [True] * 4, exchange.versions, made=made)
        except DiedError:
            return True
        if where == "pushed":
            return True
        assert exchange.await_all() == APPLIED
        return False

    @property
    def arrived(self) -> Tensor:
        return torch.cat([shard.total for shard in self.shards])

    def given(self, until: int = NUM_STEPS) -> Tensor:
        return torch.stack([gradient_of(step, self.size) for step in range(1, until + 1)]).sum(0)


@pytest.mark.parametrize("codec", ["topk:0.1", "bf16", "int8"])
@pytest.mark.parametrize("where", ["before", "after", "pushed"])
def test_nothing_is_lost_wherever_a_worker_dies(where: str, codec: str, tmp_path: Path) -> None:
    """And nothing comes twice: what arrived is to the bit what it would have been."""
    (tmp_path / "whole").mkdir()
    whole = Lives(tmp_path / "whole", codec)
    whole.live()
    lives = Lives(tmp_path, codec)
    for step in (1, 5, 6):
        lives.live(dies_at=step, where=where)
    lives.live()
    assert torch.equal(lives.arrived, whole.arrived)
    assert torch.equal(lives.residual, whole.residual)
    if codec != "int8":  # whose steps are fractions
        assert torch.equal(lives.arrived + lives.residual, lives.given())
    assert bool(lives.residual.any()) == (codec != "bf16"), "small whole numbers are exact there"
    assert not any("begins anew" in line for line in lives.told)


def test_a_push_that_reached_one_server_only_is_lost_to_the_other_one(tmp_path: Path) -> None:
    """As without a codec; what it left out is not lost."""
    lives = Lives(tmp_path, "topk:0.1")
    lives.live(dies_at=5, where="between shards")
    (lo, hi), before = lives.job.slices[1], lives.shards[1].total.clone()
    kept, _ = Keeper(tmp_path / "state", False, lives.log).load(5) or ({}, {})
    residual = kept[f"codec/topk:0.1/{lo}-{hi}/residual"]
    lost = lives.given(5)[lo:hi] - before - residual
    assert int((lost != 0).sum()) == round(0.1 * (hi - lo)), "what one push has"
    lives.live()
    missing = lives.given() - lives.arrived - lives.residual
    assert torch.equal(missing[lo:hi], lost) and not missing[:lo].any()


def test_without_what_was_kept_a_worker_begins_anew_and_says_so(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "topk:0.1")
    lives.live(dies_at=6, where="pushed", folder=None)
    lives.live(folder=None)
    assert any("begins anew after step 6: nothing was kept" in line for line in lives.told)
    missing = lives.given() - lives.arrived - lives.residual
    assert bool(missing.any()), "or there was nothing to keep"


def test_an_unusable_gradient_changes_nothing_that_is_kept(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "topk:0.1")
    with lives.exchange(Lines(lives.shards)) as exchange:
        exchange.join()
        lives.steps(exchange, Keeper(None, False, lives.log), 1, "")
        before = {name: tensor.clone() for name, tensor in exchange.codecs.state().items()}
        for slot in exchange.gradient_slots:
            slot.values.fill_(float("nan"))
        with contextlib.suppress(ValueError):  # this server looks at everything
            exchange.push(2, [True] * 4, exchange.versions, void=True)
        after = exchange.codecs.state()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_server_that_has_a_step_already_leaves_its_codec_as_it_is(tmp_path: Path) -> None:
    """Where another one was set back, and steps are done again for it."""
    lives = Lives(tmp_path, "topk:0.1")
    network, keeper = Lines(lives.shards), Keeper(tmp_path / "state", False, lives.log)
    with lives.exchange(network) as exchange:
        exchange.join()
        for step in range(1, 9):
            lives.steps(exchange, keeper, step, "")
            if step == 5:
                total = lives.shards[1].total.clone()
        lives.shards[1].total, lives.shards[1].settled = total, 5  # its newest checkpoint
        exchange._reached[1] = 5
        exchange.go_back(parted((keeper.load(5) or ({}, {}))[0])[0], 5)
        for step in range(6, 9):
            lives.steps(exchange, keeper, step, "")
        lives.residual = torch.cat([*exchange.codecs.state().values()])
    assert torch.equal(lives.arrived + lives.residual, lives.given(8))


def codecs_of(servers: int, label: str = "bf16", **options: Any) -> Codecs:
    return Codecs(toy_job(workers=1, servers=servers, compress=label, **options))


def test_what_is_kept_is_cut_as_the_shards_are_now() -> None:
    """Also where it is of some shards only, as where others share their memory."""
    size = toy_job().slices[-1][1]
    before, whole = codecs_of(3), torch.arange(1.0, size + 1)
    slices = toy_job(workers=1, servers=3).slices
    for codec, (lo, hi) in list(zip(before.of_shards, slices, strict=True))[1:]:
        assert codec is not None
        codec.load({"residual": whole[lo:hi]})
    whole[: slices[1][0]] = 0.0
    assert len(before.state()) == 2
    for servers in (1, 2, 3):
        after = codecs_of(servers)
        assert after.restore(before.state())
        found = [codec.state().get("residual") for codec in after.of_shards if codec is not None]
        parts = torch.cat([part for part in found if part is not None])
        assert torch.equal(parts, whole[size - len(parts) :]) and len(parts) >= size - slices[1][0]
    other = codecs_of(3, "int8")
    assert not other.restore(before.state()) and not other.keep


def test_what_is_no_vector_stays_with_its_shard(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(COUNTING)
    name = f"{tmp_path}/own.py:Counting"
    before = codecs_of(2, name)
    for number, codec in enumerate(before.of_shards):
        assert codec is not None
        codec.load({"count": torch.tensor([number + 5])})
    again = codecs_of(2, name)
    assert again.restore(before.state())
    assert [int(codec.state()["count"]) for codec in again.of_shards if codec] == [5, 6]
    assert not codecs_of(3, name).restore(before.state())


COUNTING = """
import torch
from offbeat.transport.codecs import Bf16


class Counting(Bf16):
    name = "counting"
    feeds_back = False
    count = torch.tensor([0])

    def state(self):
        return {"count": self.count}

    def load(self, state):
        self.count = state.get("count", self.count)
"""


# -- whole runs ------------------------------------------------------------------------------------


def train(folder: Path, **options: Any) -> offbeat.Result:
    recipe = options.pop("recipe", None) or toy_recipe()
    given = {"engine": "inproc", "workers": 1, "quiet": True, "threads": 1, **options}
    return offbeat.train(recipe, run_dir=folder, compress_always=True, **given)


def assert_same(found: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in other.items():
        assert torch.equal(found[name], value), name


def logs_of(run: Path) -> str:
    return "".join(path.read_text() for path in sorted((run / "logs").iterdir()))


@pytest.mark.parametrize("servers", [1, 3])
def test_a_run_goes_on_with_what_was_left_out(servers: int, tmp_path: Path) -> None:
    """To the bit, with other servers too: each value of bf16 is for itself."""
    options = {"compress": "bf16", "compress_replies": "delta"}
    whole = train(tmp_path / "whole", steps=13, servers=1, **options)
    train(tmp_path / "cut", steps=7, servers=2, **options)
    recipe = toy_recipe()
    cut = offbeat.resume(tmp_path / "cut", recipe, steps=13, servers=servers)
    assert_same(cut.state_dict(), whole.state_dict())
    assert "begins anew" not in logs_of(tmp_path / "cut")
    anew = offbeat.resume(tmp_path / "cut", recipe, steps=15, compress="int8")
    assert anew.summary["gradients"] == 15
    assert "begins anew after step 13: it is another codec's" in logs_of(tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "topk:0.05"])
def test_a_worker_that_was_killed_goes_on_as_if_it_had_not_been(codec: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", servers=2, compress=codec, steps=40)
    flags = ("--workers", "1", "--servers", "2", "--steps", "40", "--compress", codec)
    killed = LocalRun(tmp_path, *flags, "--compress-always", "--kill-worker", "0@23")
    assert killed.wait() == 0, killed.text()
    assert killed.summary()["restarts"] == 1
    log = logs_of(killed.run_dir)
    assert "going on after step 22" in log and "begins anew" not in log
    assert_same(offbeat.load(killed.run_dir), whole.state_dict())


def test_delta_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    wide = toy_recipe(lambda: nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 3)))
    options: dict[str, Any] = {"recipe": wide, "servers": 3, "epochs": 2}
    options |= {"discipline": "sync", "workers": 2}
    plain = train(tmp_path / "plain", compress="topk:0.1", **options)
    delta = train(tmp_path / "delta", compress="topk:0.1", compress_replies="delta", **options)
    assert_same(delta.state_dict(), plain.state_dict())
    before, after = (run.summary["bytes_down"] for run in (plain, delta))
    assert after < before / 2, "most parameters stay as they were"


@pytest.mark.parametrize(
    "options",
    [
        {"discipline": "sync", "backup_workers": 1, "workers": 3},
        {"discipline": "lock-free", "servers": 2},
        {"discipline": "bounded:1", "overlap": True},
        {"local_steps": 3, "servers": 2},
        {"discipline": "reply-apply", "accumulate": 2, "rule": "dc-asgd"},
    ],
    ids=str,
)
@pytest.mark.parametrize("codecs", [("int8", "bf16"), ("topk:0.1", "delta")], ids="+".join)
def test_runs_of_all_kinds_learn(
    codecs: tuple[str, str], options: dict[str, Any], tmp_path: Path
) -> None:
    compress, replies = codecs
    given = {"workers": 2, "compress": compress, "compress_replies": replies, **options}
    result = train(tmp_path / "r", recipe=toy_recipe(epochs=15), **given)
    assert (result.test_accuracy or 0) > 0.85
    summary = result.summary
    assert summary["compress_ratio"] > 1 and summary["codec_s"] > 0 < summary["server_codec_s"]
    for row in summary["workers"]:
        assert 0 < row["bytes_up"] < row["bytes_up"] * row["compress_ratio"]


@pytest.fixture
def over_tcp(tmp_path: Path) -> Callable[..., Trip]:
    def run(name: str, **options: Any) -> Trip:
        fixed = {"recipe": "toy:recipe", "engine": "local", "workers": 2, "threads": 1}
        config = make_config(fixed, {"run_dir": str(tmp_path / name), "quiet": True}, options)
        config = dataclasses.replace(config, eval_every=1000)  # checkpoints would cross it too
        return train_over(Speed(), config, None, limit_s=60)

    return run


@pytest.mark.slow
def test_over_tcp_less_travels_and_as_much_is_learned(over_tcp: Callable[..., Trip]) -> None:
    plain = over_tcp("plain")
    coded = over_tcp("coded", compress="topk:0.1", compress_replies="delta")
    for trip in (plain, coded):
        assert trip.record.status == "finished" and trip.record.gradients == 2 * 15 * 12
        carried = trip.record.carried.carried
        assert carried["up"] < trip.up < carried["up"] + 60_000, "and beats, handshakes, calls"
    scores = [trip.record.last_scores()["accuracy"] for trip in (plain, coded)]
    assert scores[1] > scores[0] - 0.05 and scores[1] > 0.85
    ups = [trip.record.carried.carried["up"] / trip.record.gradients for trip in (plain, coded)]
    num_values = 6 * 7 + 7 + 7 * 3 + 3
    assert ups[0] == HEADER_BYTES + 4 * num_values + 4
    assert ups[1] == HEADER_BYTES + 4 + 6 * round(0.1 * num_values) + 4


@pytest.mark.slow
def test_where_nothing_goes_over_tcp_that_is_said_once(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, "--workers", "2", "--steps", "6", "--compress", "int8")
    assert run.wait() == 0, run.text()
    assert run.text().count("--compress int8 does nothing here") == 1
    assert "--compress-always" in run.text()
    assert run.summary()["compress_ratio"] == 1 and run.summary()["codec_s"] == 0
    assert logs_of(run.run_dir).count("nothing is compressed") == 2
    forced = toy_job(compress="int8", compress_always=True, engine="local")
    cluster = toy_job(compress="int8", engine="cluster")
    for job in (toy_job(), forced, cluster):
        assert not [line for line in _notices(job, None) if "does nothing" in line]
