"""The manifest for Kubernetes, carried out on one machine: each pod in a network namespace of its
own, with what the manifest tells it and nothing else.

Needs the right to make them; skipped with a plain message where it is missing.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="make setup installs PyYAML")

from pods import Pods

from offbeat.report.summary import summarise

pytestmark = pytest.mark.slow

Make = Callable[..., Pods]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("there is no ip or unshare here: they come with iproute2 and util-linux")
    with ExitStack() as stack:

        def made(*flags: str) -> Pods:
            pods = Pods(tmp_path, *flags)
            stack.callback(pods.destroy)
            try:
                pods.create()
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no right to make network namespaces here: {error.stderr.decode()}")
            return pods

        yield made


def start_all(pods: Pods) -> None:
    """Servers come last: until then nobody can look up their names."""
    workers = [pods.start("offbeat-workers", n) for n in range(pods.count("offbeat-workers"))]
    master = pods.start("offbeat-master")
    pods.wait_until(lambda: "waiting for the" in master.text() + workers[0].text(), "waiting")
    for n in range(pods.count("offbeat-ps")):
        pods.start("offbeat-ps", n)


STEPS = 60


def test_the_manifest_makes_one_run_though_pods_die(make: Make) -> None:
    """A worker's pod is killed, then a server's, then the master's; each is started anew, with
    another address, and as the same one of its kind."""
    pods = make("--steps", str(STEPS), "--checkpoint-every", "10")
    start_all(pods)
    pods.wait_until(lambda: pods.num_pushes() > 20, "20 pushes")
    pods.pods["offbeat-workers-2"].end()
    again = pods.start("offbeat-workers", 2)
    pods.wait_until(lambda: "worker 3 of fashion-cnn" in again.text(), "the worker")
    pods.pods["offbeat-ps-1"].end()
    server = pods.start("offbeat-ps", 1)
    pods.wait_until(lambda: "serving from version" in server.text(), "the server")
    pods.pods["offbeat-master-0"].end()
    master = pods.start("offbeat-master")
    pods.wait_until(lambda: "going on with it" in master.text(), "the master")
    assert set(pods.codes().values()) == {0}, pods.text()
    summary = summarise(pods.run_dir)
    assert summary["status"] == "finished", pods.text()
    whole, restored = summary["kept"]
    assert whole["applied"] == whole["gradients"] == 5 * STEPS, "all gradients are in"
    assert restored["applied"] + restored["lost"] == restored["gradients"] == 5 * STEPS
    assert restored["lost"] <= 20, "what came after the last checkpoint"
    assert "Traceback" not in pods.text()


def test_a_masters_pod_that_is_evicted_is_missed_until_it_is_back(make: Make) -> None:
    """It ends the run in order, with a checkpoint; then everybody is started again, as long as the
    run is not through."""
    pods = make("--steps", "40", "--checkpoint-every", "1000000")
    start_all(pods)
    pods.wait_until(lambda: pods.num_pushes() > 20, "20 pushes")
    process = pods.pods["offbeat-master-0"].process
    assert process is not None
    process.terminate()
    codes = pods.codes()
    jobs = {key: code for key, code in codes.items() if "ps" not in key}
    assert set(jobs.values()) == {130}, "a Job would take 0 for the end"
    assert summarise(pods.run_dir)["status"] == "interrupted", pods.text()
    start_all(pods)
    assert set(pods.codes().values()) == {0}, pods.text()
    summary = summarise(pods.run_dir)
    assert summary["status"] == "finished" and summary["not_kept"] == 0
    assert {row["applied"] for row in summary["kept"]} == {5 * 40}, "all gradients are in"


def test_pods_that_are_deleted_keep_a_checkpoint(make: Make) -> None:
    """All of them at once, as kubectl delete does it."""
    pods = make("--steps", "100000", "--checkpoint-every", "1000000")
    start_all(pods)
    pods.wait_until(lambda: pods.num_pushes() > 40, "40 pushes")
    for pod in pods.pods.values():
        assert pod.process is not None
        pod.process.terminate()
    assert set(pods.codes().values()) == {130}, pods.text()
    summary = summarise(pods.run_dir)
    assert summary["status"] == "interrupted" and summary["not_kept"] == 0, pods.text()
    assert max(pods.applied().values()) == 1 and "Traceback" not in pods.text()
