"""Recorders that only pretend: what has logic in captured steps is tested without a GPU."""

from collections.abc import Callable

from offbeat.capture import NUM_WARM_UP, Recorder, T
from offbeat.data.batches import leaves


class Pretender(Recorder):
    """Does again what it should replay, into the tensors that it gave."""

    def __init__(self) -> None:
        self.num_replayed = 0

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        for _ in range(NUM_WARM_UP):
            work()
        result = work()

        def replay() -> None:
            self.num_replayed += 1
            for target, source in zip(leaves(result), leaves(work()), strict=True):
                target.copy_(source)

        return replay, result
