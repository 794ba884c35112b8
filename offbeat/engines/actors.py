"""The engine `ray`: every role is an actor on a Ray cluster (cluster/actor.py).

Called by the api. Ray places the actors and says when a node is gone; who is started again, and who
is given up, the supervisor decides as on one machine. Numbers do not travel as Ray's objects: roles
of one node share memory, those of several talk TCP, with a token that is made for the run. Actors
call this process (`Calls`), which tells them where the others are.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.cluster.actor import FILE_NAME, STREAMS, Order, RoleActor
from offbeat.cluster.fitting import GIB, Ask, find_lack, in_words
from offbeat.cluster.rays import NODE_LABEL, RayCluster, joined
from offbeat.config import TrainConfig
from offbeat.data.shared import map_all, share
from offbeat.engines.supervised import Process, Running, SupervisedEngine
from offbeat.engines.supervisor import Member
from offbeat.errors import RoleError
from offbeat.roles.acceptor import Acceptor
from offbeat.run.addresses import Cluster
from offbeat.run.event_files import EventFile
from offbeat.run.job import Job
from offbeat.run.progress import Display
from offbeat.run.rundir import RunFolder
from offbeat.transport.base import Layout, Message, ServerEnd
from offbeat.transport.security import Terms
from offbeat.transport.sockets import SocketListener, SocketServerEnd, any_port

END_TIMEOUT_S = 5.0
"""How long an actor whose line broke may take to be gone."""
PATIENCE_S = 10.0
"""After so long a person is told what is waited for."""
ROOM_TIMEOUT_S = 600.0
"""How long the cluster may take to have room: for all, and for one that is to come back."""
HOME_TIMEOUT_S = 2.0
"""How long the master's place is to be on this process's own node, if there is room elsewhere."""
ASK_EVERY_S = 0.5
"""How often it is looked whether there is room for more workers."""
WITH_NODE = "died with its node"
NO_PAYLOAD = Layout(num_elements=0, num_tensors=0)


def asks_of(config: TrainConfig) -> list[Ask]:
    """What each role needs of its node. An evaluator, which is idle most of the time, needs nothing
    of its own: it is where the master is."""
    worker = {"CPU": config.cpus_per_worker, "GPU": config.gpus_per_worker}
    server = {"CPU": 1.0, "memory": (config.memory_per_server or 0.0) * GIB}
    ranks = range(config.workers)
    workers = [(f"worker {rank}" if rank else "the master", worker) for rank in ranks]
    num_servers = config.servers if config.chosen.kind.served else 0
    servers = [(f"server {index}", server) for index in range(num_servers)]
    return [
        Ask(
            who=who,
            resources={name: count for name, count in needs.items() if count},
            needs_folder=who == "the master",
        )
        for who, needs in (*workers, *servers)
    ]


@contextlib.contextmanager
def ray_for(config: TrainConfig) -> Iterator[RayCluster | None]:
    """The cluster for a run of the engine `ray`, which has room for it as far as one can tell; None
    for any other run."""
    if config.engine != "ray":
        yield None
        return
    asks = asks_of(config)
    with joined(config.ray_address, asks) as cluster:
        cluster.check(asks)
        yield cluster


@dataclass(frozen=True)
class Place:
    """Where an actor is, as it said when it called."""

    node: str
    host: str
    pid: int
    meeting: str = ""
    """Where the master's node has a port for workers without servers to meet."""
    from_afar: str = ""
    """A server's address for other nodes."""


