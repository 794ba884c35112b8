"""A headless Chromium, spoken to over a pipe in its own protocol; no package is needed for that."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

WRAPPER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""It wants to read from descriptor 3 and to write to 4."""


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of it. `heard` are the events that came, in their order."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.heard: deque[dict[str, Any]] = deque()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.heard.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser is gone"
            self._unread += more
        raw, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message

    def open(self, path: Path) -> None:
        self.visit(path.as_uri())

    def visit(self, url: str) -> None:
        self.heard.clear()
        self.ask("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.heard):
            self.heard.append(self._receive())

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """As in a window of this size, on a machine that is set to light or dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, within_s: float = 10.0) -> Any:
        """Wait for something to be true of the page; returns what it was then."""
        deadline_s = time.monotonic() + within_s
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < deadline_s, expression
            threading.Event().wait(0.02)
        return found

    def press(self, selector: str) -> None:
        """As with the mouse: where it is shown, and can be pressed."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            about = {"button": "left", "clickCount": 1, "x": x, "y": y}
            self.ask("Input.dispatchMouseEvent", type=kind, **about)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key)

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[Any]:
        """What a person would find in the console."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.heard if event.get("method") in kinds]

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.heard
            if event.get("method") == "Network.requestWillBeSent"
        ]


@contextmanager
def a_browser(folder: Path) -> Iterator[Browser]:
    chromium = find_chromium()
    assert chromium is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", WRAPPER, str(theirs_in), str(theirs_out), chromium),
            *(*FLAGS, f"--user-data-dir={folder}"),
        ],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_in, ours_out)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.terminate()
        process.wait(30)
