"""What a row of the matrix is: a fault that can be tried again and again, one seed a trial."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trial:
    violations: tuple[str, ...] = ()
    """What should have held and did not; each a line that a person understands."""
    recovery_s: float | None = None
    """From the fault to the next update, where there is something to recover from."""
    recoveries_s: tuple[float, ...] = ()
    """The same, of a trial with several faults."""
    counted: int = 1
    """As how many of the row's trials this one counts: pushes, frames, bytes."""


Protection = Callable[[], AbstractContextManager[None]]
"""While it is entered, what guards against the fault is switched off."""


@dataclass(frozen=True)
class Row:
    number: int
    fault: str
    """What is done, in some words."""
    must: str
    """What must happen."""
    full: int
    """How often it is tried at full count."""
    quick: int
    """And in the ordinary tests."""
    trial: Callable[[int], Trial]
    """Does it once, from a seed; may be called in any process, several of them at once."""
    protections: Mapping[str, Protection] = field(default_factory=dict)
    """By name: with each of them switched off, trials of this row must show violations."""
    alone: bool = False
    """Whether its trials want the machine for themselves."""
    why_not: Callable[[], str | None] = lambda: None
    """Why it cannot be tried here, if so: a tool that is missing, say."""
