"""A parameter server on torch's RPC, as PyTorch's tutorial on asynchronous executions builds it: it
gathers the gradients of several trainers, makes one update, and answers all of them with its model.
"""

import os
import threading
import time
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from offbeat.bench.contenders import Part
from offbeat.bench.processes import TIMEOUT_S
from offbeat.run.job import Job
from offbeat.transport.group import INTERFACE_VARIABLE, LOOPBACK

SERVER = "server"


def work(part: Part) -> None:
    os.environ[INTERFACE_VARIABLE] = os.environ["TP_SOCKET_IFNAME"] = LOOPBACK
    workers, rank = part.job.config.workers, part.index
    is_server = rank == workers
    if is_server:
        _Server.only = _Server(part.job, 1 if part.name == "rpc-async" else workers)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        SERVER if is_server else f"trainer-{rank}",
        rank=rank,
        world_size=workers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{part.store}", rpc_timeout=TIMEOUT_S
        ),
    )
    if not is_server:
        _train(part)
    rpc.shutdown()  # waits until the others are through


class _Server:
    only: "_Server"
    """That of this process."""

    def __init__(self, job: Job, num_per_update: int) -> None:
        self.model = job.recipe.model()
        self._params = list(self.model.parameters())
        for param in self._params:
            param.grad = torch.zeros_like(param)
        self._optimizer = job.optimizer.build(self._params, [0 for _ in self._params])
        self._num_per_update = num_per_update
        self._num_here = 0
        self._lock = threading.Lock()
        self._updated: torch.futures.Future[nn.Module] = torch.futures.Future()

    def add(self, gradients: list[Tensor]) -> "torch.futures.Future[nn.Module]":
        """The model, once there is an update that these are in."""
        with self._lock:
            for param, gradient in zip(self._params, gradients, strict=True):
                assert param.grad is not None
                param.grad += gradient
            self._num_here += 1
            updated = self._updated
            if self._num_here == self._num_per_update:
                self._update()
            return updated

    def _update(self) -> None:
        for param in self._params:
            assert param.grad is not None
            param.grad /= self._num_per_update
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        self._updated.set_result(self.model)
        self._updated, self._num_here = torch.futures.Future(), 0


def _model() -> nn.Module:
    return _Server.only.model


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _update_and_fetch(gradients: list[Tensor]) -> "torch.futures.Future[nn.Module]":
    return _Server.only.add(gradients)


def _train(part: Part) -> None:
    log = part.log_of(part.index)
    model: Any = rpc.rpc_sync(SERVER, _model)
    part.meet()
    for _, batch in part.job.batches(part.index):
        start_s = time.monotonic()
        part.job.recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        gradients = [param.grad for param in model.parameters()]
        model = rpc.rpc_sync(SERVER, _update_and_fetch, args=(gradients,))
        log.note(start_s)
    log.close()
