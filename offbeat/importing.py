"""Modules of the user's, found by a name that is given to a flag: `package.module` or a file.

Used for recipes and for plug-ins; imports no torch itself. What goes wrong becomes one line.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from offbeat.errors import OffbeatError, UsageError, in_a_line

FILE_PREFIX = "offbeat_file_"
"""What modules are called that were imported by their file."""


def import_file(path: Path, what: str, error: type[UsageError]) -> ModuleType:
    """The module in this file, made anew; `what` and `error` are what a complaint is about."""
    if not path.is_file():
        raise error(f"no such {what} file: {path}")
    spec = importlib.util.spec_from_file_location(f"{FILE_PREFIX}{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    make_importable(path.resolve().parent)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except OffbeatError:
        raise
    except (Exception, SystemExit) as failure:
        raise error(f"importing {path} failed: {in_a_line(failure)}") from failure
    return module


def import_module(
    name: str, error: type[UsageError], folders: Iterable[Path] = (), hint: str = ""
) -> ModuleType:
    """The module of this name, looked for here and in `folders` too; `hint` ends a complaint."""
    for folder in (Path.cwd(), *folders):
        make_importable(folder)
    try:
        return importlib.import_module(name)
    except OffbeatError:
        raise
    except (Exception, SystemExit) as failure:
        raise error(f"importing {name} failed: {in_a_line(failure)}{hint}") from failure


def make_importable(folder: Path) -> None:
    """Files in this folder can be imported from now on, as when Python runs a script in it."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