class RayEngine(SupervisedEngine):
    """Actors. Takes the job's data over."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        display: Display,
        began_s: float,
        *,
        cluster: RayCluster,
        incarnation: int = 0,
        shows_rank_0: bool = False,
    ) -> None:
        """`cluster` is the caller's. `shows_rank_0`: what its process prints goes where this one's
        does, not to its log."""
        super().__init__(job, folder, display, began_s, incarnation=incarnation)
        self._cluster = cluster
        self._shows_rank_0 = shows_rank_0
        self._key = secrets.token_hex(6)
        self._token = secrets.token_urlsafe(32).encode()
        self._train = None if job.facts.by_rank else job.train
        self._test = job.test
        self._calls = Calls(cluster.host, self._token)
        self._places: dict[Member, Place] = {}
        self._room: _Room | None = None
        self._data: Any = None
        self._model: Any = None
        self._more: list[Any] = []
        """Room for further workers, which the cluster may have one day."""
        self._asked_s = 0.0
        self._files: dict[tuple[str, int, str], EventFile] = {}
        self._patience = _Patience(self._say)

    # -- the beginning and the end -------------------------------------------------------------

    def _prepare(self) -> None:
        if self._cluster.notice is not None:
            self._say(self._cluster.notice)
        self._calls.start()
        self._data = self._put_data()
        self._room = _Room(self._cluster, self.job.config, self._supervisor.members)
        if not self._room.take_home():
            self._look_elsewhere()
        while not self._room.is_ready():
            if self._room.would_fit_elsewhere():
                self._look_elsewhere()
            lacks = f"wanted {self._room.in_words}, free {in_words(self._cluster.free())}"
            if self._patience.is_over("room", f"waiting for room on the Ray cluster: {lacks}"):
                raise RoleError(f"the Ray cluster had no room for the run: {lacks}")

        most = self.job.config.most_workers or self.job.config.workers
        for _ in range(most - self.job.config.workers):
            self._more.append(self._room.ask_for_another())

    def _look_elsewhere(self) -> None:
        """Have the master on any node that sees the run's folder."""
        assert self._room is not None
        self._write_cluster()  # which is what they look for: it has a key of the run's own
        self._room.take_any(self._cluster.who_see(self.folder.cluster))

    def _put_data(self) -> Any:
        """Into the cluster's memory, once for each node; None where it is no tensors."""
        descriptor = share({"train": self._train, "test": self._test})
        try:
            has_tensors = self.job.config.engine == "ray" and os.fstat(descriptor).st_size > 128
            return self._cluster.ray.put(_as_array(descriptor)) if has_tensors else None
        finally:
            os.close(descriptor)
            self._train = self._test = None

    def _close(self) -> None:
        self._calls.close()
        if self._room is not None:
            self._room.release(self._more)
        self._data = None

    # -- actors --------------------------------------------------------------------------------

    def _spawn(self, process: Process) -> None:
        assert self._room is not None
        member = process.member
        self._patience.forget(process.name)
        ray = self._cluster.ray
        options = {
            **self._room.options_for(member, self._places_of_master()),
            "max_restarts": 0,
            "name": None,
        }
        actor = ray.remote(RoleActor).options(**options).remote()
        order = self._order(member)
        process.running = _Actor(ray, actor, actor.run.remote(order, self._data))

    def _places_of_master(self) -> str:
        """The node where the run's folder is looked after."""
        found = [place for m, place in self._places.items() if m.role == "master"]
        return found[0].node if found else self._cluster.node

    def _order(self, member: Member) -> Order:
        initial = self.folder.initial
        on_cpu = {} if member.role in ("master", "worker") else {"device": "cpu", "devices": None}
        return Order(
            role=member.role,
            index=member.index,
            generation=member.generation,
            engine=self._calls.address,
            key=self._key,
            token=self._token,
            run_dir=str(self.folder.path.absolute()),
            described=self.folder.read_json(self.folder.config),
            initial=initial.read_bytes() if initial.exists() else None,
            folder=str(Path.cwd()),
            path=tuple(path for path in sys.path if path),
            options=on_cpu,
            is_shown=self._shows_rank_0 and member.role == "master",
        )

    def _look(self) -> None:
        for end, hello in self._calls.come():
            self._take_in(end, hello)
        for process in self._processes.values():
            if isinstance(process.running, _Actor) and process.line is None:
                self._look_after(process, process.running)
        self._tell_model()
        is_time = time.monotonic() > self._asked_s + ASK_EVERY_S
        if self._more and is_time and not self._supervisor.is_stopping:
            self._asked_s = time.monotonic()
            self._take_more()

    def _take_more(self) -> None:
        """There may be room for one more worker by now."""
        assert self._room is not None
        place = next((place for place in self._more if self._room.is_there(place)), None)
        if place is None:
            return
        self._more.remove(place)
        rank = 1 + max(rank for m in self._supervisor.members for rank in m.ranks)
        member = Member("worker", rank, self._incarnation, ranks=(rank,))
        self._room.let_in(member, place)
        self._supervisor.members.append(member)
        self._processes[member] = Process(member)
        self._say(f"there is room for worker {rank}: it joins")
        self._write_cluster()

    def _take_in(self, line: socket.socket, hello: Message) -> None:
        """Somebody who knows the token calls: an actor of ours, or what is left of a former one."""
        process = next((p for p in self._processes.values() if p.name == hello.get("name")), None)
        is_ours = process is not None and hello.get("key") == self._key
        if process is None or not is_ours or hello["generation"] != process.member.generation:
            line.close()
        elif "stream" in hello:
            self._show(line, STREAMS[hello["stream"]])
        elif process.line is not None or process.running is None:
            line.close()
        else:
            place = Place(hello["node"], hello["host"], hello["pid"], hello["meeting"])
            self._places[process.member] = place
            self._attach(process, line)
            self._supervisor.heard(process.member, time.monotonic())
            process.tell({**self._whereabouts(), "model": self._model})
            if process.member.role == "master":
                self._write_cluster()
            at = {"node": place.node, "host": place.host, "pid": place.pid}
            self._record("placed", role=process.member.role, index=process.member.index, **at)

    def _show(self, line: socket.socket, descriptor: int) -> None:
        """Pass on what rank 0 prints."""

        def copy() -> None:
            try:
                found = line.recv(1 << 16)
            except OSError:
                found = b""
            if found:
                os.write(descriptor, found)
            else:
                self._selector.unregister(line)
                line.close()

        self._watch(line, copy)

    def _look_after(self, process: Process, actor: "_Actor") -> None:
        """An actor that has not called yet is Ray's affair, but a person may want to know."""
        member = process.member
        self._supervisor.heard(member, time.monotonic())
        if actor.has_ended():
            self._ended(process)
            return
        assert self._room is not None
        wanted = in_words(self._room.needs(member)) or "a node"
        waits = f"waiting for Ray to start {member.who} (it needs {wanted}; free: "
        waits += f"{in_words(self._cluster.free()) or 'nothing'})"
        is_over = self._patience.is_over(process.name, waits)
        if is_over and not self._may_lack(member):
            process.kill()
            process.running = None
            self._lose(process, f"could not be started within {ROOM_TIMEOUT_S:g} s")

    def _may_lack(self, member: Member) -> bool:
        """Whether the run goes on without it."""
        return self.job.config.most_workers is not None and member.role == "worker"

    def _end_processes(self, processes: Collection[Process]) -> None:
        """Ray says of an actor that it is dead before its process is; and one that is alive when
        its line is broken ends the run in order, which may be another one's by then."""
        for process in processes:
            process.tell({"die": True})
        for process in processes:
            if process.line is not None:
                _await_end(process.line)
        super()._end_processes(processes)
        for process in processes:
            self._places.pop(process.member, None)

    def _start_again(self, process: Process, how: str, others: Sequence[Process]) -> None:
        super()._start_again(process, how, others)
        if how == WITH_NODE:
            process.member.num_restarts -= 1  # which is no fault of its own

    def _ended(self, process: Process) -> None:
        self._places.pop(process.member, None)
        super()._ended(process)

    def _tell_to_stop(self, process: Process) -> None:
        if process.line is None:
            process.kill()  # it would not hear it
        super()._tell_to_stop(process)

    # -- what they are told, and say -----------------------------------------------------------

    def _hear(self, process: Process, message: Mapping[str, Any]) -> None:
        if "address" in message:
            place = self._places[process.member]
            self._places[process.member] = dataclasses.replace(place, from_afar=message["address"])
            self._write_cluster()
        if "file" in message:
            self._keep(process, message["file"], message["text"])
        super()._hear(process, message)

    def _keep(self, process: Process, name: str, text: str) -> None:
        """Of a process that does not see the folder: more of one of its files."""
        if FILE_NAME.fullmatch(name) is None:
            raise RoleError(f"{process.member.who} wants to write {name!r} into the run's folder")
        kind, _, file = name.partition("/")
        if kind == "logs":
            with (self.folder.path / name).open("a", encoding="utf-8") as found:
                found.write(text)
            return
        known = process.name, process.member.generation, _stem(file)
        if known not in self._files:
            self._files[known] = EventFile.create(self.folder.events, _stem(file))
        self._files[known].write(text)

    def _write_cluster(self) -> None:
        servers = self._supervisor.find("ps")
        places = [self._places.get(server) for server in servers]
        self._whole = Cluster(
            ps=tuple(f"unix:@offbeat-{self._key}-{s.index}-{s.generation}" for s in servers),
            epochs=tuple(server.generation for server in servers),
            incarnations=self._supervisor.incarnations(),
            began_s=self._began_s,
            nodes=tuple("?" if place is None else place.node for place in places),
            from_afar=tuple("" if place is None else place.from_afar for place in places),
            key=self._key,
            meeting=self._meeting(),
        )
        self._whole.write(self.folder)
        for process in self._processes.values():
            process.tell(self._whereabouts())

    def _meeting(self) -> str:
        """Where workers without servers meet, once the master has said it."""
        is_served = self.job.config.chosen.kind.served
        found = [place for member, place in self._places.items() if member.role == "master"]
        return "" if is_served or not found else found[0].meeting

    def _whereabouts(self) -> dict[str, Any]:
        return {"cluster": self._whole.to_json(), "elapsed_s": self.clock()}

    def _tell_model(self) -> None:
        """What a script trains, as soon as rank 0 has written it down: servers that do not see the
        folder wait for it."""
        if self._model is None and self.folder.model.exists():
            self._model = self.folder.read_json(self.folder.model)
            for process in self._processes.values():
                process.tell({"model": self._model})


