"""Every error that Offbeat raises on purpose. Each says what went wrong, where, and the remedy.

OffbeatError
├── UsageError              the user can mend it before anything ran; the command exits with 2
│   ├── ConfigError         a flag, a configuration file or an argument
│   ├── RecipeError         a recipe that cannot be found, or is not one
│   ├── ModelError          a model that cannot be laid out flat
│   ├── DataError           a dataset that is cut short or not what it says it is
│   │   └── MissingDataError   one that is not there
│   ├── ScriptRefusedError  what a launched script asks for cannot be done; nothing was trained
│   └── RunDirError         a run's folder that cannot be used
└── RunError                something went wrong in a run; the command exits with 1
    ├── NonFiniteLossError  a worker's loss became NaN or infinite
    ├── RoleError           a server, worker, master or evaluator failed
    ├── ScriptEndedError    a launched script ended by itself before it trained anything
    ├── DeviceMemoryError   a GPU has no memory left for what a run needs
    ├── StepError           what a worker failed with, and at which step
    ├── CheckpointError     no valid checkpoint, or one that could not be written
    ├── JournalError        a server's journal that is damaged, or cannot be written
    └── ConnectionClosedError  the other end of a connection is gone
"""

import difflib
import functools
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class OffbeatError(Exception):
    """Base of all of them; `exit_code` is what the command ends with."""

    exit_code = 1


class UsageError(OffbeatError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class RecipeError(UsageError):
    pass


class ModelError(UsageError):
    pass


class DataError(UsageError):
    pass


class MissingDataError(DataError):
    pass


class ScriptRefusedError(UsageError):
    pass


class RunDirError(UsageError):
    pass


class RunError(OffbeatError):
    pass


class NonFiniteLossError(RunError):
    pass


class ScriptEndedError(RunError):
    """A launched script has ended by itself before there was anything to train, as after --help."""

    exit_code = 0


class RoleError(RunError):
    pass


class DeviceMemoryError(RunError):
    pass


class StepError(RunError):
    """What a worker failed with, and at which step."""

    def __init__(self, rank: int, step: int, cause: BaseException) -> None:
        super().__init__(f"at step {step}: {in_a_line(cause)}")
        self.rank = rank
        self.step = step
        self.__cause__ = cause


class JournalError(RunError):
    pass


class CheckpointError(RunError):
    pass


class ConnectionClosedError(RunError):
    """There is no point in coming back where the other end said that the run is `over`, or
    `refused` to take this one in."""

    def __init__(self, reason: str, *, over: bool = False, refused: bool = False) -> None:
        super().__init__(reason)
        self.over = over
        self.refused = refused

    def again(self) -> "ConnectionClosedError":
        """The same, to be raised once more."""
        return ConnectionClosedError(str(self), over=self.over, refused=self.refused)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at what may have been meant, ready to be put behind an error message."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def in_a_line(error: BaseException) -> str:
    """Somebody else's exception: its type, its first line, where in the user's code it arose."""
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, OffbeatError):
        return first
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if _is_the_users(f.filename)] or frames
    if not places or isinstance(error, SyntaxError):  # whose message says where
        return f"{type(error).__name__}: {first}"
    place = f"{Path(places[-1].filename).name}, line {places[-1].lineno}"
    return f"{type(error).__name__}: {first} ({place})"


def _is_the_users(filename: str) -> bool:
    others = (str(Path(__file__).parent), _standard_library(), "<frozen")
    return "site-packages" not in filename and not filename.startswith(others)


@functools.cache
def _standard_library() -> str:
    return sysconfig.get_path("stdlib")
