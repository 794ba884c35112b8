"""Where summaries of runs come from, for whoever shows them: folders of this machine (hub.py) or a
page that is served elsewhere (client.py)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from offbeat.run.orders import Order

BEAT_S = 5.0
"""So often somebody who looks on hears something, though there is nothing new."""


class Source(ABC):
    @abstractmethod
    def setup(self) -> dict[str, Any]:
        """What a page has to know at first: single, the name of the only run, or None."""

    @abstractmethod
    def stream(self, name: str | None, is_over: Callable[[], bool]) -> Iterator[str]:
        """Summaries of the run of this name, or of all runs, each as JSON: the first has
        everything, the others what is new. An empty one, where nothing is: it is asked for now and
        then, so that whoever is gone is noticed. Ends with `is_over`. Raises a RunDirError where
        there is no such run."""

    @abstractmethod
    def lines_of(self, name: str, role: str) -> list[str]:
        """The last lines of a role's log."""

    @abstractmethod
    def order(self, name: str, order: Order) -> None:
        """Have a run do something. Raises a UsageError where that is not to be."""

    @abstractmethod
    def close(self) -> None: ...
