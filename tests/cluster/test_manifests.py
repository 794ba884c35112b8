"""What examples/clusters has for Slurm and Kubernetes, held against the published schemas and what
shells are known to trip over; and against each other, where two places have to say the same."""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli.flags import make_parser
from offbeat.cluster.hosts import Task
from offbeat.cluster.scheduled import find_scheduled

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "clusters"
SCRIPTS = [EXAMPLES / "slurm.sbatch", ROOT / ".ci" / "run"]
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))
yaml = pytest.importorskip("yaml", reason="make setup installs PyYAML")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        document
        for document in documents(EXAMPLES / "kubernetes.yaml")
        if document["kind"] == kind and document["metadata"]["name"] == name
    )
    return found


def tool(name: str) -> str:
    """The one of this environment, else the system's."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here: make setup installs it")
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_scripts(path: Path) -> None:
    found = subprocess.run(
        [tool("shellcheck"), str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stdout


def check(document: dict[str, Any]) -> None:
    """Strictly: what the schema does not know is wrong too."""
    validate = pytest.importorskip("kubernetes_validate", reason="make setup installs it")
    validate.validate(document, validate.latest_version(), strict=True)


def test_the_manifests_are_as_kubernetes_wants_them() -> None:
    found = documents(EXAMPLES / "kubernetes.yaml")
    for document in found:
        check(document)
    kinds = sorted(document["kind"] for document in found)
    assert kinds == ["Job", "Job", "PersistentVolumeClaim", "Service", "StatefulSet"]


def test_what_kubernetes_does_not_know_is_found() -> None:
    document = find("Job", "offbeat-workers")
    document["spec"]["paralelism"] = 4
    with pytest.raises(Exception, match="paralelism"):
        check(document)


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    return list(document["spec"]["template"]["spec"]["containers"])


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def test_all_pods_speak_of_the_same_cluster() -> None:
    servers = find("StatefulSet", "offbeat-ps")
    service, workers = find("Service", "offbeat"), find("Job", "offbeat-workers")
    master = find("Job", "offbeat-master")
    (port,) = (entry["port"] for entry in service["spec"]["ports"])
    names = [f"offbeat-ps-{n}.offbeat:{port}" for n in range(servers["spec"]["replicas"])]
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == servers["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    for document in (servers, workers, master):
        (container,) = containers(document)
        known = environment(container)
        assert known["OFFBEAT_PS"] == ",".join(names)
        assert known["OFFBEAT_NUM_WORKERS"] == str(workers["spec"]["completions"])
        (secret,) = (entry for entry in container["env"] if entry["name"] == "OFFBEAT_TOKEN")
        assert "value" not in secret, "a token does not stand in a manifest"
    assert workers["spec"]["parallelism"] == workers["spec"]["completions"]


def pods() -> list[tuple[dict[str, Any], dict[str, str], Task]]:
    """Of each: its document, what tells it who it is, and who it is."""
    servers, workers = find("StatefulSet", "offbeat-ps"), find("Job", "offbeat-workers")
    found = [
        (servers, {"HOSTNAME": f"offbeat-ps-{n}"}, Task("ps", n))
        for n in range(servers["spec"]["replicas"])
    ]
    found += [
        (workers, {"JOB_COMPLETION_INDEX": str(n), "HOSTNAME": "w"}, Task("worker", n))
        for n in range(workers["spec"]["completions"])
    ]
    return [*found, (find("Job", "offbeat-master"), {"HOSTNAME": "m-x2"}, Task("master", 0))]


def test_every_pod_knows_who_it_is_and_its_flags_are_known() -> None:
    for document, told, task in pods():
        (container,) = containers(document)
        _, found = find_scheduled({**environment(container), **told}, servers=1)
        assert found == task
        assert container["command"][0] == "offbeat"
        make_parser()[0].parse_args(container["command"][1:])


def test_pods_do_not_run_as_root_and_say_what_they_need() -> None:
    for document in itertools.chain.from_iterable(map(documents, MANIFESTS)):
        for spec in pod_specs(document):
            assert spec["securityContext"]["runAsNonRoot"] is True
            for container in spec["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert {"cpu", "memory"} <= set(container["resources"]["requests"])


def pod_specs(document: Any) -> list[dict[str, Any]]:
    """Wherever in a document there are some."""
    if isinstance(document, list):
        return [spec for entry in document for spec in pod_specs(entry)]
    if not isinstance(document, dict):
        return []
    own = [document] if "containers" in document else []
    return own + [spec for value in document.values() for spec in pod_specs(value)]


# -- the RayJob ------------------------------------------------------------------------------------

POD = object()
"""A pod's template, which Kubernetes' own schema describes."""
NAMES = dict[str, str]
NEEDED = "!"
RAY_JOB: dict[str, Any] = {
    "entrypoint": str,
    "runtimeEnvYAML": str,
    "jobId": str,
    "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    "entrypointNumCpus": float,
    "entrypointNumGpus": float,
    "entrypointResources": str,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "suspend": bool,
    "metadata": NAMES,
    "clusterSelector": NAMES,
    "submitterConfig": {"backoffLimit": int},
    "submitterPodTemplate": POD,
    "rayClusterSpec": {
        "rayVersion": str,
        "enableInTreeAutoscaling": bool,
        "headGroupSpec!": {"rayStartParams": NAMES, "serviceType": str, "template!": POD},
        "workerGroupSpecs": [
            {
                "groupName!": str,
                "replicas": int,
                "minReplicas": int,
                "maxReplicas": int,
                "numOfHosts": int,
                "rayStartParams": NAMES,
                "template!": POD,
            }
        ],
    },
}
"""Our own reading of the part of KubeRay's ray.io/v1 RayJob that matters here (its API reference,
version 1.4): no package on PyPI carries the published schema. Pods' templates in it are
Kubernetes' own, and are held against its schema. `!`: has to be there."""


