"""A page beside a run that this process is about to begin: --watch of train, compare, launch and
role master.

The page has a process of its own, at the lowest priority, so that nobody who trains waits for it.
That ends with this one, whatever becomes of it. A run's callback starts it (`Watch`), a comparison
as it begins.

    with Beside("127.0.0.1:6810", []) as beside:
        offbeat.train(recipe, callbacks=[Watch(beside)])
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from offbeat.recipes.callbacks import Callback, End, Start
from offbeat.watching.serving import listen, url_of

PAGE_VARIABLE = "OFFBEAT_PAGE_FD"
"""The socket of a page that a run has beside it; its input ends with the run."""
END_TIMEOUT_S = 5.0


class Beside:
    """A page's address, and its process once there is something to show. `flags` are those of
    offbeat watch."""

    def __init__(self, at: str | None, flags: Sequence[str], *, is_secure: bool = False) -> None:
        self._flags = list(flags)
        self._socket = listen(at)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = url_of(self._socket, is_secure=is_secure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, path: Path) -> None:
        """Serve the run, or the runs, in this folder."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "watch", str(path), *self._flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, PAGE_VARIABLE: str(self._socket.fileno())},
            pass_fds=(self._socket.fileno(),),
            start_new_session=True,  # Ctrl-C is for the run, which the page shows until its end
        )
        self._socket.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """The run is over: the page shows that, and its server ends."""
        self._socket.close()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=END_TIMEOUT_S)  # its input ends
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


class Watch(Callback):
    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    def on_start(self, run: Start) -> None:
        self._beside.start(run.run_dir)

    def on_end(self, end: End) -> None:
        self._beside.close()
