"""`offbeat bench`: what an exchange costs, and what is left of a machine's gradients per second.

Every figure stands beside something that was measured in the same run, in turn with it, since the
same machine may be twice as fast an hour later:

    exchange   gradient up, update, parameters back, beside two plain copies of the same size
    train      each discipline, beside the ceiling (the same workers, who exchange with nobody) and
               beside torch's DistributedDataParallel on gloo
    norm       a step with the fast local response normalisation, beside one with torch's

The flags are in cli.py. This module is also what the processes of a benchmark run, as
`python -m offbeat.bench server|ceiling|ddp ...`, and where the engine's processes find its recipes.
"""

import contextlib
import dataclasses
import datetime
import functools
import logging
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.api import train_config
from offbeat.cluster import Cluster, ClusterNetwork
from offbeat.config import TrainConfig, make_config
from offbeat.control import DATA_VARIABLE, REPORT_EVERY_S, Control
from offbeat.data.shared import open_shared, share
from offbeat.disciplines import ApplyReply
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.errors import ConnectionClosedError, RunError
from offbeat.events import EventLog, read_events
from offbeat.job import Facts, Job, make_job, rejoin_job
from offbeat.ledger import Ledger
from offbeat.optim import SGD
from offbeat.recipes import alexnet
from offbeat.recipes import mnist_sigmoid as sigmoid
from offbeat.recipes.base import Recipe, load_recipe
from offbeat.roles.server import Server
from offbeat.roles.worker import Worker
from offbeat.rundir import RunFolder, create_run_folder, describe_run, num_cores
from offbeat.shard import Segment, Shard, ShardState
from offbeat.transport import base
from offbeat.transport.base import (
    Layout,
    Listener,
    Message,
    Network,
    PushHeader,
    ReplyHeader,
    Slot,
    WelcomeHeader,
)
from offbeat.transport.inproc import InprocListener, InprocNetwork
from offbeat.transport.sockets import SocketListener

TIMEOUT_S = 60.0
"""How long a process may take to come, or to answer."""
EXCHANGES_PER_ROUND = 20
LR = 2.0**-10
"""A power of two: sums of updates by gradients of ones are exact, and can be checked."""
CEILING, DDP = "ceiling", "ddp"
CALIBRATION_STEPS = {"mnist-sigmoid": 1000, "convnet": 4}
"""By which it is found out how many steps fill the time that was asked for."""
_HELLO: Message = {"worker": 0, "incarnation": 0, "fingerprint": "bench"}

Row = dict[str, str | list[float]]
"""Of a table; numbers are one for each round."""


# -- recipes: the shapes of MNIST and CIFAR-10, without their data ---------------------------------


@functools.cache
def _noise(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(count, *shape, generator=generator)
    return inputs, torch.randint(0, 10, (count,), generator=generator)


def _make_convnet() -> nn.Module:
    """1,070,186 parameters, 4.3 MB."""
    convolutions = [nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]  # [b, 64, 16, 16]
    convolutions += [nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]  # [b, 64, 8, 8]
    linear = [nn.Linear(64 * 8 * 8, 224), nn.ReLU(), nn.Linear(224, 192), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), *linear, nn.Linear(192, 10))


mnist_sigmoid = dataclasses.replace(sigmoid.recipe, data=lambda config: (_noise(60_000, 784), None))
convnet = Recipe(
    model=_make_convnet,
    data=lambda config: (_noise(4_096, 3, 32, 32), None),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=SGD(lr=0.01),
    batch_size=128,
)


# -- exchange --------------------------------------------------------------------------------------


def exchange(*, sizes: Sequence[float], rounds: int, transports: Sequence[str]) -> list[Row]:
    """Time exchanges of so many MB each way over each transport, in rounds that go through all of
    them."""
    with one_thread(), contextlib.ExitStack() as stack:
        cases = [(transport, size) for transport in transports for size in sizes]
        pairs = [stack.enter_context(_joined(*case)) for case in cases]
        times = [[pair.time_round() for pair in pairs] for _ in range(1 + rounds)]
        for pair in pairs:
            pair.check()
    rows: list[Row] = []
    for (transport, size), found in zip(cases, zip(*times[1:], strict=True), strict=True):
        row: Row = {"transport": transport, "MB": f"{size:g}"}
        row["exchange, ms"] = [1e3 * exchange_s for exchange_s, _ in found]
        row["two copies, ms"] = [1e3 * copies_s for _, copies_s in found]
        row["ratio"] = [exchange_s / copies_s for exchange_s, copies_s in found]
        rows.append(row)
    return rows


