"""What an engine does about orders (run/orders.py): it takes them out of the run's folder, refuses
what cannot be done here, has the rest carried out, and writes all of it down.

Each engine looks every time that it looks after its roles.
"""

from collections.abc import Callable, Collection
from typing import Any

from offbeat.run.job import Job
from offbeat.run.orders import CHECKPOINT, STOP, STOP_WORKER, Order, OrderBox
from offbeat.run.rundir import RunFolder


class OrderTaker:
    """`record` writes an event down, `carry_out` does what was asked for, `ranks` are the workers
    that this engine can tell anything."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        *,
        record: Callable[..., None],
        carry_out: Callable[[Order], None],
        ranks: Callable[[], Collection[int]],
    ) -> None:
        self._is_served = job.config.chosen.kind.served
        self._box = OrderBox(folder.orders)
        self._record = record
        self._carry_out = carry_out
        self._ranks = ranks
        self._box.take()  # what was meant for an engine that is gone

    def look(self) -> None:
        for found in self._box.take():
            if isinstance(found, str):
                self._record("order", what="", words="something", refused=found)
                continue
            refused = self._against(found)
            if refused is None:
                self._carry_out(found)
            why: dict[str, Any] = {} if refused is None else {"refused": refused}
            self._record("order", **found.to_json(), words=found.words, **why)

    def _against(self, order: Order) -> str | None:
        """Why it cannot be done."""
        if order.what in (CHECKPOINT, STOP):
            return None
        if order.worker not in self._ranks():
            return f"worker {order.worker} is none that the run's engine looks after"
        if order.what == STOP_WORKER and order.worker == 0:
            return "worker 0 is the master's: without it there is no run"
        if order.what == STOP_WORKER and not self._is_served:
            return "where there are no servers nobody can leave"
        return None
