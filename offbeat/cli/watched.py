"""`offbeat watch`, and the page that train, compare, launch and role master have beside a run.

Imports no torch: whoever looks on is there at once; and nothing of a page before there is to be
one, since every command goes by here.
"""

import argparse
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cluster.hosts import is_loopback
from offbeat.errors import ConfigError, RunDirError
from offbeat.recipes.callbacks import Callback
from offbeat.transport.terms import TOKEN_VARIABLE, Terms

if TYPE_CHECKING:
    from offbeat.watching.beside import Beside
    from offbeat.watching.serving import PageServer
    from offbeat.watching.source import Source

LAST_LOOK_S = 0.3
"""So long the page of a run that is over takes to show that."""
NICE = 10
FLAGS = ("token_file", "tls_cert", "tls_key")
"""Of those that a page beside a run is served by; whom the run believes is not its affair."""


def look_on(known: argparse.Namespace, terms: Terms) -> int:
    """Until somebody stops it, or the run that it is beside is over."""
    try:
        return _watch(known, terms)
    except KeyboardInterrupt:  # which is how it ends
        return 0


def _watch(known: argparse.Namespace, terms: Terms) -> int:
    from offbeat.watching.beside import PAGE_VARIABLE
    from offbeat.watching.serving import listen

    if PAGE_VARIABLE in os.environ:
        return _serve_beside(known, terms)
    source = _find_source(known.what, terms)
    if known.text:
        from offbeat.watching.text import show

        with contextlib.closing(source):
            show(source)
        return 0
    try:
        _check_at(known.at, terms)
        sock = listen(known.at)
    except ConfigError:
        source.close()
        raise
    with _serve(source, sock, terms, known.at) as server:
        print(f"watching {known.what} at {server.url} (Ctrl-C ends that)", flush=True)
        threading.Event().wait()
    return 0


def _find_source(what: str, terms: Terms) -> "Source":
    from offbeat.watching.client import RemoteSource, is_address
    from offbeat.watching.hub import Hub

    path = Path(what).expanduser()
    if path.is_dir():
        return Hub(path)
    if is_address(what):
        return RemoteSource(what, terms)
    raise RunDirError(
        f"there is no folder {what}; watch takes a run's folder, one with runs in it, or a page's "
        f"address, as http://127.0.0.1:6810"
    )


def _check_at(at: str | None, terms: Terms) -> None:
    from offbeat.watching.serving import split_at

    host, port = split_at(at)
    if terms.token is None and not is_loopback(host):
        shown = host if port is None else f"{host}:{port}"
        raise ConfigError(
            f"the page would be served at {shown}, where strangers can reach it, without a token. "
            f"Make one with: offbeat token > token.txt; and name it with --token-file, or put it "
            f"into {TOKEN_VARIABLE}"
        )


def _serve(source: "Source", sock: socket.socket, terms: Terms, at: str | None) -> "PageServer":
    from offbeat.watching.access import Access, own_names
    from offbeat.watching.serving import PageServer

    is_secure, port = terms.server_tls is not None, sock.getsockname()[1]
    access = Access(
        terms.token,
        names=own_names(at, asks=terms.token is not None),
        port=port,
        is_secure=is_secure,
    )
    return PageServer(
        source,
        sock,
        access,
        tls=terms.server_tls,
        same_user=terms.token is None,
        log=_make_log(),
    )


def _make_log() -> logging.Logger:
    """What is worth a line goes where errors go."""
    log = logging.getLogger("offbeat.watching")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("offbeat watch: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


def _serve_beside(known: argparse.Namespace, terms: Terms) -> int:
    """In a process of its own, which whoever trains does not wait for."""
    from offbeat.watching.beside import PAGE_VARIABLE
    from offbeat.watching.hub import Hub

    _give_way()
    sock = socket.socket(fileno=int(os.environ.pop(PAGE_VARIABLE)))
    if not (told := sys.stdin.readline().rstrip("\n")):
        sock.close()  # there was no run
        return 0
    path = Path(told)
    hub = Hub(path, is_run=not (path / "compare.json").exists())
    with _serve(hub, sock, terms, known.at) as server:
        server.log.setLevel(logging.WARNING)  # what was asked for the run itself says
        sys.stdin.read()  # nothing more is written to it: this is its end
        hub.catch_up()
        server.over.wait(LAST_LOOK_S)
    return 0


def _give_way() -> None:
    """To those who train: not even woken up does it take a core from one of them at once."""
    os.nice(NICE)
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with contextlib.suppress(PermissionError):  # it gives way already
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def page_beside(
    known: argparse.Namespace, terms: Terms, say: Callable[[str], None]
) -> "Iterator[Beside | None]":
    """The page that was asked for by --watch or --watch-at; None: none was."""
    if not (known.watch or known.watch_at):
        yield None
        return
    from offbeat.watching.beside import Beside

    _check_at(known.watch_at, terms)
    flags = [] if known.watch_at is None else ["--at", known.watch_at]
    for name in FLAGS:
        if (value := getattr(known, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", value]
    with Beside(known.watch_at, flags, is_secure=terms.server_tls is not None) as beside:
        say(f"watch it at {beside.url}")
        yield beside


def callbacks_of(beside: "Beside | None") -> list[Callback]:
    if beside is None:
        return []
    from offbeat.watching.beside import Watch

    return [Watch(beside)]
