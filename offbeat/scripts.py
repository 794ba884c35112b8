"""A script of the user's own that is launched: what is written down of it, before torch is loaded.

Used by the command line, by launching.py and by comparisons, which go on with one later.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.config import LAUNCH_OPTIONS
from offbeat.errors import ConfigError


def describe_script(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What a run, or a comparison, keeps of it."""
    file = Path(script)
    if not file.is_file():
        raise ConfigError(f"there is no script {script}")
    return {
        "file": str(file.resolve()),
        "arguments": list(arguments),
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }


def change_of(script: Mapping[str, Any]) -> str | None:
    """What to say of a script that is run again; None: it is what it was, as far as is known."""
    now = describe_script(script["file"], ())
    if script.get("sha256") in (None, now["sha256"]):
        return None
    return f"the script {script['file']} has changed since the start"


def check_options(names: Sequence[str]) -> None:
    """A ConfigError where an option has no meaning for a script."""
    for name in names:
        if name not in LAUNCH_OPTIONS:
            raise ConfigError(f"{name} is for recipes: in a launched run that is the script's own")
