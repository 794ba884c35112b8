"""A parameter server of Ray's actors, as the example of Ray's documentation has it: one actor has
the weights, the others make gradients of them, and all that travels is an object of Ray's."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat.bench.contenders import Part
from offbeat.cluster.fitting import Ask
from offbeat.cluster.rays import LOCAL, joined
from offbeat.recipes.base import load_recipe
from offbeat.run.job import Facts, Job
from offbeat.run.making import rejoin_job
from offbeat.run.rundir import RunFolder

LOOK_EVERY = 10
"""Rounds between two looks of the program at the weights, by which it is held back."""

Weights = dict[str, torch.Tensor]
Gradients = list[np.ndarray[Any, Any]]


def work(part: Part) -> None:
    workers, folder = part.job.config.workers, str(part.folder.path)
    asks = [Ask(who="an actor", resources={"CPU": 1.0}) for _ in range(workers + 1)]
    with joined(LOCAL, asks) as cluster:
        ray = cluster.ray
        server = ray.remote(_Server).remote(folder)
        trainers = [ray.remote(_Trainer).remote(folder, rank) for rank in range(workers)]
        steps = ray.get([trainer.num_steps.remote() for trainer in trainers])
        train = _train_async if part.name == "ray-async" else _train_in_rounds
        train(ray, server, trainers, steps)
        for rank, trainer in enumerate(trainers):
            log = part.log_of(rank)
            for start_s, end_s in ray.get(trainer.times.remote()):
                log.note(start_s, end_s)
            log.close()


def _train_in_rounds(ray: Any, server: Any, trainers: Sequence[Any], steps: Sequence[int]) -> None:
    weights = server.weights.remote()
    for number in range(min(steps)):
        gradients = [trainer.gradients_of.remote(weights) for trainer in trainers]
        weights = server.apply.remote(*gradients)
        if number % LOOK_EVERY == 0:
            ray.get(weights)


def _train_async(ray: Any, server: Any, trainers: Sequence[Any], steps: Sequence[int]) -> None:
    weights = server.weights.remote()
    under_way = {trainer.gradients_of.remote(weights): trainer for trainer in trainers}
    left = dict(zip(trainers, steps, strict=True))
    while under_way:
        (done,), _ = ray.wait(list(under_way))
        trainer = under_way.pop(done)
        weights = server.apply.remote(done)
        left[trainer] -= 1
        if left[trainer]:
            under_way[trainer.gradients_of.remote(weights)] = trainer
    ray.get(weights)


def _job(folder: str) -> Job:
    torch.set_num_threads(1)
    config, described = RunFolder(Path(folder)).read_config()
    return rejoin_job(config, load_recipe(config.recipe), Facts(**described["job"]), {})


class _Server:
    def __init__(self, folder: str) -> None:
        job = _job(folder)
        self._model = job.recipe.model()
        self._params = list(self._model.parameters())
        self._optimizer = job.optimizer.build(self._params, [0 for _ in self._params])

    def apply(self, *gradients: Gradients) -> Weights:
        """One update out of all of these."""
        summed = [np.stack(parts).sum(axis=0) for parts in zip(*gradients, strict=True)]
        self._optimizer.zero_grad()
        for param, gradient in zip(self._params, summed, strict=True):
            param.grad = torch.from_numpy(gradient)
        self._optimizer.step()
        return self.weights()

    def weights(self) -> Weights:
        return {name: value.cpu() for name, value in self._model.state_dict().items()}


class _Trainer:
    def __init__(self, folder: str, rank: int) -> None:
        self._job = _job(folder)
        self._rank = rank
        self._model = self._job.recipe.model()
        self._batches = self._job.batches(rank)
        self._times: list[tuple[float, float]] = []

    def num_steps(self) -> int:
        assert self._job.config.steps is not None, "a benchmark says how many"
        return self._job.config.steps

    def gradients_of(self, weights: Weights) -> Gradients:
        start_s = time.monotonic()
        self._model.load_state_dict(weights)
        _, batch = next(self._batches)
        self._model.zero_grad()
        self._job.recipe.loss(self._model, batch).backward()  # type: ignore[no-untyped-call]
        found = [p.grad.numpy() for p in self._model.parameters() if p.grad is not None]
        self._times.append((start_s, time.monotonic()))
        return found

    def times(self) -> list[tuple[float, float]]:
        return self._times
