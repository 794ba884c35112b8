"""Hogwild as PyTorch's example has it: processes with an optimizer each, over one model in memory
that all of them share."""

import time
from typing import Any

import torch.multiprocessing as mp
from torch import nn

from offbeat.bench.contenders import Part
from offbeat.errors import RunError


def work(part: Part) -> None:
    model = part.job.recipe.model()
    model.share_memory()
    context: Any = mp.get_context("fork")  # what the job is made of cannot be sent
    ranks = range(part.job.config.workers)
    begin = context.Barrier(len(ranks))
    workers = [
        context.Process(target=_train, args=(part, rank, model, begin), daemon=True)
        for rank in ranks
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RunError("a worker failed")


def _train(part: Part, rank: int, model: nn.Module, begin: Any) -> None:
    job, log = part.job, part.log_of(rank)
    params = list(model.parameters())
    optimizer = job.optimizer.build(params, [0 for _ in params])
    begin.wait()
    for _, batch in job.batches(rank):
        start_s = time.monotonic()
        optimizer.zero_grad()
        job.recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        log.note(start_s)
    log.close()