class _Pair:
    """A worker's end that exchanges gradients of ones, and two plain copies beside it."""

    def __init__(self, network: Network, num_elements: int) -> None:
        self._gradient, self._params, *self._others = [torch.ones(num_elements) for _ in range(6)]
        layout = Layout(num_elements, 1)
        self._link = network.connect(0, _HELLO, layout, TIMEOUT_S, self._params)
        self._params = self._link.reply_slot.values  # as a worker of one server has it
        self._num_done = 0

    def close(self) -> None:
        self._link.close()

    def time_round(self) -> tuple[float, float]:
        """Mean seconds of an exchange and of two copies. They take turns, so that neither finds
        its memory in the caches because it has just been there."""
        exchange_s = copies_s = 0.0
        for _ in range(EXCHANGES_PER_ROUND):
            start_s = time.perf_counter()
            self._exchange()
            exchanged_s = time.perf_counter()
            self._others[0].copy_(self._others[1])
            self._others[2].copy_(self._others[3])
            copies_s += time.perf_counter() - exchanged_s
            exchange_s += exchanged_s - start_s
        return exchange_s / EXCHANGES_PER_ROUND, copies_s / EXCHANGES_PER_ROUND

    def check(self) -> None:
        """Every update went in, and came back."""
        if not bool((self._params == -LR * self._num_done).all()):
            raise RunError("the parameters are not what the exchanges should have made of them")

    def _exchange(self) -> None:
        """As in roles/exchange.py."""
        link, slot = self._link, self._link.gradient_slot
        slot.values.copy_(self._gradient)
        link.push(PushHeader(0, 0, self._num_done + 1, self._num_done, self._num_done))
        if link.wait_reply(TIMEOUT_S) is None:
            raise RunError(f"no reply within {TIMEOUT_S:g} s")
        self._num_done += 1


@contextlib.contextmanager
def _joined(transport: str, size: float) -> Iterator[_Pair]:
    """A worker's end, joined to a server in another process; `inproc`: in threads of this one."""
    num_elements = max(1, round(size * 1e6 / 4))
    with contextlib.ExitStack() as stack:
        network: Network
        if transport == "inproc":
            listener = InprocListener()
            stack.enter_context(_open_server(listener, num_elements))
            network = InprocNetwork([listener])
        else:
            temporary = tempfile.TemporaryDirectory(prefix="offbeat-bench-")
            folder = RunFolder(Path(stack.enter_context(temporary)))
            log = folder.path / "log"
            arguments = (transport, str(num_elements), str(folder.path))
            child = stack.enter_context(_started(log, "server", *arguments))
            deadline_s = time.monotonic() + TIMEOUT_S
            while not folder.cluster.exists():
                if child.poll() is not None or time.monotonic() > deadline_s:
                    raise RunError(f"the server does not come: {last_line(log)}")
                threading.Event().wait(0.02)
            network = ClusterNetwork(folder)
        yield stack.enter_context(contextlib.closing(_Pair(network, num_elements)))


@contextlib.contextmanager
def _open_server(listener: Listener, num_elements: int) -> Iterator[EventLog]:
    events = EventLog(Path(os.devnull))
    server = Server(
        Shard(torch.zeros(num_elements), [Segment(0, 0, 0, num_elements)], SGD(lr=LR)),
        Ledger(ApplyReply([0])),
        listener,
        index=0,
        agreement=_HELLO,
        events=events,
        log=_silent_log(),
        clock=time.monotonic,
    )
    server.start()
    try:
        params = torch.zeros(num_elements)
        server.load(ShardState(version=0, tensors={"params": params}, accounts={}))
        yield events
    finally:
        server.close()
        events.close()


# -- train -----------------------------------------------------------------------------------------


def train(
    *, recipe: str, disciplines: Sequence[str], seconds: float, rounds: int, **options: Any
) -> list[Row]:
    """Gradients per second of the ceiling, of each discipline and of DDP, in rounds that go through
    all of them; `options` are train's."""
    options |= {"recipe": f"offbeat.bench:{recipe.replace('-', '_')}", "threads": 1}
    options |= {"eval_every": 0, "max_restarts": 0, "quiet": True, "device": "cpu"}
    rates: dict[str, list[float]] = {name: [] for name in (CEILING, *disciplines, DDP)}
    with (
        fork_server("local") as forks,
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder,
    ):
        rig = _Rig(Path(folder), options, forks, timeout_s=TIMEOUT_S + 10 * seconds)
        with contextlib.closing(rig):
            steps = {}
            for name in rates:
                times = rig.run(name, CALIBRATION_STEPS[recipe])
                slowest = min((len(t) - 1) / (t[-1] - t[0]) for t in times)
                steps[name] = max(10, round(slowest * seconds))
            for number in range(1, 1 + rounds):
                for name, found in rates.items():
                    found.append(_rate(rig.run(name, steps[name])))
                    line = f"round {number} of {rounds}: {name} {_short(found[-1])}/s"
                    print(line, file=sys.stderr, flush=True)
    rows: list[Row] = []
    for name, found in rates.items():
        row: Row = {"": name, "gradients/s": found}
        row["of the ceiling"] = [a / b for a, b in zip(found, rates[CEILING], strict=True)]
        row["times ddp"] = [a / b for a, b in zip(found, rates[DDP], strict=True)]
        rows.append(row)
    return rows


