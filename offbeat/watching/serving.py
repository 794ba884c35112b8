"""The server of a page: threads of Python's own http.server, and summaries as server-sent events.

Called by `offbeat watch`, and in a process beside the run by --watch. What may be asked for:

    GET  /                      the page, or what asks for the token
    GET  /setup                 JSON: what the page has to know at first
    GET  /events?run=NAME       summaries of a run, as they come; without a name, of all runs
    GET  /log?run=NAME&role=R   the last lines of a role's log
    POST /login                 a pass, made out of the token (access.py)
    POST /order                 JSON: something for the run to do (run/orders.py)

    with PageServer(source, listen("127.0.0.1:0"), Access(None)) as server:
        print(server.url)
"""

import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from offbeat.errors import ConfigError, OffbeatError
from offbeat.run.orders import Order
from offbeat.transport.owners import same_user_here
from offbeat.watching.access import Access, host_name
from offbeat.watching.page import write_login, write_page
from offbeat.watching.source import Source

DEFAULT_HOST, DEFAULT_PORT, NUM_PORTS = "127.0.0.1", 6810, 20
"""Where a page is served: the first of so many ports that is free."""
MAX_WATCHERS = 16
MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 4096
TIMEOUT_S = 10.0
"""How long somebody may take to ask, or to take in what was asked for."""
FAILED_PAUSE_S = 1.0
"""After a wrong pass the next one takes so long to be looked at."""
RETRY_MS = 1000
BACKLOG = 32
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
WHO = ("Host", "Origin", "Sec-Fetch-Site", "Cookie")
NO_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
"""Of what is no page."""


def split_at(at: str | None) -> tuple[str, int | None]:
    """HOST:PORT, HOST or PORT; None: any free port."""
    text = at or DEFAULT_HOST
    if text.isdecimal():
        text = f"{DEFAULT_HOST}:{text}"
    host = host_name(text)
    rest = text.rpartition("]")[2] if text.startswith("[") else text[len(host) :]
    port = rest.removeprefix(":")
    if not port:
        return host, None
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{at} is no address: give HOST:PORT, as 127.0.0.1:6810")
    return host, int(port)