class _Actor(Running):
    def __init__(self, ray: Any, actor: Any, done: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._done = done

    def has_ended(self) -> bool:
        return bool(self._ray.wait([self._done], timeout=0)[0])

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)

    def end(self, *, has_left: bool) -> str | None:
        ready, _ = self._ray.wait([self._done], timeout=END_TIMEOUT_S)
        self.kill()  # one that is through still has its node's resources
        if not ready:
            return None if has_left else "was lost: its line broke"
        try:
            self._ray.get(self._done)
        except self._ray.exceptions.RayError as error:
            return None if has_left else _how(error)
        return None if has_left else "ended before it was through"


def _await_end(line: socket.socket) -> None:
    """Until the other side is gone; what it still has to say nobody waits for."""
    line.settimeout(END_TIMEOUT_S)
    with contextlib.suppress(OSError):  # it was gone before, or takes too long: it is killed next
        while line.recv(1 << 16):
            pass


def _how(error: Exception) -> str:
    """What Ray says of a death, in few words."""
    found = str(error)
    if "memory" in type(error).__name__.lower() or "running low on memory" in found:
        return "was killed by Ray, since its node ran out of memory"
    if "node has died" in found or "node was terminated" in found or "node is dead" in found:
        return WITH_NODE
    if "creation task" in found or type(error).__name__ == "RayTaskError":
        last = found.strip().splitlines()[-1]
        return f"could not be started: {last}"
    return "died"


