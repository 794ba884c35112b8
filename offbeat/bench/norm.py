"""`offbeat bench norm`: a step with the fast local response normalisation, and with torch's."""

import time

from torch import Tensor, nn

from offbeat.bench.processes import one_thread
from offbeat.bench.recipes import noise
from offbeat.bench.tables import Row
from offbeat.recipes import alexnet


def norm(*, batch_size: int, rounds: int) -> list[Row]:
    """A step of the recipe alexnet on the CPU, one thread: with torch's own local response
    normalisation, and with offbeat.layers' one."""
    batch = noise(batch_size, 3, alexnet.SIZE, alexnet.SIZE)
    ours, theirs = alexnet.AlexNet(), alexnet.AlexNet()
    for name in ("norm1", "norm2"):
        own = getattr(ours, name)
        setattr(theirs, name, nn.LocalResponseNorm(own.size, own.alpha, own.beta, own.k))
    with one_thread():
        times = [[_time_step(model, batch) for model in (theirs, ours)] for _ in range(1 + rounds)]
    torchs, mine = zip(*times[1:], strict=True)
    rows: list[Row] = []
    for name, found in (("torch's", torchs), ("offbeat's", mine)):
        row: Row = {"normalisation": name, "step, ms": [1e3 * time_s for time_s in found]}
        row["times as fast"] = [a / b for a, b in zip(torchs, found, strict=True)]
        rows.append(row)
    return rows


def _time_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    start_s = time.perf_counter()
    alexnet.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    taken_s = time.perf_counter() - start_s
    model.zero_grad()
    return taken_s
