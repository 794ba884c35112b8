"""Workers without servers, as threads: what they add up where their replicas lie on GPUs, and what
beside that."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_job, toy_recipe
from torch import Tensor, nn

from offbeat import SGD, Recipe
from offbeat.errors import ConnectionClosedError
from offbeat.roles import peers
from offbeat.roles.calls import Drain, Finish, Take, Want, state_from
from offbeat.roles.replica import PeerNetwork, Replica
from offbeat.roles.worker import Worker
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.shard import ShardState
from offbeat.streams import Mark
from offbeat.transport.base import Message

T = 20.0


class Place:
    """Where threads meet, and add up."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.lock = threading.Lock()
        self.begun: dict[int, list[tuple[Tensor, bool]]] = {}
        self.state: Any = None
        self.shapes: list[list[int]] = []
        """How long the tensors of each round are, as rank 0 has begun to add them up."""
        self.parted: list[int] = []


class ThreadGroup:
    """In place of torch's."""

    place: Place

    def __init__(
        self,
        meeting: str,
        *,
        rank: int,
        size: int,
        check: Callable[[], None],
        gpu: torch.device | None = None,
    ) -> None:
        assert gpu is None, "there is none here"
        self._rank = rank

    def meet(self, timeout_s: float) -> None:
        self.place.barrier.wait(T)

    def begin(self, sums: Sequence[Tensor], largest: Tensor | None = None) -> None:
        begun = [(tensor, False) for tensor in sums]
        if largest is not None:
            begun.append((largest, True))
        with self.place.lock:
            self.place.begun[self._rank] = begun
        if self._rank == 0:
            self.place.shapes.append([tensor.numel() for tensor, _ in begun])

    def begin_to_part(self) -> None:
        with self.place.lock:
            self.place.parted.append(self._rank)
        self.begin([])

    def wait(self) -> None:
        place = self.place
        if place.barrier.wait(T) == 0:
            for column in zip(*place.begun.values(), strict=True):
                values = torch.stack([tensor for tensor, _ in column])
                total = values.amax(0) if column[0][1] else values.sum(0)
                for tensor, _ in column:
                    tensor.copy_(total)
        place.barrier.wait(T)

    def hand_out(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        self.place.state = message, tensors
        self.place.barrier.wait(T)

    def take_over(self) -> tuple[Message, dict[str, Tensor]]:
        self.place.barrier.wait(T)
        message, tensors = self.place.state
        return message, {name: tensor.clone() for name, tensor in tensors.items()}

    def close(self) -> None:
        pass


class Late(Mark):
    """A device that writes what an update comes to when somebody waits for it, and no sooner."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def wait(self) -> None:
        self._target.fill_(7.0)


def test_the_master_is_shown_what_the_device_has_been_told_of(tmp_path: Path) -> None:
    job = toy_job(recipe(), discipline="allreduce", workers=1)
    with contextlib.closing(EventLog(tmp_path / "events")) as events:
        shard = job.make_shard(0)
        replica = Replica(shard, num_workers=1, incarnation=0, events=events, clock=lambda: 0.0)
        replica.load(job.initial_state(0, job.make_model()))
        shard.updaters[0].mark = Late(shard.params)
        replica.answer(Want(0))
        assert state_from(*replica.answer(Take())).tensors["params"].unique().tolist() == [7.0]


class Run:
    """Every worker a thread; the test is the master."""

    def __init__(self, job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job = job
        self.place = Place(job.config.workers)
        monkeypatch.setattr(peers, "Group", type("Here", (ThreadGroup,), {"place": self.place}))
        self.stop = threading.Event()
        self.networks = [PeerNetwork(f"file:{folder}") for _ in range(job.config.workers)]
        self.failures: list[BaseException] = []
        self.events = [EventLog(folder / f"{rank}.jsonl") for rank in range(job.config.workers)]
        self.workers = [self._make(rank) for rank in range(job.config.workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,)) for worker in self.workers
        ]

    def _make(self, rank: int) -> Worker:
        model = self.job.make_model()
        if rank == 0:
            self._first = self.job.initial_state(0, model)
        return Worker(
            self.job,
            rank,
            self.job.make_towers(rank, model),
            self.networks[rank],
            events=self.events[rank],
            log=logging.getLogger("test"),
            clock=lambda: 1.5,
            stop=self.stop,
        )

    def _work(self, worker: Worker) -> None:
        try:
            worker.run()
        except BaseException as error:
            self.failures.append(error)
            self.place.barrier.abort()

    @property
    def replicas(self) -> list[Replica]:
        return [network.replica for network in self.networks if network.replica is not None]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self.replicas[0].load(self._first)

    def end(self) -> None:
        self.replicas[0].answer(Finish("through"))
        for thread in self._threads:
            thread.join(T)
        for events in self.events:
            events.close()
        assert not self.failures, self.failures

    def snapshot(self, version: int) -> ShardState:
        """As the master has it."""
        master = self.replicas[0]
        master.answer(Want(version))
        while True:
            try:
                return state_from(*master.answer(Take()))
            except ConnectionClosedError:
                threading.Event().wait(0.01)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def recipe() -> Recipe:
    return toy_recipe(model=normed, optimizer=SGD(lr=0.05, momentum=0.9), ema=0.9)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"accumulate": 2}])
def test_what_is_said_may_be_added_up_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """As it is where gradients are on a GPU: there are no fewer rounds, and none comes to anything
    else, to the bit."""
    found = []
    for apart in (False, True):
        monkeypatch.setattr(peers, "is_apart", lambda layout, apart=apart: apart)
        job = toy_job(recipe(), discipline="allreduce", workers=2, steps=12, seed=3, **options)
        run = Run(job, tmp_path, monkeypatch)
        run.start()
        snapshot = run.snapshot(5)
        run.end()
        assert 5 <= snapshot.version <= 12
        one, other = run.replicas
        assert torch.equal(one.shard.params, other.shard.params) and one.shard.version == 12
        assert sorted(run.place.parted) == [0, 1], "all wait for each other before one leaves"
        layout, num_said = job.layout(0), 2 + 4 * 2 + len(job.manifest.tensors)
        values = layout.num_elements + layout.num_floats
        sums = [values, num_said] if apart else [values + num_said]
        rounds = [*[[*sums, layout.num_ints]] * 13, []]  # the last one is everybody's of nothing
        assert run.place.shapes == rounds
        found.append(one.shard.state({}))
    for name, tensor in found[0].tensors.items():
        assert torch.equal(tensor, found[1].tensors[name]), name


@pytest.mark.parametrize("apart", [False, True])
def test_all_leave_after_the_same_round_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    monkeypatch.setattr(peers, "is_apart", lambda layout: apart)
    job = toy_job(recipe(), discipline="allreduce", workers=3, steps=10**6)
    run = Run(job, tmp_path, monkeypatch)
    run.start()
    run.snapshot(3)
    run.replicas[0].answer(Drain())
    run.end()
    versions = {replica.shard.version for replica in run.replicas}
    assert len(versions) == 1 and versions != {10**6}
    assert sorted(run.place.parted) == [0, 1, 2] and run.place.shapes[-1] == []