class _Room:
    """The part of the cluster that is the run's: one bundle of resources for each of its members
    but the evaluator, spread over the nodes."""

    def __init__(self, cluster: RayCluster, config: TrainConfig, members: Sequence[Member]) -> None:
        self._cluster = cluster
        self._asks = asks_of(config)
        asked = {ask.who: dict(ask.resources) for ask in self._asks}
        self._needs = {m: asked[m.who] for m in members if m.who in asked}
        self.in_words = in_words(_sum(self._needs.values()))
        (self._master,) = (m for m in self._needs if m.role == "master")
        self._group: Any = None
        self._bundles: dict[Member, tuple[Any, int]] = {}
        self._is_pinned = False
        self._asked_s = 0.0

    def take_home(self) -> bool:
        """Ask for room, and for the master's on this process's own node, where the run's folder
        is; False: it has not so much at all."""
        if self._cluster.has_room_here(self._needs[self._master]):
            self._ask({NODE_LABEL: self._cluster.node})
            self._is_pinned = True
        return self._is_pinned

    def take_any(self, nodes: Sequence[str]) -> None:
        """Ask for room, with the master on one of these nodes."""
        there = self._cluster.nodes()
        if all(name in nodes for name in there):
            self._ask({})  # nor need it be one of today's
        else:
            homes = [index for index, name in enumerate(there) if name in nodes]
            if lack := find_lack(self._asks, list(there.values()), homes):
                raise RoleError(
                    f"the Ray cluster has no room: {lack}; give --run-dir a path that all nodes "
                    f"see, or start the run on a node that has room for the master"
                )
            self._ask({NODE_LABEL: f"in({','.join(nodes)})"})
        self._is_pinned = False

    def _ask(self, of_master: Mapping[str, str]) -> None:
        if self._group is not None:
            self._cluster.ray.util.remove_placement_group(self._group)
        self._group = self._cluster.ray.util.placement_group(
            list(self._needs.values()),
            strategy="SPREAD",
            bundle_label_selector=[
                dict(of_master) if m is self._master else {} for m in self._needs
            ],
        )
        self._bundles = {m: (self._group, index) for index, m in enumerate(self._needs)}
        self._asked_s = time.monotonic()

    def would_fit_elsewhere(self) -> bool:
        """Whether all is there that is wanted, but for a master on this process's own node."""
        is_time = time.monotonic() > self._asked_s + HOME_TIMEOUT_S
        free = list(self._cluster.free_of_each().values()) if self._is_pinned and is_time else []
        return bool(free) and not find_lack(self._asks, free)

    def is_ready(self) -> bool:
        return bool(self._group.wait(timeout_seconds=0.2))

    def ask_for_another(self) -> Any:
        """A place for one more worker, as soon as there is one."""
        return self._cluster.ray.util.placement_group([self._needs[self._master]])

    def is_there(self, place: Any) -> bool:
        return bool(place.wait(timeout_seconds=0))

    def let_in(self, member: Member, place: Any) -> None:
        self._needs[member] = place.bundle_specs[0]
        self._bundles[member] = (place, 0)

    def needs(self, member: Member) -> Mapping[str, float]:
        return self._needs.get(member, {})

    def options_for(self, member: Member, node_of_master: str) -> dict[str, Any]:
        strategies = self._cluster.ray.util.scheduling_strategies
        needs = self.needs(member)
        if not needs:
            strategy = strategies.NodeAffinitySchedulingStrategy(node_of_master, soft=False)
            return {"num_cpus": 0, "scheduling_strategy": strategy}
        group, index = self._bundles[member]
        strategy = strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        )
        more = {"memory": needs["memory"]} if "memory" in needs else {}
        return {
            "num_cpus": needs.get("CPU", 0),
            "num_gpus": needs.get("GPU", 0),
            "scheduling_strategy": strategy,
            **more,
        }

    def release(self, others: Sequence[Any]) -> None:
        groups = [*others, *(group for group, _ in self._bundles.values())]
        for group in {id(group): group for group in groups}.values():
            self._cluster.ray.util.remove_placement_group(group)


