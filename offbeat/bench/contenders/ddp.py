"""torch's DistributedDataParallel, on gloo."""

import datetime
import os
import time
from typing import Any

import torch
from torch import nn

from offbeat.bench.contenders import Part
from offbeat.bench.processes import TIMEOUT_S
from offbeat.transport.group import INTERFACE_VARIABLE, LOOPBACK


class _Replica(nn.parallel.DistributedDataParallel):
    """A recipe's loss may look at layers of its model; it finds them here as there."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def work(part: Part) -> None:
    job, rank, log = part.job, part.index, part.log_of(part.index)
    os.environ[INTERFACE_VARIABLE] = LOOPBACK
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{part.store}",
        rank=rank,
        world_size=job.config.workers,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    model = _Replica(job.recipe.model())
    params = list(model.parameters())
    optimizer = job.optimizer.build(params, [0 for _ in params])
    for _, batch in job.batches(rank):
        start_s = time.monotonic()
        optimizer.zero_grad()
        job.recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        log.note(start_s)
    torch.distributed.destroy_process_group()
    log.close()
