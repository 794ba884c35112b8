"""A stand-in for Slurm on one machine: srun starts the tasks of a step here, with what Slurm tells
them, and passes signals on as it does. Nodes are loopback addresses.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import RECIPE_FILE

from offbeat.report.summary import summarise
from offbeat.run.events import read_events

SCRIPT = Path(__file__).parents[2] / "examples" / "clusters" / "slurm.sbatch"
TIMEOUT_S = 120.0
WAIT_S = 0.05

SRUN = """
import itertools, os, signal, subprocess, sys
counts = [int(count) for count in os.environ["SHAPE"].split(",")]
flags = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
assert "--distribution=block" in flags
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": os.environ["SHAPE"]}
step["SLURM_STEP_NODELIST"] = f"127.0.0.[1-{len(counts)}]"
nodes = [node for node, count in enumerate(counts) for _ in range(count)]
tasks = []
for task, node in enumerate(nodes):
    known = {**os.environ, **step, "SLURM_PROCID": str(task), "SLURM_NODEID": str(node)}
    with open(f"task-{task}.out", "ab") as out:
        command = sys.argv[1 + len(flags) :]
        tasks.append(subprocess.Popen(command, env=known, stdout=out, stderr=out))
def pass_on(number, frame):
    for task in tasks:
        task.send_signal(number)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, pass_on)
with open("tasks", "w") as file:
    print(*(task.pid for task in tasks), file=file)
sys.exit(max(task.wait() for task in tasks))
"""


class Job:
    """A batch script, run in a folder of its own. `shape`: how many tasks each node has."""

    def __init__(self, folder: Path, *flags: str, shape: str = "3,3", **environment: str) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        commands = folder / "bin"
        commands.mkdir(exist_ok=True)
        program = "import sys; from offbeat.cli import main; sys.exit(main())"
        for name, text in (("srun", SRUN), ("offbeat", program)):
            (commands / name).write_text(f"#!{sys.executable}\n{text}")
            (commands / name).chmod(0o755)
        (folder / "recipes.py").write_text(RECIPE_FILE)
        given = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "SHAPE": shape}
        given |= {"RECIPE": "recipes.py:momentum", "RUN_DIR": "run", "SLURM_JOB_ID": "31"}
        (folder / "tasks").unlink(missing_ok=True)
        with (folder / "script.out").open("ab") as output:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), "--device", "cpu", *flags],
                cwd=folder,
                env={**os.environ, **given, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self.folder / "tasks").read_text().split()]

    def cancel(self) -> None:
        """As scancel does: every task is told, and srun, which tells them once more. Servers hear
        it first, as may well be on many nodes."""
        servers = [out for out in self.folder.glob("task-*.out") if "listens" in out.read_text()]
        pids = self.pids()
        for out in servers:
            os.kill(pids[int(out.stem.removeprefix("task-"))], signal.SIGTERM)
        self.wait_until(
            lambda: all("told to leave" in out.read_text() for out in servers), "they are told"
        )
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        self.process.send_signal(signal.SIGTERM)

    def num_pushes(self) -> int:
        return sum(event["kind"] == "push" for event in read_events(self.run_dir / "events"))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(int(TIMEOUT_S / WAIT_S)):
            if condition():
                return
            assert self.process.poll() is None, f"ended before {what}\n{self.text()}"
            threading.Event().wait(WAIT_S)
        raise AssertionError(f"waited in vain for {what}\n{self.text()}")

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def summary(self) -> dict[str, Any]:
        return summarise(self.run_dir)

    def text(self) -> str:
        files = sorted(self.folder.glob("*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in files)

    def close(self) -> None:
        """Whatever is still there."""
        if self.process.poll() is None:
            for pid in self.pids() if (self.folder / "tasks").exists() else []:
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait(TIMEOUT_S)
