"""What somebody who looks on asks of a run: a checkpoint now, its end, that a worker stops, or is
slow.

Whoever may write into the run's folder leaves an order there (`OrderBox.give`; offbeat watch does);
the run's engine takes it out, has it carried out, and writes down that it was given
(engines/ordered.py). The roles of a process see what stands in `Standing`. Imports no torch.

    OrderBox(RunFolder(path).orders).give(Order("slow", worker=1, factor=3.0))
"""

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from offbeat.errors import ConfigError

CHECKPOINT, STOP, STOP_WORKER, SLOW = "checkpoint", "stop", "stop_worker", "slow"
MAX_FACTOR = 100.0
MAX_BYTES = 4096
"""Of a file with an order."""


@dataclass(frozen=True)
class Order:
    what: str
    worker: int | None = None
    factor: float | None = None
    """How many times as long everything takes that worker."""

    @property
    def words(self) -> str:
        match self.what:
            case "checkpoint":
                return "a checkpoint now"
            case "stop":
                return "that the run stops, in order"
            case "stop_worker":
                return f"that worker {self.worker} stops"
            case _ if self.factor == 1:
                return f"that worker {self.worker} is as quick as it can be"
            case _:
                return f"that worker {self.worker} takes {self.factor:g} times as long"

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def read(cls, message: Any) -> Self:
        """A ConfigError says what is wrong with it."""
        if not isinstance(message, Mapping):
            raise ConfigError("an order is an object with what, and with worker and factor")
        what, worker, factor = (message.get(name) for name in ("what", "worker", "factor"))
        if what not in (CHECKPOINT, STOP, STOP_WORKER, SLOW):
            known = ", ".join((CHECKPOINT, STOP, STOP_WORKER, SLOW))
            raise ConfigError(f"unknown order {str(what)[:40]!r}; there are {known}")
        if what in (CHECKPOINT, STOP):
            return cls(what)
        if not isinstance(worker, int) or isinstance(worker, bool) or worker < 0:
            raise ConfigError(f"{what} needs the rank of a worker")
        if what == STOP_WORKER:
            return cls(what, worker)
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise ConfigError("slow needs a factor: how many times as long each step takes")
        if not (math.isfinite(factor) and 1 <= factor <= MAX_FACTOR):
            raise ConfigError(f"the factor must be from 1 to {MAX_FACTOR:g}, not {factor:g}")
        return cls(what, worker, float(factor))


class OrderBox:
    """Orders that nobody has taken yet, as files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def give(self, order: Order) -> None:
        self._path.mkdir(exist_ok=True)
        name = f"{time.time_ns()}-{os.getpid()}-{threading.get_ident()}"
        whole, half = self._path / f"{name}.json", self._path / f".{name}.tmp"
        half.write_text(json.dumps(order.to_json()) + "\n", encoding="utf-8")
        half.replace(whole)  # whoever takes it finds all of it

    def take(self) -> list[Order | str]:
        """Each of them once, the earliest first; of one that makes no sense, why."""
        if not self._path.is_dir():
            return []
        found: list[Order | str] = []
        for path in sorted(self._path.glob("*.json")):
            text = path.read_bytes()[:MAX_BYTES]
            path.unlink()
            try:
                found.append(Order.read(json.loads(text)))
            except (ValueError, ConfigError) as error:
                found.append(str(error))
        return found


@dataclass
class Standing:
    """What stands of the orders for the roles of one process, who look at it now and then; told by
    whoever listens to the engine."""

    checkpoint: threading.Event = field(default_factory=threading.Event)
    slowdowns: dict[int, float] = field(default_factory=dict)
    """Of each worker for which something else stands than its options say."""
    stopped: set[int] = field(default_factory=set)
    """Workers that are to leave, and not to be waited for."""

    def tell(self, message: Mapping[str, Any]) -> None:
        """A line of the engine's; what is no order is not for us."""
        if "order" not in message:
            return
        order = Order.read(message["order"])
        if order.what == CHECKPOINT:
            self.checkpoint.set()
        elif order.what == SLOW and order.worker is not None and order.factor is not None:
            self.slowdowns[order.worker] = order.factor
        elif order.what == STOP_WORKER and order.worker is not None:
            self.stopped.add(order.worker)