def _rate(times: Sequence[Sequence[float]]) -> float:
    """Gradients per second while everybody was at work: from when the last worker was warm until
    the first one was done. `times`: for each worker, when it was done with each step."""
    warm = [done[len(done) // 10 :] for done in times]
    start_s = max(done[0] for done in warm)
    end_s = min(done[-1] for done in warm)
    if end_s <= start_s:
        raise RunError("the workers were never at work at the same time; give more --seconds")
    return sum(start_s < at_s <= end_s for done in warm for at_s in done) / (end_s - start_s)


class _Rig:
    """Runs one contender after the other, each in a folder of its own under `folder`."""

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any],
        forks: ForkServer | None,
        *,
        timeout_s: float,
    ) -> None:
        self._folder = folder
        self._options = options
        self._forks = forks
        self._timeout_s = timeout_s
        self._num_runs = 0
        job = make_job(make_config(options, {"steps": 1}), load_recipe(options["recipe"]))
        self._config = job.config
        self._facts = job.facts
        self._data = share({"train": job.train})  # as the engine does, for the other contenders

    def close(self) -> None:
        os.close(self._data)

    def run(self, name: str, steps: int) -> list[list[float]]:
        """Have every worker do so many steps; returns when each was done with each of them."""
        self._num_runs += 1
        run_dir = self._folder / str(self._num_runs)
        more: dict[str, Any] = {"steps": steps, "run_dir": str(run_dir)}
        if name in (CEILING, DDP):
            self._run_alone(name, dataclasses.replace(self._config, **more))
        else:
            config = make_config(self._options, more, {"discipline": name})
            if train_config(config, forks=self._forks).interrupted:
                raise KeyboardInterrupt  # the engine took it for a wish to end that run well
        times: dict[int, list[float]] = {}
        for event in read_events(RunFolder(run_dir).events):
            if event["kind"] == "step":
                parts = ("start_s", "compute_s", "prepare_s", "exchange_s")
                done_s = sum(event[part] for part in parts)
                times.setdefault(event["worker"], []).append(done_s)
        return list(times.values())

    def _run_alone(self, name: str, config: TrainConfig) -> None:
        """Workers without an engine."""
        folder = create_run_folder(config)
        described = describe_run(config, job=dataclasses.asdict(self._facts))
        folder.write_json(folder.config, described)
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.ExitStack() as stack:
            children = []
            for rank in range(config.workers):
                log = folder.logs / f"{rank}.log"
                arguments = (name, str(rank), str(folder.path))
                child = stack.enter_context(_started(log, *arguments, data=self._data))
                children.append((child, log))
            for child, log in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(deadline_s - time.monotonic())
                if child.returncode != 0:
                    how = "does not end" if child.returncode is None else "failed"
                    raise RunError(f"a process of {name} {how}: {last_line(log)}")


class _NoServer(base.WorkerEnd):
    """Takes everything, and leaves the worker's parameters as they are."""

    def __init__(self, layout: Layout, params: Tensor) -> None:
        self.welcome = WelcomeHeader(version=0)
        self._reply = ReplyHeader(0, version=0)
        self._is_through = False
        self._slot = Slot.allocate(layout)
        self.reply_slot = dataclasses.replace(self._slot, values=params)

    @property
    def gradient_slot(self) -> Slot:
        return self._slot

    pushed_slot = gradient_slot

    def push(self, header: PushHeader) -> None:
        self._reply = ReplyHeader(header.sequence, version=0)

    def wait_reply(self, timeout_s: float) -> ReplyHeader:
        if self._is_through:
            raise ConnectionClosedError("there is nobody to wait for", over=True)
        return self._reply

    def beat(self) -> None:
        pass

    def finish(self, sequence: int) -> None:
        self._is_through = True

    def close(self) -> None:
        pass


class _NoNetwork(Network):
    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> _NoServer:
        return _NoServer(layout, params)

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> base.CallEnd:
        raise ConnectionClosedError("there is no server here")


