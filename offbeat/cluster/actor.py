"""A role's process on a Ray cluster: an actor whose one method is the role's whole life.

Made by the engine `ray` (engines/actors.py) on whichever node has room. It calls the engine over a
line of its own, by which it is told where the others are and says how far it is (roles/control.py),
and then is the same process as on one machine (roles/process.py, loops/process.py). A process that
does not see the run's folder has a mirror of it. When the line breaks it ends, whoever else knows.
"""

import dataclasses
import fcntl
import gc
import json
import os
import re
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.cluster.rays import find_ray
from offbeat.config import TrainConfig, make_config
from offbeat.errors import ConnectionClosedError, RunDirError
from offbeat.roles.control import Control
from offbeat.run.addresses import Cluster, Home
from offbeat.run.events import Followed
from offbeat.run.rundir import RunFolder, role_name
from offbeat.transport.security import Terms
from offbeat.transport.sockets import call_engine

CALL_TIMEOUT_S = 30.0
"""How long the engine may take to answer the phone, and to say where everybody is."""
SEND_EVERY_S = 0.2
MAX_BYTES = 1 << 20
"""Of a log, in one message."""
MOST_EVENTS = 1000
"""In one message."""
MEETING_TIMEOUT_S = 120.0
"""How long the master's process may take to come, where workers meet without servers."""
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""
FILE_NAME = re.compile(r"(events|logs)/[\w-]+(\.\d+)?\.(jsonl|log)")
STREAMS = {"out": 1, "err": 2}
"""What a process prints, where a person is to see it."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Who a process is to be, and for whom."""

    role: str
    index: int
    generation: int
    engine: str
    """Its address."""
    key: str
    """Of the engine's run."""
    token: bytes = field(repr=False)
    run_dir: str
    """Absolute, where the engine is."""
    described: Mapping[str, Any]
    """What its config.json says."""
    initial: bytes | None
    """What training begins with, where --init says so: a file."""
    folder: str
    """That the command was started in."""
    path: tuple[str, ...]
    """What can be imported there."""
    options: Mapping[str, Any]
    """Of the configuration, what is this process's own."""
    is_shown: bool

    @property
    def name(self) -> str:
        return role_name(self.role, self.index)


class RoleActor:
    """What Ray starts."""

    def run(self, order: Order, data: Any) -> None:
        """Returns when the role is over, one way or another; the engine was told how. `data`: what
        the engine has put into the cluster's memory, or None."""
        ray = find_ray()
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        _Life(order, node, host, session).live(data)


