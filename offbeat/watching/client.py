"""A page that is served elsewhere, as a source: shown in this terminal, or served anew on this
machine, so that no browser has to be told the token, nor whose certificates to believe.

    source = RemoteSource("https://trainer:6810", load_terms(os.environ, tls_ca="ca.pem"))
"""

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from offbeat.errors import ConfigError, RunDirError
from offbeat.run.orders import Order
from offbeat.transport.terms import Terms
from offbeat.watching.access import Access
from offbeat.watching.source import BEAT_S, Source

TIMEOUT_S = 4 * BEAT_S
AGAIN_S = 1.0
"""After so long a server that went away is looked for again."""
MAX_LINE_BYTES = 1 << 22
ADDRESS = re.compile(r"(https?://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}/?|https?://[^/\s]+/?")


def is_address(what: str) -> bool:
    return ADDRESS.fullmatch(what) is not None


class RemoteSource(Source):
    """`address`: http://HOST:PORT or https://HOST:PORT; without a scheme it is https where `terms`
    say whom to believe."""

    def __init__(self, address: str, terms: Terms) -> None:
        scheme = "https" if terms.client_tls is not None else "http"
        url = urlsplit(address if "://" in address else f"{scheme}://{address}")
        self._is_secure = url.scheme == "https"
        try:
            self._host, self._port = (
                url.hostname or "",
                url.port or (443 if self._is_secure else 80),
            )
        except ValueError as error:
            raise ConfigError(f"{address} is no address: {error}") from error
        self._terms = terms
        self._access = Access(terms.token, port=self._port)
        self._address = f"{url.scheme}://{url.netloc}"
        self._over = threading.Event()
        self._setup: dict[str, Any] | None = None

    def close(self) -> None:
        self._over.set()

    def setup(self) -> dict[str, Any]:
        if self._setup is None:
            self._setup = dict(self._ask("GET", "/setup"))
        return self._setup

    def lines_of(self, name: str, role: str) -> list[str]:
        query = urlencode({"run": name, "role": role})
        return [str(line) for line in self._ask("GET", f"/log?{query}")]

    def order(self, name: str, order: Order) -> None:
        self._ask("POST", "/order", {"run": name, **order.to_json()})

    def stream(self, name: str | None, is_over: Callable[[], bool]) -> Iterator[str]:
        """Goes on where the server went away and came back."""
        while not (self._over.is_set() or is_over()):
            try:
                yield from self._stream(name, is_over)
            except OSError:
                yield ""
            self._over.wait(AGAIN_S)

    def _stream(self, name: str | None, is_over: Callable[[], bool]) -> Iterator[str]:
        query = "" if name is None else f"?{urlencode({'run': name})}"
        with self._connected() as line:
            line.request("GET", f"/events{query}", headers=self._headers())
            answer = line.getresponse()
            if answer.status != http.client.OK:
                raise RunDirError(f"{self._address}: {_reason(answer)}")
            while raw := answer.readline(MAX_LINE_BYTES):
                if self._over.is_set() or is_over():
                    return
                text = raw.decode("utf-8", errors="replace").rstrip("\n")
                if text.startswith("data: "):
                    yield text.removeprefix("data: ")
                elif text.startswith(":"):
                    yield ""

    def _ask(self, method: str, path: str, message: Mapping[str, Any] | None = None) -> Any:
        try:
            with self._connected() as line:
                body = None if message is None else json.dumps(message)
                line.request(method, path, body=body, headers=self._headers())
                answer = line.getresponse()
                if answer.status not in (http.client.OK, http.client.ACCEPTED):
                    raise ConfigError(f"{self._address}: {_reason(answer)}")
                return json.loads(answer.read(MAX_LINE_BYTES))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConfigError(f"cannot look at {self._address}: {error}") from error

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Origin": self._address}
        if self._terms.token is not None:
            headers["Cookie"] = self._access.header(self._terms.token)
        return headers

    @contextlib.contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        where = (self._host, self._port)
        line: http.client.HTTPConnection
        if self._is_secure:
            tls = self._terms.client_tls
            line = http.client.HTTPSConnection(*where, timeout=TIMEOUT_S, context=tls)
        else:
            line = http.client.HTTPConnection(*where, timeout=TIMEOUT_S)
        with contextlib.closing(line):
            yield line


def _reason(answer: http.client.HTTPResponse) -> str:
    text = answer.read(500).decode("utf-8", errors="replace").strip()
    if answer.status == http.client.UNAUTHORIZED:
        return "it asks for a token: give it by OFFBEAT_TOKEN or --token-file"
    return text or str(answer.status)
