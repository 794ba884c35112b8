"""Trackers: what they are shown, of libraries that are made up here, and of the real ones where
they are installed."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import toy_recipe

import offbeat
from offbeat.cli import main
from offbeat.config import make_config
from offbeat.errors import ConfigError, RoleError
from offbeat.recipes.callbacks import Evaluation, Steps
from offbeat.run import trackers

VARIABLES = ("WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL")


class Recording:
    """A client or a run of any of the libraries: each call by its name, with what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.id, self.name = "wandb-id", "trackio-name"
        self.summary: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self._answer(name)

        return call

    def _answer(self, name: str) -> Any:
        if name == "create_run":
            return SimpleNamespace(info=SimpleNamespace(run_id="mlflow-id"))
        return {"get_experiment_by_name": None, "create_experiment": "7"}.get(name, self)

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for found, args, kwargs in self.calls if found == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recording:
    """Stands in for all three."""
    recording = Recording()
    made = {
        "wandb": {"init": recording.init, "Settings": dict},
        "mlflow": {
            "MlflowClient": lambda: recording,
            "entities": SimpleNamespace(Metric=lambda *values: values),
        },
        "trackio": {"init": recording.init},
    }
    for name, contents in made.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for variable in (*VARIABLES, "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where an account would be
    return recording


def train(run_dir: Path, *track: str, recipe: Any = None, **options: Any) -> Any:
    given = {"workers": 1, "steps": 12, "threads": 1, "quiet": True, **options}
    return offbeat.train(recipe or toy_recipe(), run_dir=run_dir, track=track, **given)


def test_wandb_is_shown_the_run(run_dir: Path, library: Recording) -> None:
    result = train(run_dir, "wandb:mine")
    ((_, given),) = library.of("init")
    assert (given["project"], given["name"], given["mode"]) == ("mine", "run", "offline")
    assert given["group"] == "custom apply-reply 1w 1s" and given["dir"] == str(run_dir)
    assert given["config"]["lr"] == 0.1 and given["config"]["batch_size"] == 10, "resolved"
    assert given["id"] is None and given["resume"] is None and "steps" in given["config"]
    logged = [values for (values,), _ in library.of("log")]
    scores = [values for values in logged if "test/accuracy" in values]
    assert scores[-1] == {
        "test/accuracy": result.test_accuracy,
        "test/loss": result.test_loss,
        "version": 12,
    }
    steps = [values for values in logged if "loss" in values]
    assert steps[-1]["version"] == 12 and steps[0]["gradients_per_s"] > 0
    assert steps[-1]["staleness"] == 0 and steps[-1]["learning_rate"] == 0.1
    assert (("*",), {"step_metric": "version"}) in library.of("define_metric")
    assert library.summary == {"status": "finished", "reason": None}
    assert library.of("finish") == [((), {"exit_code": 0})]


def test_mlflow_is_shown_the_run(run_dir: Path, library: Recording) -> None:
    result = train(run_dir, "mlflow")
    assert library.of("create_experiment") == [(("offbeat",), {})]
    ((args, given),) = library.of("create_run")
    assert args == ("7",) and given["run_name"] == "run"
    assert given["tags"]["group"] == "custom apply-reply 1w 1s"
    assert (("mlflow-id", "lr", 0.1), {}) in library.of("log_param")
    metrics = [metric for (_, batch), _ in library.of("log_batch") for metric in batch]
    found = {name: (value, version) for name, value, _, version in metrics}
    assert found["test/accuracy"] == (result.test_accuracy, 12)
    assert found["loss"][1] == 12 and found["gradients_per_s"][0] > 0
    assert library.of("set_terminated") == [(("mlflow-id", "FINISHED"), {})]


def test_trackio_is_shown_the_run(run_dir: Path, library: Recording) -> None:
    result = train(run_dir, "trackio:mine")
    ((_, given),) = library.of("init")
    assert (given["project"], given["name"], given["resume"]) == ("mine", "run", "never")
    logged = library.of("log")
    scores = {"test/accuracy": result.test_accuracy, "test/loss": result.test_loss}
    assert ((scores,), {"step": 12}) in logged
    assert logged[-1] == (({"status": "finished"},), {"step": 12})
    assert library.calls[-1][0] == "finish"


def test_a_resumed_run_goes_on_where_it_was(run_dir: Path, library: Recording) -> None:
    names = ("wandb", "mlflow", "trackio")
    train(run_dir, *names)
    known = json.loads((run_dir / "trackers.json").read_text())
    assert known == {"wandb": "wandb-id", "mlflow": "mlflow-id", "trackio": "trackio-name"}
    library.calls.clear()
    offbeat.resume(run_dir, toy_recipe(), steps=20)
    (_, of_wandb), (_, of_trackio) = library.of("init")
    assert (of_wandb["id"], of_wandb["resume"]) == ("wandb-id", "allow")
    assert (of_trackio["name"], of_trackio["resume"]) == ("trackio-name", "allow")
    assert library.of("update_run") == [(("mlflow-id",), {"status": "RUNNING"})]
    assert not library.of("create_run") and not library.of("log_param"), "which cannot change"


def test_a_failure_is_the_end_status(run_dir: Path, library: Recording) -> None:
    def broken(model: Any, batch: Any) -> Any:
        raise KeyError("x")

    with pytest.raises(RoleError):
        train(run_dir, "wandb", "mlflow", recipe=toy_recipe(loss=broken, metric=offbeat.accuracy))
    assert library.summary["status"] == "failed" and "KeyError" in library.summary["reason"]
    assert library.of("finish") == [((), {"exit_code": 1})]
    ((of_tag, _),) = library.of("set_tag")
    assert of_tag[:2] == ("mlflow-id", "reason")
    assert library.of("set_terminated") == [(("mlflow-id", "FAILED"), {})]


def test_what_is_no_number_is_left_out_and_names_are_made_to_fit(library: Recording) -> None:
    tracker = trackers.Mlflow("")
    tracker._client, tracker._id = library, "i"
    scores = {"precision@1": 0.5, "odd": math.nan, "loss": math.inf}
    tracker.on_evaluation(Evaluation(version=3, at_s=1.0, scores=scores))
    nothing: dict[str, Any] = dict.fromkeys(("loss", "staleness"))
    nothing |= {"gradients_per_s": None, "examples_per_s": math.nan, "gradients": 1, "examples": 1}
    tracker.on_step(Steps(version=4, at_s=1.0, **nothing))
    (((_, batch), _),) = library.of("log_batch")
    assert [(name, value, version) for name, value, _, version in batch] == [
        ("test/precision_1", 0.5, 3)
    ]


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_MODE": "disabled"}, None),
        ({"WANDB_API_KEY": "k" * 40}, None),
        ({"WANDB_BASE_URL": "https://elsewhere.example"}, "offline"),
    ],
)
@pytest.mark.parametrize("has_account", [False, True])
def test_wandb_is_offline_where_nobody_has_an_account(
    run_dir: Path,
    library: Recording,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    mode: str | None,
    has_account: bool,
) -> None:
    for name, value in {"WANDB_PROJECT": "theirs", "WANDB_RUN_GROUP": "ours", **variables}.items():
        monkeypatch.setenv(name, value)
    if has_account:
        account = Path.home() / ".netrc"
        account.write_text("machine api.wandb.ai login user password p\n")
        account.chmod(0o600)
    train(run_dir, "wandb")
    ((_, given),) = library.of("init")
    assert given["mode"] == (None if has_account and "WANDB_BASE_URL" not in variables else mode)
    assert (given["project"], given["group"]) == ("theirs", "ours")