def listen(at: str | None) -> socket.socket:
    """A socket that waits at an address; a ConfigError says what is in the way."""
    host, port = split_at(at)
    ports = range(DEFAULT_PORT, DEFAULT_PORT + NUM_PORTS) if port is None else (port,)
    for each in (*ports, *(() if port is not None else (0,))):
        try:
            return _bind(host, each)
        except OSError as error:
            reason = error
    raise ConfigError(f"cannot serve a page at {at or host}: {reason.strerror or reason}")


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def url_of(sock: socket.socket, *, is_secure: bool) -> str:
    """What a browser is told."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_secure else 'http'}://{shown}:{port}/"


class PageServer(ThreadingMixIn, HTTPServer):
    """Serves from the moment that it is made until it is closed. `sock` and `source` are its own
    from then on. `same_user`: nobody else on this machine is let in."""

    daemon_threads = False  # closing waits for them
    block_on_close = True

    def __init__(
        self,
        source: Source,
        sock: socket.socket,
        access: Access,
        *,
        tls: ssl.SSLContext | None = None,
        same_user: bool = True,
        log: logging.Logger | None = None,
    ) -> None:
        self.source = source
        self.access = access
        self.over = threading.Event()
        self.log = log or logging.getLogger("offbeat.watching")
        self.watchers = threading.BoundedSemaphore(MAX_WATCHERS)
        self._tls = tls
        self._same_user = same_user
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._failing = threading.Lock()
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self.url = url_of(sock, is_secure=tls is not None)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="page", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self._thread.join()
        self.source.close()
        with self._guard:
            for sock in self._open:
                with contextlib.suppress(OSError):  # it may have gone by itself
                    sock.shutdown(socket.SHUT_RDWR)
        self.server_close()

    # -- connections ---------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            request.close()  # of strangers there are only so many at a time
            return
        with self._guard:
            self._open.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(TIMEOUT_S)
            if self._same_user and not same_user_here(request):
                self.log.warning("somebody else on this machine was sent away")
                return
            secured = self._secure(request)
            try:
                self.finish_request(secured, client_address)
            finally:
                self.shutdown_request(secured)
        except (OSError, ValueError) as error:  # a timeout, a broken line, no TLS
            self.log.debug("a connection ended: %s", error)
        finally:
            with self._guard:
                self._open.discard(request)
            request.close()
            self._places.release()

    def _secure(self, request: socket.socket) -> socket.socket:
        if self._tls is None:
            return request
        secured = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        with self._guard:
            self._open.discard(request)
            self._open.add(secured)
        try:
            secured.do_handshake()
        except OSError:
            secured.close()
            raise
        return secured

    @contextlib.contextmanager
    def watching(self) -> Iterator[bool]:
        """A place among those who look on; False: there is none left."""
        has_place = self.watchers.acquire(blocking=False)
        try:
            yield has_place
        finally:
            if has_place:
                self.watchers.release()

    def pause_after_failure(self) -> None:
        """Whoever guesses has to wait, and so have all others who do."""
        with self._failing:
            self.over.wait(FAILED_PAUSE_S)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "offbeat", ""
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        self.server.log.debug(format, *args)

    def do_GET(self) -> None:
        self._answer(self._get, is_order=False)

    def do_POST(self) -> None:
        self._answer(self._post, is_order=True)

    def _answer(self, find: Any, *, is_order: bool) -> None:
        url = urlsplit(self.path)
        headers, access = self._known_headers(), self.server.access
        is_page = url.path == "/" and not is_order
        try:
            if not access.is_for_us(headers.get("Host")):
                self._refuse(
                    HTTPStatus.MISDIRECTED_REQUEST,
                    "this page has another name; --at NAME:PORT gives it one",
                )
            elif not (is_page or access.is_own_page(headers, must_say=is_order)):
                self._refuse(HTTPStatus.FORBIDDEN, "only its own page may ask for this")
            else:
                find(url.path, {k: v[0] for k, v in parse_qs(url.query).items()})
        except OffbeatError as error:
            self._refuse(HTTPStatus.CONFLICT if is_order else HTTPStatus.NOT_FOUND, str(error))

    def _known_headers(self) -> dict[str, str]:
        """Those that say who asks."""
        return {name: self.headers[name] for name in WHO if name in self.headers}

    def _get(self, path: str, query: Mapping[str, str]) -> None:
        may_look = self.server.access.may_look(self._known_headers())
        if path == "/":
            setup = {"single": None} if not may_look else self.server.source.setup()
            page, policy = write_page(setup) if may_look else write_login({})
            self._send(HTTPStatus.OK, page, "text/html; charset=utf-8", policy)
        elif not may_look:
            self._refuse(HTTPStatus.UNAUTHORIZED, "the token is asked for first")
        elif path == "/setup":
            self._send_json(self.server.source.setup())
        elif path == "/events":
            self._stream(query.get("run"))
        elif path == "/log":
            lines = self.server.source.lines_of(query.get("run", ""), query.get("role", ""))
            self._send_json(lines)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _post(self, path: str, query: Mapping[str, str]) -> None:
        body = self._read_body()
        if body is None:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "that is too long")
        elif path == "/login":
            self._login(body)
        elif path != "/order":
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        elif not self.server.access.may_look(self._known_headers()):
            self._refuse(HTTPStatus.UNAUTHORIZED, "the token is asked for first")
        elif not self.headers.get("Content-Type", "").startswith("application/json"):
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "an order is JSON")
        else:
            self._order(body)

    def _order(self, body: bytes) -> None:
        try:
            message = json.loads(body)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConfigError("an order is an object of JSON")
        order = Order.read(message)
        self.server.source.order(str(message.get("run", "")), order)
        self.server.log.info("asked for: %s", order.words)
        self._send_json({"words": order.words}, HTTPStatus.ACCEPTED)

    def _login(self, body: bytes) -> None:
        found = body.decode("ascii", errors="replace").strip()
        if not self.server.access.is_pass(found):
            self.server.log.warning("somebody with a wrong token was sent away")
            self.server.pause_after_failure()
            self._refuse(HTTPStatus.FORBIDDEN, "that is not the token of this page")
            return
        cookie = self.server.access.cookie(found)
        self._send(HTTPStatus.NO_CONTENT, b"", "text/plain", NO_POLICY, {"Set-Cookie": cookie})

    def _read_body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return None
        return self.rfile.read(int(length))

    # -- answers -------------------------------------------------------------------------------

    def _stream(self, run: str | None) -> None:
        with self.server.watching() as has_place:
            if not has_place:
                what = f"{MAX_WATCHERS} look on already: close another page first"
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, what)
                return
            texts = self.server.source.stream(run, self.server.over.is_set)
            first = next(texts, None)  # a wrong name is told before anything else
            if first is None:
                return
            self._begin(HTTPStatus.OK, "text/event-stream; charset=utf-8", NO_POLICY)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(f"retry: {RETRY_MS}\n\n".encode())
            self._send_event(first)
            for text in texts:
                self._send_event(text)

    def _send_event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode() if text else b": nothing new\n\n")

    def _begin(self, status: HTTPStatus, kind: str, policy: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", policy)
        for name, value in HEADERS.items():
            self.send_header(name, value)

    def _send(
        self,
        status: HTTPStatus,
        body: bytes,
        kind: str,
        policy: str,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._begin(status, kind, policy)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_json(self, content: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, json.dumps(content).encode(), "application/json", NO_POLICY)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """What was not read of the request is not taken for the next one."""
        self.close_connection = True
        more = {"Connection": "close"}
        self._send(status, f"{reason}\n".encode(), "text/plain; charset=utf-8", NO_POLICY, more)