# -- norm ------------------------------------------------------------------------------------------


def norm(*, batch_size: int, rounds: int) -> list[Row]:
    """A step of the recipe alexnet on the CPU, one thread: with torch's own local response
    normalisation, and with offbeat.layers' one."""
    batch = _noise(batch_size, 3, alexnet.SIZE, alexnet.SIZE)
    ours, theirs = alexnet.AlexNet(), alexnet.AlexNet()
    for name in ("norm1", "norm2"):
        own = getattr(ours, name)
        setattr(theirs, name, nn.LocalResponseNorm(own.size, own.alpha, own.beta, own.k))
    with one_thread():
        times = [[_time_step(model, batch) for model in (theirs, ours)] for _ in range(1 + rounds)]
    torchs, mine = zip(*times[1:], strict=True)
    rows: list[Row] = []
    for name, found in (("torch's", torchs), ("offbeat's", mine)):
        row: Row = {"normalisation": name, "step, ms": [1e3 * time_s for time_s in found]}
        row["times as fast"] = [a / b for a, b in zip(torchs, found, strict=True)]
        rows.append(row)
    return rows


def _time_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    start_s = time.perf_counter()
    alexnet.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    taken_s = time.perf_counter() - start_s
    model.zero_grad()
    return taken_s


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


# -- figures ---------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> list[str]:
    """Medians over the rounds, with the least and the greatest."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The same for a program: every round's figure too."""
    return [
        {
            key: v if isinstance(v, str) else {"median": statistics.median(v), "rounds": v}
            for key, v in row.items()
        }
        for row in rows
    ]


def machine() -> str:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{num_cores()} cores ({platform.machine()}), {versions}"


def _cell(value: str | list[float]) -> str:
    if isinstance(value, str):
        return value
    low, high = _short(min(value)), _short(max(value))
    return f"{_short(statistics.median(value))} ({low}..{high})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# -- processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(
    log: Path, *arguments: str, data: int | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """One of this module's own processes, which does not outlive the block."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {} if data is None else {DATA_VARIABLE: str(data)}
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "offbeat.bench", *arguments],
            stdin=subprocess.PIPE,  # whose end tells a server that this process is gone
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=() if data is None else (data,),
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends them
        )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=TIMEOUT_S)


def last_line(log: Path) -> str:
    return (log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1]


def _silent_log() -> logging.Logger:
    log = logging.Logger("bench")
    log.addHandler(logging.NullHandler())
    return log


def _serve(transport: str, num_elements: str, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"unix:{folder}/socket" if transport == "unix" else "tcp:127.0.0.1:0"
    listener = SocketListener(address, Layout(int(num_elements), 1))
    with _open_server(listener, int(num_elements)) as events:
        cluster = Cluster(ps=(listener.address,), epochs=(0,), incarnations=(0,), began_s=0.0)
        cluster.write(RunFolder(Path(folder)))
        while not select.select([sys.stdin], [], [], REPORT_EVERY_S)[0]:
            events.flush()


def _work(name: str, rank: int, folder: RunFolder) -> None:
    """A worker's process without an engine, but with all else that such a process does."""
    config, described = folder.read_config()
    sources = open_shared(int(os.environ[DATA_VARIABLE]))
    job = rejoin_job(config, load_recipe(config.recipe), Facts(**described["job"]), sources)
    events = EventLog.create(folder.events, f"worker-{rank}")
    control = Control(None)
    control.flush = events.flush
    control.start()
    if name == CEILING:
        means: dict[str, Any] = {"log": _silent_log(), "clock": time.monotonic}
        means |= {"events": events, "stop": threading.Event(), "seeds_torch": True}
        towers = job.make_towers(rank, job.make_model())
        Worker(job, rank, towers, _NoNetwork(), **means).run()
    else:
        _train_ddp(job, rank, events, store=folder.path.resolve() / "store")
    control.close()
    events.close()


def _train_ddp(job: Job, rank: int, events: EventLog, store: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=job.config.workers,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    model = nn.parallel.DistributedDataParallel(job.recipe.model())
    params = list(model.parameters())
    optimizer = job.optimizer.build(params, [0 for _ in params])
    for _, batch in job.batches(rank):
        start_s = time.monotonic()
        optimizer.zero_grad()
        job.recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times = {"start_s": start_s, "compute_s": time.monotonic() - start_s}
        events.record("step", worker=rank, **times, prepare_s=0.0, exchange_s=0.0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        _serve(*sys.argv[2:])
    else:
        _work(sys.argv[1], int(sys.argv[2]), RunFolder(Path(sys.argv[3])))
