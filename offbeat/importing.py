"""Modules of the user's, found by a name that is given to a flag: `package.module` or a file.

A file's folder is a package of its own, so that `from .model import Net` finds what lies beside it;
and the folder is where Python looks, so that `import model` does. Used for recipes and for
plug-ins; imports no torch itself. What goes wrong becomes one line.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from offbeat.errors import OffbeatError, UsageError, in_a_line

FILE_PREFIX = "offbeat_file_"
"""How the names of modules begin that were imported by their file."""
IMPORTED: dict[str, Path] = {}
"""Those files, by the names of their modules."""


def import_file(path: Path, what: str, error: type[UsageError]) -> ModuleType:
    """The module in this file, made anew; `what` and `error` are what a complaint is about."""
    if not path.is_file():
        raise error(f"no such {what} file: {path}")
    folder = path.resolve().parent
    make_importable(folder)
    try:
        name = f"{_package(folder)}.{path.stem}"
        module = _execute(name, path)
    except OffbeatError:
        raise
    except (Exception, SystemExit) as failure:
        raise error(f"importing {path} failed: {in_a_line(failure)}") from failure
    IMPORTED[name] = path.absolute()
    return module


def _package(folder: Path) -> str:
    """The name of a folder as a package, which is imported if it is not yet; one with an
    __init__.py may be within another."""
    if (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        name = f"{_package(folder.parent)}.{folder.name}"
    else:
        digest = hashlib.sha256(bytes(folder)).hexdigest()[:8]
        name = f"{FILE_PREFIX}{digest}_{folder.name.replace('.', '_')}"
    if name not in sys.modules:
        if (folder / "__init__.py").is_file():
            if str(folder.parent) not in sys.path:
                sys.path.append(str(folder.parent))  # where the package has a name of its own
            _execute(name, folder / "__init__.py", str(folder))
        else:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(folder)]
    return name


def _execute(name: str, path: Path, *folder: str) -> ModuleType:
    """The module in this file, of this name; with a `folder`, a package."""
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=list(folder) or None
    )
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
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
