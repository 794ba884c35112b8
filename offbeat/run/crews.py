"""What starts the roles where nobody said it, and which workers share a process.

Pure: it is told what every worker computes on. Called by `make_job`, which keeps the answer among
the job's facts, so that all processes of a run go by the same one.

    >>> one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    >>> find_crews([[one], [other], [one]])
    [[0, 2], [1]]
"""

from collections.abc import Sequence

import torch

from offbeat.config import AUTO, TrainConfig

Devices = Sequence[Sequence[torch.device]]
"""Of every worker, by its rank."""


def choose_engine(config: TrainConfig, devices: Devices) -> tuple[str, list[list[int]]]:
    """The engine, and the crews of several. Threads on one GPU share the data and the servers'
    parameters there; what is killed on purpose is a worker's own process, and so is what adds up
    gradients without servers."""
    if config.engine != AUTO:
        return config.engine, []
    if config.kills or not config.chosen.kind.served:
        return "local", []
    if shared_gpu(devices) is not None:
        return "inproc", []
    return "local", [crew for crew in find_crews(devices) if len(crew) > 1]


def find_crews(devices: Devices) -> list[list[int]]:
    """The ranks of each process: whoever computes on one and the same GPU, and on nothing else."""
    crews: dict[torch.device | int, list[int]] = {}
    for rank, own in enumerate(devices):
        crews.setdefault(_only_gpu(own) or rank, []).append(rank)
    return list(crews.values())


def shared_gpu(devices: Devices) -> torch.device | None:
    """The one GPU that all workers compute on, if they do."""
    found = {_only_gpu(own) for own in devices}
    return found.pop() if len(found) == 1 else None


def _only_gpu(own: Sequence[torch.device]) -> torch.device | None:
    return own[0] if len(own) == 1 and own[0].type == "cuda" else None
