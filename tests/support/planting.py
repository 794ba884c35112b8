"""Bugs that are put into the program for as long as a block lasts: what guards against something is
switched off, and the tests of it have to notice.

    with Bug("dedupe off", [(AccountBook, "claim", lambda *given: True)]).planted():
        ...
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Patch = tuple[Any, str, Any]
"""What of what is to be something else."""


@dataclass(frozen=True)
class Bug:
    name: str
    patches: Sequence[Patch]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        before = [(where, name, vars(where)[name]) for where, name, _ in self.patches]
        try:
            self.plant()
            yield
        finally:
            for where, name, value in before:
                setattr(where, name, value)

    def plant(self) -> None:
        """For good, in this process."""
        for where, name, value in self.patches:
            setattr(where, name, value)