def _sum(all_needs: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for needs in all_needs:
        for name, count in needs.items():
            total[name] = total.get(name, 0.0) + count
    return total


def _as_array(descriptor: int) -> Any:
    """As what Ray hands on without a copy."""
    return np.frombuffer(map_all(descriptor), dtype=np.uint8)


def _stem(file: str) -> str:
    """worker-1.2.jsonl -> worker-1: its number is another one here."""
    return re.sub(r"(\.\d+)?\.jsonl$", "", file)


def _silent() -> logging.Logger:
    """Of strangers nothing is said."""
    log = logging.Logger("calls")
    log.addHandler(logging.NullHandler())
    return log


class Calls:
    """Where actors call. Whoever does not know the token is sent away."""

    def __init__(self, host: str, token: bytes) -> None:
        self._come: queue.SimpleQueue[tuple[socket.socket, Message]] = queue.SimpleQueue()
        self._listener = SocketListener(any_port(host), NO_PAYLOAD, Terms(token=token))
        self.address = self._listener.address
        self._acceptor = Acceptor(self._listener, self._serve, "calls", _silent())

    def start(self) -> None:
        self._acceptor.start()

    def come(self) -> Sequence[tuple[socket.socket, Message]]:
        """Who has called since the last time."""
        found = []
        while not self._come.empty():
            found.append(self._come.get_nowait())
        return found

    def close(self) -> None:
        self._acceptor.close()
        self._acceptor.join()
        for line, _ in self.come():
            line.close()

    def _serve(self, end: ServerEnd, hello: Message) -> None:
        assert isinstance(end, SocketServerEnd)
        self._come.put((end.release(), hello))


class _Patience:
    """Tells what is waited for, once, and when that was long enough."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since_s: dict[str, float] = {}
        self._has_said: set[str] = set()

    def is_over(self, what: str, words: str) -> bool:
        since_s = self._since_s.setdefault(what, time.monotonic())
        waited_s = time.monotonic() - since_s
        if waited_s > PATIENCE_S and what not in self._has_said:
            self._has_said.add(what)
            self._say(words)
        return waited_s > ROOM_TIMEOUT_S

    def forget(self, what: str) -> None:
        self._since_s.pop(what, None)
        self._has_said.discard(what)
