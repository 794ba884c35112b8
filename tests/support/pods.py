"""Pods on one machine: what a manifest says is started in network namespaces, each with an address,
a host's name and names of other pods that it can look up; as Kubernetes would have it.

Needs the right to make them. What it writes under /etc/netns it removes again.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from offbeat.run.events import read_events

MANIFEST = Path(__file__).parents[2] / "examples" / "clusters" / "kubernetes.yaml"
NETNS = Path("/etc/netns")
"""Where `ip netns exec` finds files that a namespace is to have instead of those in /etc."""
NETWORK = "10.213.78"
TIMEOUT_S = 240.0
WAIT_S = 0.1
IN_POD = 'mount -t tmpfs tmpfs /dev/shm; hostname "$0"; exec "$@"'


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Pod:
    """One that runs, with an address that no other one ever had."""

    def __init__(self, name: str, number: int, prefix: str, folder: Path) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.out = folder / f"{name}-{number}.out"
        self.process: subprocess.Popen[bytes] | None = None
        self._space = f"{prefix}-{number}"
        self._plug = f"{prefix}{number}"
        self._etc = NETNS / self._space

    def create(self, bridge: str) -> None:
        ip("netns", "add", self._space)
        ip("link", "add", self._plug, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        ip("link", "set", self._plug, "master", bridge, "up")
        ip("-n", self._space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self._space, "link", "set", "eth0", "up")
        ip("-n", self._space, "link", "set", "lo", "up")
        self._etc.mkdir(parents=True)
        (self._etc / "nsswitch.conf").write_text("hosts: files\n")
        self.tell_names({})

    def tell_names(self, names: dict[str, str]) -> None:
        """In the file that is there already: it is what processes have."""
        known = {"localhost": "127.0.0.1", self.name: self.address, **names}
        lines = [f"{address} {name}\n" for name, address in known.items()]
        (self._etc / "hosts").write_text("".join(lines))

    def start(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        with self.out.open("wb") as output:
            inside = ["ip", "netns", "exec", self._space, "unshare", "--uts", "sh", "-c", IN_POD]
            self.process = subprocess.Popen(
                [*inside, self.name, *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(30)

    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def destroy(self) -> None:
        if self.process is not None:
            self.end()
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self._space)
        shutil.rmtree(self._etc, ignore_errors=True)
        with contextlib.suppress(OSError):  # others may have theirs there
            NETNS.rmdir()


class Pods:
    """Those of the manifest. What a test wants to be shorter, `flags` of the master say."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.volume = folder / "volume"
        self.volume.mkdir()
        self.run_dir = self.volume / "first"
        self._flags = list(flags)
        self._bridge = f"op{secrets.token_hex(2)}"
        self._token = secrets.token_urlsafe(32)
        self._number = 0
        self.pods: dict[str, Pod] = {}
        """The newest of each name."""
        self._gone: list[Pod] = []
        documents = list(yaml.safe_load_all(MANIFEST.read_text()))
        self._documents = {d["metadata"]["name"]: d for d in documents if d["kind"] != "Service"}
        (self._service,) = (d["metadata"]["name"] for d in documents if d["kind"] == "Service")
        commands = folder / "bin"
        commands.mkdir()
        program = "import sys; from offbeat.cli import main; sys.exit(main())"
        (commands / "offbeat").write_text(f"#!{sys.executable}\n{program}\n")
        (commands / "offbeat").chmod(0o755)
        self._path = f"{commands}{os.pathsep}{os.environ['PATH']}"

    def create(self) -> None:
        ip("link", "add", self._bridge, "type", "bridge")
        ip("link", "set", self._bridge, "up")

    def destroy(self) -> None:
        for pod in [*self.pods.values(), *self._gone]:
            pod.destroy()
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", self._bridge)

    def count(self, name: str) -> int:
        spec = self._documents[name]["spec"]
        return int(spec.get("replicas", spec.get("completions", 1)))

    def start(self, name: str, index: int = 0) -> Pod:
        """A pod of this StatefulSet or Job; in the place of the former one, if there was one."""
        document = self._documents[name]
        (container,) = document["spec"]["template"]["spec"]["containers"]
        self._number += 1
        key = f"{name}-{index}"
        is_set = document["kind"] == "StatefulSet"
        called = key if is_set else f"{key}-{secrets.token_hex(3)}"
        pod = Pod(called, self._number, self._bridge, self.folder)
        if key in self.pods:
            self._gone.append(self.pods[key])
        self.pods[key] = pod
        pod.create(self._bridge)
        self._tell_names()
        environment = self._environment(document, container, pod, index)
        pod.start(self._command(container), environment, self.folder)
        return pod

    def _tell_names(self) -> None:
        """A pod of the StatefulSet has a name as soon as it is there."""
        names = {
            f"{pod.name}.{self._service}": pod.address
            for key, pod in self.pods.items()
            if pod.name == key
        }
        for pod in self.pods.values():
            pod.tell_names(names)

    def _command(self, container: dict[str, Any]) -> list[str]:
        """The volume lies elsewhere than in a pod, and so does what is on it."""
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
        command = list(container["command"])
        for mount in mounts:
            command = [word.replace(f"{mount}/", f"{self.volume}/") for word in command]
        return [*command, *(self._flags if mounts else [])]

    def _environment(
        self, document: dict[str, Any], container: dict[str, Any], pod: Pod, index: int
    ) -> dict[str, str]:
        known = {"PATH": self._path, "HOME": str(self.folder), "HOSTNAME": pod.name}
        known["CUDA_VISIBLE_DEVICES"] = ""
        if "PYTHONPATH" in os.environ:
            known["PYTHONPATH"] = os.environ["PYTHONPATH"]
        if document["spec"].get("completionMode") == "Indexed":
            known["JOB_COMPLETION_INDEX"] = str(index)
        for entry in container["env"]:
            if "value" in entry:
                known[entry["name"]] = entry["value"]
            else:
                assert entry["valueFrom"]["secretKeyRef"]["key"] == "token"
                known[entry["name"]] = self._token
        return known

    # -- what became of them -------------------------------------------------------------------

    def num_pushes(self) -> int:
        return sum(event["kind"] == "push" for event in read_events(self.run_dir / "events"))

    def applied(self) -> Counter[tuple[int, int, int]]:
        return Counter(
            (event["shard"], event["worker"], event["sequence"])
            for event in read_events(self.run_dir / "events")
            if event["kind"] == "push" and event["outcome"] == "applied"
        )

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(int(TIMEOUT_S / WAIT_S)):
            if condition():
                return
            threading.Event().wait(WAIT_S)
        raise AssertionError(f"waited in vain for {what}\n{self.text()}")

    def codes(self) -> dict[str, int]:
        """Once all have ended, which is by themselves."""
        return {
            key: pod.process.wait(TIMEOUT_S)
            for key, pod in self.pods.items()
            if pod.process is not None
        }

    def text(self) -> str:
        pods = [*self._gone, *self.pods.values()]
        return "\n".join(f"--- {pod.name} at {pod.address}\n{pod.text()}" for pod in pods)
