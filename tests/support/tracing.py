"""Kills a process at a system call, as strace's fault injection does, by ptrace itself.

while killed_at(number, body): number += 1      # at each one of body's, in a fork of this process
"""

import ctypes
import functools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

TRACE_ME, SYSTEM_CALL, SET_OPTIONS = 0, 24, 0x4200
STOPS_DIFFER, DIES_WITH_TRACER = 1, 0x100000
AT_SYSTEM_CALL = signal.SIGTRAP | 0x80


class NoTracingError(Exception):
    """It is not allowed here, or there is no such thing."""


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    library.ptrace.restype = ctypes.c_long
    return library


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    if _library().ptrace(request, pid, None, data) == -1:
        code = ctypes.get_errno()
        raise NoTracingError(f"ptrace: {os.strerror(code)}")


@functools.cache
def why_not() -> str | None:
    if sys.platform != "linux":
        return "it takes Linux's ptrace"
    try:
        killed_at(1, lambda: None)
    except NoTracingError as error:
        return f"{error}: processes may not be traced here"
    return None


def killed_at(number: int, body: Callable[[], None]) -> bool:
    """Have a fork of this process do it, and kill that as it is about to make its system call of
    this number, from 1; False: it has ended before that."""
    pid = _fork(body)
    try:
        if not _stopped(pid):
            raise NoTracingError("ptrace is refused to a child")
        _ptrace(SET_OPTIONS, pid, STOPS_DIFFER | DIES_WITH_TRACER)
        for _ in range(2 * number - 1):  # each call stops it twice, before and after
            if not _goes_on(pid):
                pid = 0
                return False
        return True
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(body: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        # it has but one thread, and none of torch's works there
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _ptrace(TRACE_ME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _stopped(pid: int) -> bool:
    _, status = os.waitpid(pid, os.WUNTRACED)
    return os.WIFSTOPPED(status)


def _goes_on(pid: int) -> bool:
    """Up to the next stop at a system call; False: it has ended, and well."""
    passed_on = 0
    while True:
        _ptrace(SYSTEM_CALL, pid, passed_on)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "what was traced has failed"
            return False
        stopped_by = os.WSTOPSIG(status)
        if stopped_by == AT_SYSTEM_CALL:
            return True
        passed_on = stopped_by
