"""Roles that a person starts, one by one, on the machines of a cluster; and a look at who is there.

Called by the command line:

    offbeat role ps --index 0 --cluster cluster.toml
    offbeat role master --cluster cluster.toml --recipe alexnet --discipline sync
    offbeat role worker --index 1 --cluster cluster.toml
    offbeat cluster check cluster.toml
"""

import contextlib
import ipaddress
import itertools
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.api import Result, resume_config, train_config
from offbeat.cli.signals import Echoes
from offbeat.cluster.bootstrap import Bootstrap
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.hosts import Hosts, is_loopback, split_address
from offbeat.cluster.remote import NO_PAYLOAD, WorkDone, run_evaluator, run_worker
from offbeat.config import make_config, not_overruled
from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.recipes.callbacks import Callback
from offbeat.roles.calls import About
from offbeat.run.checkpoint import list_checkpoints
from offbeat.run.progress import say
from offbeat.run.rundir import RunFolder
from offbeat.transport.security import TOKEN_VARIABLE, Terms
from offbeat.transport.sockets import SocketListener, connect_for_calls
from offbeat.version import __version__

CHECK_TIMEOUT_S = 5.0


def serve(
    endpoint: Endpoint,
    index: int,
    bind: str | None = None,
    script: str | None = None,
    journal: str | None = None,
) -> bool:
    """Be server `index`; `script` is where a launched run's lies here, `journal` the folder for
    what it promises. Returns whether it was stopped before the run was over."""
    where = endpoint.hosts.where("ps", index)
    host, port = split_address(where)
    if bind is not None:
        host, port = split_bind(bind, port)
    if endpoint.terms.client_tls is not None and endpoint.terms.server_tls is None:
        raise ConfigError(
            "a server that is to use TLS needs a certificate: give --tls-cert and --tls-key beside "
            "--tls-ca"
        )
    if endpoint.terms.token is None and not is_loopback(host):
        raise ConfigError(
            f"server {index} would listen at {host}:{port}, where strangers can reach it, without "
            f"a token. Make one with: offbeat token > token.txt; bring it to every machine; and "
            f"name it with --token-file, or put it into {TOKEN_VARIABLE}"
        )
    address = f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
    with console(f"ps-{index}") as (log, leave):
        try:
            listener = SocketListener(address, NO_PAYLOAD, endpoint.terms)
        except ConnectionClosedError as error:
            raise ConfigError(str(error)) from error
        log.info("server %d listens at %s; waiting for the master", index, listener.address[4:])
        server = Bootstrap(
            listener,
            index,
            log,
            start_timeout_s=endpoint.start_timeout_s,
            stop=threading.Event(),
            leave=leave,
            script=script,
            journal=None if journal is None else Path(journal).expanduser(),
        )
        server.run()
        log.info("server %d leaves: %s", index, server.reason)
        return leave.is_set()


def split_bind(bind: str, port: int) -> tuple[str, int]:
    """A host, with a port of its own or without."""
    try:
        return str(ipaddress.ip_address(bind.strip("[]"))), port
    except ValueError:
        return split_address(bind) if ":" in bind else (bind, port)