class _Life:
    """One role's, from the first call to the last."""

    def __init__(self, order: Order, node: str, host: str, session: Path) -> None:
        self._order = order
        self._terms = Terms(token=order.token)
        self._host = host
        self._node = node
        self._session = session
        self._told = Told()

    def live(self, data: Any) -> None:
        Control.in_a_role = True
        meeting = free_port(self._host) if self._order.role == "master" else ""
        control = Control(self._call({"pid": os.getpid(), "meeting": meeting}))
        control.told = self._told
        control.start()
        try:
            self._be_role(control, data)
        except BaseException as error:  # also a SystemExit, which here is the recipe's own
            control.fail(error)
        finally:
            control.close()

    def _call(self, more: Mapping[str, Any]) -> socket.socket:
        order = self._order
        hello = {"key": order.key, "name": order.name, "generation": order.generation}
        hello |= {"node": self._node, "host": self._host, "meeting": "", **more}
        return call_engine(order.engine, hello, CALL_TIMEOUT_S, self._terms)

    def _be_role(self, control: Control, data: Any) -> None:
        order = self._order
        cluster = self._told.wait()
        if not _config(order, RunFolder(Path(order.run_dir))).chosen.kind.served:
            cluster = self._told.wait_for_meeting()
            if interface := interface_of(self._host):
                os.environ.setdefault(INTERFACE_VARIABLE, interface)
        if Path(order.folder).is_dir():
            os.chdir(order.folder)
        sys.path += [path for path in order.path if path not in sys.path]
        home = Home(cluster=self._told.cluster, node=self._node, host=self._host, terms=self._terms)
        if sees_run(Path(order.run_dir), cluster):
            self._be_role_in(RunFolder(Path(order.run_dir)), control, home, data)
            return
        if order.role in ("master", "evaluator"):
            raise RunDirError(
                f"node {self._host} does not see the run's folder {order.run_dir}, which the "
                f"{order.role} needs: give --run-dir a path that all nodes see, or start the run "
                f"on a node that has room for the master"
            )
        mirror = Mirror(order, self._session / f"offbeat-{order.key}", control)
        self._told.hand_model_to(mirror.folder)
        try:
            self._be_role_in(mirror.folder, control, home, data)
        finally:
            mirror.close()

    def _be_role_in(self, folder: RunFolder, control: Control, home: Home, data: Any) -> None:
        from offbeat.data.shared import sources_in
        from offbeat.loops import process as of_script
        from offbeat.roles.process import run_process

        order = self._order
        self._redirect(folder)
        config, script = _config(order, folder), order.described.get("script")
        gc.freeze()  # Ray has many objects, which the collector need not go through again and again
        if script is not None:
            of_script.run_process(config, order.role, order.index, script, control, home)
        else:
            shared = {} if data is None else sources_in(memoryview(data).cast("B"))
            run_process(config, order.role, order.index, control, home, shared)

    def _redirect(self, folder: RunFolder) -> None:
        """What is printed here goes to the role's log, or to where a person sees it; also what is
        printed by whatever is no Python."""
        log = folder.logs / f"{self._order.name}.log"
        for stream, descriptor in STREAMS.items():
            if self._order.is_shown:
                with self._call({"stream": stream}) as line:
                    line.setblocking(True)
                    os.dup2(line.fileno(), descriptor)
            else:
                with log.open("ab") as file:
                    os.dup2(file.fileno(), descriptor)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def free_port(host: str) -> str:
    """An address on this node where nobody listens now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.bind((host, 0))
        return f"tcp:{f'[{host}]' if ':' in host else host}:{found.getsockname()[1]}"


def interface_of(host: str) -> str:
    """The network interface that has this address; empty: none is known."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            try:
                raw = fcntl.ioctl(asking, GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
        if socket.inet_ntoa(raw[20:24]) == host:
            return name
    return ""


def _config(order: Order, folder: RunFolder) -> TrainConfig:
    options = {k: v for k, v in order.described["config"].items() if v is not None}
    return make_config({**options, **order.options, "run_dir": str(folder.path)})


def sees_run(path: Path, cluster: Cluster) -> bool:
    """Whether the folder at `path` is the run's own, and not another machine's of the same name."""
    folder = RunFolder(path)
    try:
        return Cluster.read(folder).key == cluster.key
    except (RunDirError, OSError):
        return False


class Told:
    """What the engine says, as it comes; in the thread of the control."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._model: Any = None
        self._mirror: RunFolder | None = None
        self._known = threading.Event()
        self._changed = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            if "cluster" in message:
                found = Cluster.from_json(message["cluster"])
                before = self._cluster
                # clocks of other machines began at another time
                now_s = time.monotonic() - message["elapsed_s"]
                began_s = now_s if before is None else before.began_s
                self._cluster = dataclasses.replace(found, began_s=began_s)
                self._known.set()
                self._changed.set()
            self._model = message.get("model", self._model)
            self._mirror_model()

    def wait(self) -> Cluster:
        if not self._known.wait(CALL_TIMEOUT_S):
            raise ConnectionClosedError("the engine does not say where everybody is")
        return self.cluster()

    def wait_for_meeting(self) -> Cluster:
        """Until the master has said where workers meet."""
        deadline_s = time.monotonic() + MEETING_TIMEOUT_S
        while not self.cluster().meeting:
            self._changed.clear()
            left_s = deadline_s - time.monotonic()
            if not self.cluster().meeting and not self._changed.wait(left_s):
                raise ConnectionClosedError("the master does not say where workers meet")
        return self.cluster()

    def cluster(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    def hand_model_to(self, folder: RunFolder) -> None:
        """Where what a script trains is looked for."""
        with self._lock:
            self._mirror = folder
            self._mirror_model()

    def _mirror_model(self) -> None:
        if self._mirror is not None and self._model is not None:
            self._mirror.write_json(self._mirror.model, self._model)


class Mirror:
    """A run's folder for a process that does not see the run's own: what the engine says of the run
    is there, and what is written there goes to the engine, a few times a second."""

    def __init__(self, order: Order, place: Path, control: Control) -> None:
        self.folder = RunFolder(place / f"{order.name}-{order.generation}-{os.getpid()}")
        for part in (self.folder.logs, self.folder.events):
            part.mkdir(parents=True)
        states = place / "states"  # of workers, which may be started again on this node
        states.mkdir(exist_ok=True)
        self.folder.states.symlink_to(states)
        self.folder.write_json(self.folder.config, dict(order.described))
        if order.initial is not None:
            self.folder.initial.write_bytes(order.initial)
        self._control = control
        self._sent: dict[Path, int] = {}
        self._events = Followed(self.folder.events, "*.jsonl")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._send(at_end=True)
        shutil.rmtree(self.folder.path)

    def _run(self) -> None:
        while not self._closed.wait(SEND_EVERY_S):
            self._send()

    def _send(self, *, at_end: bool = False) -> None:
        for name, events in self._events.read_files():
            for start in range(0, len(events), MOST_EVENTS):
                lines = map(json.dumps, events[start : start + MOST_EVENTS])
                self._control.tell({"file": f"events/{name}", "text": "\n".join((*lines, ""))})
        for path in self.folder.logs.glob("*.log"):
            while text := self._read(path, at_end=at_end):
                name = str(path.relative_to(self.folder.path))
                self._control.tell({"file": name, "text": text.decode(errors="replace")})

    def _read(self, path: Path, *, at_end: bool) -> bytes:
        """What is new in it: whole lines."""
        with path.open("rb") as file:
            file.seek(self._sent.get(path, 0))
            found = file.read(MAX_BYTES)
        if not at_end or len(found) == MAX_BYTES:
            found = found[: found.rfind(b"\n") + 1]
        self._sent[path] = self._sent.get(path, 0) + len(found)
        return found
