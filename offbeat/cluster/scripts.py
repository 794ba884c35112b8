"""A worker of a launched run that was started by hand, on a machine of its own.

    offbeat launch --cluster cluster.toml --role worker --index 1 train.py

The run's configuration comes from the servers, as for any worker; model and data are the script's.
Servers compare what it trains with what the master's script does.
"""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from offbeat.cluster.bootstrap import config_from
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.remote import (
    CallSink,
    Flushing,
    ask_config,
    check_servers,
    states_of,
    with_patience,
)
from offbeat.errors import ConfigError, ConnectionClosedError, StepError
from offbeat.loops.description import Description
from offbeat.loops.running import run_script
from offbeat.loops.seat import Seat
from offbeat.roles.calls import AskConfig, Configure
from offbeat.roles.context import SentRecords
from offbeat.transport.sockets import SocketNetwork


def run_worker_script(
    endpoint: Endpoint,
    rank: int,
    script: Mapping[str, Any],
    *,
    log: logging.Logger,
    stop: threading.Event,
    local: Mapping[str, Any],
) -> None:
    """Be the worker of this rank until the run is over. `local`: options that are this machine's
    own."""
    network = SocketNetwork(endpoint.hosts.addresses, endpoint.terms, log.info)
    told = ask_config(network, AskConfig(rank), endpoint.start_timeout_s, stop)
    run = Configure.read(told, {})
    if run.loop is None:
        raise ConfigError(
            f"the cluster trains the recipe {run.config['recipe']}: its workers are started with "
            f"offbeat role worker"
        )
    check_servers(run, network)
    here = _make_seat(
        endpoint, network, run, script, rank, int(told["incarnation"]), log, stop, local
    )
    log.info("worker %d of %s, %s", rank, here.config.recipe, here.config.discipline)
    with Flushing(here.records):
        try:
            run_script(here, script, here.config.threads or os.cpu_count() or 1)
        except StepError as error:
            cause = error.__cause__
            if isinstance(cause, ConnectionClosedError | KeyboardInterrupt):
                raise with_patience(cause, endpoint.start_timeout_s) from None
            raise


def _make_seat(
    endpoint: Endpoint,
    network: SocketNetwork,
    run: Configure,
    script: Mapping[str, Any],
    rank: int,
    incarnation: int,
    log: logging.Logger,
    stop: threading.Event,
    local: Mapping[str, Any],
) -> Seat:
    assert run.loop is not None
    own = str(script["file"]) if run.loop["script"] else None  # which may lie elsewhere
    known = Description.from_json({**run.loop, "script": own})
    began_s = time.monotonic() - run.elapsed_s
    config = config_from(run, local)
    terms = dataclasses.replace(network.terms, peer_timeout_s=config.worker_timeout)
    entered = SocketNetwork(network.addresses, terms, network.say)
    return Seat(
        config=config,
        rank=rank,
        incarnation=incarnation,
        clock=lambda: time.monotonic() - began_s,
        stop=stop,
        records=SentRecords(log, lambda name: CallSink(entered, name)),
        log=log,
        states=states_of(run.run),
        network=lambda job, description: entered,
        agree=lambda mine: mine.agreed(known),
        connect_timeout_s=endpoint.start_timeout_s,
    )