def master(
    endpoint: Endpoint,
    given: Mapping[str, Any],
    from_file: Mapping[str, Any],
    resume: str | None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Be the master: keep the run's folder, and train as rank 0."""
    decided = decided_by(endpoint.hosts, {**from_file, **given})
    if resume is not None:
        options = {k: v for k, v in given.items() if k not in ("run_dir", "init")}
        options |= decided
        return resume_config(Path(resume), options, endpoint=endpoint, callbacks=callbacks)
    config = make_config(not_overruled(from_file, given), given, decided)
    return train_config(config, endpoint=endpoint, callbacks=callbacks)


def find_former(given: Mapping[str, Any], from_file: Mapping[str, Any]) -> str | None:
    """The folder of the run that is asked for once more: a scheduler starts a master that died, or
    a job that it had to put off, by the same command. None: there is no such run, or another one.
    A folder that came to no checkpoint is put aside, since nothing can go on from it."""
    names = {**from_file, **given}
    if not names.get("run_dir"):
        return None
    folder = RunFolder(Path(names["run_dir"]))
    if not (folder.path / "config.json").exists():
        return None
    before, _ = folder.read_config()
    asked = make_config(not_overruled(from_file, given), given)
    if any(getattr(before, name) != getattr(asked, name) for name in names):
        return None
    if list_checkpoints(folder.checkpoints):
        say(f"{folder.path} is a run of this kind: going on with it")
        return str(folder.path)
    with folder.locked():
        aside = free_folder(folder.path)
        folder.path.rename(aside)
    say(f"a run that came to no checkpoint was put aside: {aside}")
    return None


def free_folder(path: Path) -> Path:
    """A name beside it that nobody has: RUN-1, RUN-2."""
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def decided_by(hosts: Hosts, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a cluster stands for; none that is given may contradict it."""
    decided = {"servers": len(hosts.ps), "workers": hosts.num_workers}
    for name, number in decided.items():
        told = given.get(name, number)
        if str(told) != str(number):
            raise ConfigError(f"the cluster has {number} {name}, not {told}")
    return {**decided, "engine": "cluster"}


def work(
    endpoint: Endpoint, rank: int | None, local: Mapping[str, Any], *, scores: bool = False
) -> tuple[WorkDone, bool]:
    """Be a worker; None: one more than the cluster lists. Returns what it came to, with `scores`
    also how well its last parameters do; and whether it was stopped."""
    name = "worker" if rank is None else f"worker-{rank}"
    with console(name) as (log, stop):
        done = run_worker(
            endpoint.hosts.addresses,
            endpoint.terms,
            rank,
            start_timeout_s=endpoint.start_timeout_s,
            log=log,
            stop=stop,
            say=log.info,
            local=local,
            show=say,
            scores=scores,
        )
        return done, stop.is_set()


def score(endpoint: Endpoint, local: Mapping[str, Any]) -> bool:
    """Be an evaluator. Returns whether it was stopped."""
    with console("evaluator") as (log, stop):
        run_evaluator(
            endpoint.hosts.addresses,
            endpoint.terms,
            start_timeout_s=endpoint.start_timeout_s,
            log=log,
            stop=stop,
            say=log.info,
            local=local,
        )
        return stop.is_set()


def check(hosts: Hosts, terms: Terms) -> bool:
    """Say of every server whether it can be reached, and what it is; returns whether all can, and
    fit together."""
    found: list[dict[str, Any]] = []
    for index, address in enumerate(hosts.addresses):
        try:
            end = connect_for_calls(address, {}, NO_PAYLOAD, CHECK_TIMEOUT_S, terms)
            try:
                about, _ = end.call(About().message(), {}, CHECK_TIMEOUT_S)
            finally:
                end.close()
        except ConnectionClosedError as error:
            say(f"ps {index}  {hosts.ps[index]}  not reachable: {error}")
            continue
        found.append(about)
        say(f"ps {index}  {hosts.ps[index]}  {_in_words(about)}")
    present = {rank for about in found for rank in about.get("present", ())}
    through = {rank for about in found for rank in about.get("finished", ())}
    for rank in range(hosts.num_workers):
        state = "connected" if rank in present else "not connected"
        if rank in through:
            state = "through"
        say(f"{_name_of(hosts, rank)}  {state}")
    for rank in sorted(present - set(range(hosts.num_workers))):
        say(f"joined, rank {rank}  connected")
    versions = {about["version"] for about in found} | {__version__}
    runs = {(about["run"], about.get("fingerprint")) for about in found}
    if len(versions) > 1:
        say(f"they have different versions of Offbeat: {', '.join(sorted(versions))}")
    if len({run for run in runs if run[0] is not None}) > 1:
        say("they serve different runs")
    return len(found) == len(hosts.ps) and len(versions) == 1 and len(runs) <= 1


def _in_words(about: Mapping[str, Any]) -> str:
    line = f"offbeat {about['version']}, torch {about['torch']}"
    if about["run"] is None:
        return f"{line}, waiting for the master"
    return (
        f"{line}, serving {about['recipe']} at version {about['updates']}, "
        f"fingerprint {about['fingerprint'][:12]}"
    )


def _name_of(hosts: Hosts, rank: int) -> str:
    if rank == 0:
        return "master" if hosts.master else "worker 0, the master"
    return f"worker {rank - (hosts.master is not None)}"


@contextlib.contextmanager
def console(name: str) -> Iterator[tuple[logging.Logger, threading.Event]]:
    """A log that is shown, and an event that a person sets."""
    log = logging.Logger(name)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    try:
        with stopped_by_signals() as stop:
            yield log, stop
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C, SIGTERM or SIGHUP sets; the second one is not waited for,
    unless it came with the first."""
    stop, echoes = threading.Event(), Echoes()

    def stop_or_give_up(number: int, frame: object) -> None:
        if echoes.is_one(number):
            return
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop_or_give_up)  # nohup stays nohup
    try:
        yield stop
    except ConnectionClosedError:
        if not stop.is_set():
            raise
        raise KeyboardInterrupt from None  # it was waiting for somebody
    finally:
        for number, former in before.items():
            signal.signal(number, former)