def test_runs_of_a_comparison_are_named_after_their_cells(
    tmp_path: Path, library: Recording
) -> None:
    options = {"threads": 1, "quiet": True, "steps": 3, "track": ["trackio"]}
    out = tmp_path / "c"
    offbeat.compare(toy_recipe(), disciplines=["sync"], workers=[1], seeds=2, out=out, **options)
    given = [kwargs for _, kwargs in library.of("init")]
    assert [each["name"] for each in given] == ["sync-1w-1s-seed-0", "sync-1w-1s-seed-1"]
    assert {each["group"] for each in given} == {"custom sync 1w 1s"}


def test_a_library_that_is_not_installed_is_told_before_the_run_begins(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"--track mlflow .*pip install 'offbeat\[mlflow\]'"):
        train(run_dir, "mlflow")
    assert not run_dir.exists()


def test_the_flag_may_be_given_several_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config({"track": ["wandb:a b", "mlflow"]})
    assert config.track == ("wandb:a b", "mlflow") and make_config({"track": "wandb"}).track
    assert make_config(json.loads(json.dumps(config.to_json()))).track == config.track
    assert make_config({}).track == ()
    assert main(["train", "--track", "wandb", "--track", "wand"]) == 2
    assert "unknown track 'wand'; did you mean 'wandb'?" in capsys.readouterr().err
    file = tmp_path / "c.toml"
    file.write_text("track = [3]\n")
    assert main(["train", "--config", str(file)]) == 2
    assert "track must be text, or a list of it, not [3]" in capsys.readouterr().err


def installed(name: str) -> Any:
    missing = importlib.util.find_spec(name) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{name} is not installed"))


REAL = """
import sys
import offbeat

if __name__ == "__main__":
    track = [f"{sys.argv[1]}:mine"]
    offbeat.train("toy:recipe", run_dir="r", steps=40, track=track, engine="inproc")
    offbeat.resume("r", steps=60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [installed(name) for name in trackers.KINDS])
def test_the_real_library_takes_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: they leave threads behind."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "go.py").write_text(REAL)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    subprocess.run([sys.executable, "go.py", name], cwd=tmp_path, timeout=120, check=True)
    log = (tmp_path / "r" / "logs" / "callbacks.log").read_text()
    assert not log, log
    known = json.loads((tmp_path / "r" / "trackers.json").read_text())[name]
    if name == "wandb":
        found = list((tmp_path / "r" / "wandb").glob(f"offline-run-*/run-{known}.wandb"))
        assert found and all(path.stat().st_size for path in found)
    elif name == "mlflow":
        (scores,) = tmp_path.glob(f"mlruns/*/{known}/metrics/test/accuracy")
        assert [line.split()[2] for line in scores.read_text().splitlines()][-1] == "120"
    else:
        assert (tmp_path / "trackio" / "mine.db").exists()
