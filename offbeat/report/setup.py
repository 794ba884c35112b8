"""How runs were set up: optimizer, rate, machine, command. Called by one_run.py and many_runs.py.

All of it stands in a run's config.json; what an older one does not have is left out.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offbeat.report.document import Section, Table
from offbeat.report.record import Record

OPTION_NAMES = {"lr": "learning rate"}
"""What is called otherwise in a report."""
MAX_VALUES = 3
"""Of one thing in which runs differ; more are only counted."""


def setup_of(record: Record) -> dict[str, str]:
    """What was resolved before the run began, then where and how it was started."""
    found = {
        OPTION_NAMES.get(name, name.replace("_", " ")): _in_words(value)
        for name, value in record.resolved.items()
        if value is not None
    }
    about = record.environment
    found |= {"machine": _machine(about), "torch": str(about.get("torch") or "")}
    found |= {"command": _command(about.get("command"))}
    return {name: value for name, value in found.items() if value}


def describe_setups(title: str, setups: Iterable[Mapping[str, str]]) -> Section:
    """What several runs have in common, and where they differ the values that there are."""
    values: dict[str, dict[str, None]] = {}
    for setup in setups:
        for name, value in setup.items():
            values.setdefault(name, {})[value] = None
    rows = tuple((name, _of_several(list(found))) for name, found in values.items())
    return Section(title, tables=(Table(("", "value"), rows),) if rows else ())


def _of_several(values: list[str]) -> str:
    return "; ".join(values) if len(values) <= MAX_VALUES else f"{len(values)} different ones"


def _in_words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _machine(about: Mapping[str, Any]) -> str:
    cores = f"{about['cores']} cores" if about.get("cores") else None
    parts = (about.get("cpu"), cores, *(about.get("gpus") or ()), about.get("platform"))
    return ", ".join(str(part) for part in parts if part)


def _command(argv: Any) -> str:
    """As a person would type it: with the program's name, not where it lies."""
    if not isinstance(argv, list) or not argv:
        return ""
    program, *arguments = map(str, argv)
    name = Path(program).name
    return shlex.join(["offbeat" if name == "__main__.py" else name, *arguments])