def check_as(shape: Any, value: Any, where: str) -> None:
    if shape is POD:
        job = {"template": value, "selector": {"matchLabels": {}}}
        value.setdefault("metadata", {"labels": {}})
        meta = {"metadata": {"name": "any"}, "spec": job}
        check({"apiVersion": "apps/v1", "kind": "ReplicaSet", **meta})
    elif isinstance(shape, dict):
        names = {name.rstrip(NEEDED): name for name in shape}
        unknown = set(value) - set(names)
        missing = {name for name in shape if name.endswith(NEEDED)} - {
            names.get(name) for name in value
        }
        assert not unknown and not missing, f"{where}: {unknown or missing}"
        for name, inner in value.items():
            check_as(shape[names[name]], inner, f"{where}.{name}")
    elif isinstance(shape, list):
        for entry in value:
            check_as(shape[0], entry, f"{where}[]")
    elif isinstance(shape, tuple):
        assert value in shape, where
    elif shape == NAMES:
        assert all(isinstance(word, str) for pair in value.items() for word in pair), where
    else:
        assert type(value) in {float: (int, float)}.get(shape, (shape,)), where


def ray_job() -> dict[str, Any]:
    (found,) = (d for d in documents(EXAMPLES / "rayjob.yaml") if d["kind"] == "RayJob")
    return found


def test_the_ray_job_is_as_kuberay_wants_it() -> None:
    for document in documents(EXAMPLES / "rayjob.yaml"):
        if document["kind"] != "RayJob":
            check(document)
    job = ray_job()
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert job["apiVersion"] == "ray.io/v1"
    check_as(RAY_JOB, job["spec"], "spec")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("entrypoint", 7, "spec.entrypoint"),
        ("entryPoint", "x", "entryPoint"),
        ("submissionMode", "Job", "spec.submissionMode"),
        ("rayClusterSpec", {"workerGroupSpecs": []}, "headGroupSpec"),
        ("submitterPodTemplate", {"spec": {"container": []}}, "container"),
    ],
)
def test_what_kuberay_does_not_know_is_found(name: str, value: Any, says: str) -> None:
    with pytest.raises(Exception, match=says):
        check_as(RAY_JOB, {**ray_job()["spec"], name: value}, "spec")


def test_the_ray_jobs_pods_have_one_image_and_a_folder_that_outlives_them() -> None:
    cluster = ray_job()["spec"]["rayClusterSpec"]
    specs = pod_specs(cluster)
    assert len(specs) == 1 + len(cluster["workerGroupSpecs"])
    assert {container["image"] for spec in specs for container in spec["containers"]} == {
        "offbeat:ray"
    }
    command = ray_job()["spec"]["entrypoint"].split()
    assert command[:6] == ["offbeat", "train", "--engine", "ray", "--ray-address", "auto"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    run_dir = Path(command[command.index("--run-dir") + 1])
    head = cluster["headGroupSpec"]["template"]["spec"]
    (mount,) = (mount["mountPath"] for mount in head["containers"][0]["volumeMounts"])
    assert run_dir.is_relative_to(mount)
