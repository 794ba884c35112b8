"""A page beside a run that this process is about to begin: --watch of train, compare, launch and
role master.

The page has a process of its own, at a low priority, so that nobody who trains waits for it. It is
there before the run is, and told by its input what to show, by a run's callback (`Watch`) or by a
comparison as it begins; when that input ends, whatever became of this process, so does the page.

    with Beside("127.0.0.1:6810", []) as beside:
        offbeat.train(recipe, callbacks=[Watch(beside)])
"""

import contextlib
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
    """A page's address, and its process. `flags` are those of offbeat watch."""

    def __init__(self, at: str | None, flags: Sequence[str], *, is_secure: bool = False) -> None:
        with listen(at) as sock:
            self.url = url_of(sock, is_secure=is_secure)
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-m", "offbeat", "watch", "-", *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, PAGE_VARIABLE: str(sock.fileno())},
                pass_fds=(sock.fileno(),),
                start_new_session=True,  # Ctrl-C is for the run, which the page shows until its end
            )
        self._is_told = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, path: Path) -> None:
        """Serve the run, or the runs, in this folder."""
        process = self._process
        if process is None or process.stdin is None or self._is_told:
            return
        self._is_told = True
        with contextlib.suppress(BrokenPipeError):  # it failed, and has said why
            process.stdin.write(f"{path.absolute()}\n".encode())
            process.stdin.flush()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """The run is over: the page shows that, and its server ends."""
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
