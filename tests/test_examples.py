"""The examples run, and the README's first one is the file that runs."""

import contextlib
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from processes import RECIPE_FILE, free_ports

from offbeat.cli import main

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run_recipe(name: str, run_dir: Path, *flags: str) -> dict:
    recipe = f"{ROOT / 'examples' / name}:recipe"
    command = ["train", "--engine", "inproc", "--recipe", recipe, "--run-dir", str(run_dir)]
    assert main([*command, "--quiet", *flags]) == 0
    return json.loads((run_dir / "summary.json").read_text())


def test_own_model_from_the_shell(run_dir: Path) -> None:
    summary = run_recipe("own_model.py", run_dir, "--discipline", "lock-free", "--workers", "4")
    assert summary["test_accuracy"] > 0.9


@pytest.mark.slow
def test_a_discipline_of_ones_own_from_the_shell(run_dir: Path) -> None:
    """Among processes, each of which imports it."""
    summary = run_recipe(
        "own_model.py",
        run_dir,
        *("--discipline", f"{EXAMPLES / 'drop_stale.py'}:DropStale:0", "--workers", "3"),
        *("--engine", "local"),
    )
    (row,) = summary["kept"]
    assert row["dropped"] == summary["dropped"] > 0
    assert row["applied"] + row["dropped"] == row["gradients"]
    assert summary["staleness"]["max"] == 0


@pytest.mark.slow
def test_own_loop_is_launched_and_goes_on_after_a_death(run_dir: Path) -> None:
    flags = ["--workers", "2", "--servers", "2", "--kill-worker", "1@30", "--run-dir", str(run_dir)]
    script = [str(EXAMPLES / "own_loop.py"), "--epochs", "2", "--data", "fashion-mnist-sample"]
    assert main(["launch", "--quiet", *flags, *script, "--batch-size", "200"]) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["restarts"] == 1
    assert [shard["applied"] for shard in summary["kept"]] == [100, 100], "2 epochs of 50 batches"
    assert summary["final_cost"] < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library", "flags", "pattern", "least", "most"),
    [
        (
            *("mnist_script", "torch", ["--data", "fashion-mnist-sample", "--epochs", "2"]),
            *(r"accuracy \d+ of 2000 \(([\d.]+)%\)", 70, 100),
        ),
        ("lightning_module", "lightning", [], r"^accuracy ([\d.]+)", 0.7, 1),
        ("transformers_trainer", "transformers accelerate", [], r"^loss ([\d.]+)", 0, 0.8),
    ],
    ids=["torch", "lightning", "transformers"],
)
def test_scripts_with_libraries_run_alone_and_are_launched(
    name: str,
    library: str,
    flags: list[str],
    pattern: str,
    least: float,
    most: float,
    tmp_path: Path,
) -> None:
    for each in library.split():
        pytest.importorskip(each)
    launched = ["-m", "offbeat", "launch", "--workers", "2", "--run-dir", "run"]
    for before in ([], launched):
        done = subprocess.run(
            [sys.executable, *before, str(EXAMPLES / f"{name}.py"), *flags],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        *_, last = re.findall(pattern, done.stdout, re.MULTILINE)
        assert least < float(last) < most
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


WITH_LIGHTNING = """
import sys
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset
import offbeat
from lightning_module import Classifier

source, folder, epochs = sys.argv[1:]
lightning.seed_everything(1)
(images, labels), _ = offbeat.load_dataset("fashion-mnist-sample", "data")
data = TensorDataset(images[:640].float() / 255, labels[:640])
trainer = lightning.Trainer(
    max_epochs=int(epochs), devices=1, logger=False, enable_progress_bar=False,
    default_root_dir=folder, enable_checkpointing=offbeat.is_master(),
)
loader = DataLoader(data, 64, sampler=offbeat.Sampler(data))
loader.sampler.set_epoch(0 if source == "none" else 1)
model = Classifier(0.003)
trainer.fit(model, loader, ckpt_path=None if source == "none" else source)
if offbeat.is_master():
    trainer.save_checkpoint(f"{folder}/kept")
    torch.save(model.state_dict(), f"{folder}/weights.pt")
"""

WITH_TRANSFORMERS = """
import shutil, sys
import torch
from transformers import Trainer, TrainingArguments, set_seed
import offbeat
from transformers_trainer import Lines, make_model

source, folder, epochs = sys.argv[1:]
set_seed(1)
model = make_model()
optimizer = offbeat.distribute(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
arguments = TrainingArguments(
    output_dir=f"{folder}/{offbeat.rank()}", num_train_epochs=2, max_steps=20 * int(epochs),
    per_device_train_batch_size=25, save_steps=20, lr_scheduler_type="constant",
    report_to="none", disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Lines(), optimizers=(optimizer, None))
trainer.train(resume_from_checkpoint=None if source == "none" else source)
if offbeat.is_master():
    shutil.move(f"{folder}/0/checkpoint-{20 * int(epochs)}", f"{folder}/kept")
    torch.save(model.state_dict(), f"{folder}/weights.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "text"),
    [("lightning", WITH_LIGHTNING), ("transformers accelerate", WITH_TRANSFORMERS)],
    ids=["lightning", "transformers"],
)
def test_a_librarys_checkpoints_go_on_alone_and_launched(
    library: str, text: str, tmp_path: Path
) -> None:
    for each in library.split():
        pytest.importorskip(each)
    (tmp_path / "script.py").write_text(text)
    launched = ["-m", "offbeat", "launch", "--workers", "1"]
    for name, before, source, epochs in (
        *(("alone", [], None, 1), ("launched", launched, None, 1), ("whole", [], None, 2)),
        *(("first", [], "launched", 2), ("second", launched, "alone", 2)),
    ):
        (tmp_path / name).mkdir()
        begun = "none" if source is None else f"{source}/kept"
        done = subprocess.run(
            [sys.executable, *before, "script.py", begun, name, str(epochs)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{EXAMPLES}"},
        )
        assert done.returncode == 0, done.stderr
    found = {path.parent.name: torch.load(path) for path in tmp_path.glob("*/weights.pt")}
    for name, other in (("launched", "alone"), ("first", "whole"), ("second", "whole")):
        for key, tensor in found[other].items():
            assert torch.equal(found[name][key], tensor), (name, key)


def test_own_model_as_a_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_model.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    accuracy, staleness = done.stdout.splitlines()[-1].split()
    assert float(accuracy) > 0.9
    assert 0 < float(staleness) < 10
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-own_model-recipe-lock-free")


@pytest.mark.slow
def test_own_model_by_standard_input_is_trained_with_threads(tmp_path: Path) -> None:
    text = (EXAMPLES / "own_model.py").read_text().replace("epochs=20", "epochs=1")
    done = subprocess.run(
        [sys.executable, "-"],
        input=text,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "config.json").read_text())["config"]["engine"] == "inproc"


@pytest.mark.slow
def test_the_language_model_learns_and_reports_its_own_metric(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run_recipe("char_lm.py", run_dir, "--steps", "60")
    assert summary["test_accuracy"] is None
    assert summary["metric"] == "bits_per_character"
    assert 1 < summary["test_metric"] < 5.5
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Test-Metric: \d\.\d+ \(bits_per_character\)", lines[-3])


def test_the_readme_shows_the_example_that_runs() -> None:
    source = (ROOT / "examples" / "own_model.py").read_text()
    body = source[source.index("import torch") :].strip()
    assert body in (ROOT / "README.md").read_text()


# -- the command lines of two programs that Offbeat grew out of ------------------------------------


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(line: str) -> list[str]:
    """The command of Offbeat's behind a line as the documents print it."""
    name, *arguments = line.replace('"', "").split()
    made = script(name.removesuffix(".py"))
    found: list[str] = made.command(made.parse(arguments))
    return found


DISTRIBUTED = "train.py -m simplecnn -md model/d -nc 10 -e 100 --distributed --ps-count 2 "
DISTRIBUTED += "--worker-count 2 --dist-start-port 7000 --dist-type "
HOSTS = ["--ps", "127.0.0.1:7000,127.0.0.1:6999", "--worker", "127.0.0.1:7002,127.0.0.1:7003"]
HOSTS += ["--master", "127.0.0.1:7001"]


def test_the_cifar_programs_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = commands("train.py -m simplecnn -md model/simplecnn -nc 10 -e 100")
    pace = ["--checkpoint-every", "1000", "--log-every", "25", "--seed", "1234"]
    run = ["--recipe", "simplecnn", "--run-dir", "model/simplecnn", "--data-dir", "data"]
    summaries = ["--tensorboard", "--summary-every", "50"]
    one = ["--engine", "inproc", "--workers", "1"]
    assert alone == ["train", *run, "--epochs", "100", *pace, *summaries, *one]
    assert "simplecnn-100" in commands("train.py -m simplecnn -md model/s -nc 100 -e 100")
    with pytest.raises(SystemExit, match="no recipe 'alexnet' for 100 classes"):
        commands("train.py -m alexnet -md model/s -nc 100")
    assert commands(f"{DISTRIBUTED}ps --ps-index 1") == ["role", "ps", "--index", "1", *HOSTS]
    worker = commands(f"{DISTRIBUTED}worker --worker-index 1")
    assert worker == ["role", "worker", "--index", "1", *HOSTS, "--data-dir", "data"]
    master = commands(f"{DISTRIBUTED}master")
    assert master[: 4 + len(HOSTS)] == ["role", "master", "--index", "0", *HOSTS]
    assert master[4 + len(HOSTS) :] == [*run[:2], "--run-dir", "model/d", *run[4:], *alone[7:-4]]
    evaluator = commands(f"{DISTRIBUTED}evaluator")
    assert evaluator == ["role", "evaluator", "--index", "0", *HOSTS, "--data-dir", "data"]
    (tmp_path / "model/d/checkpoints/00000100").mkdir(parents=True)
    assert commands(f"{DISTRIBUTED}master")[-4:] == ["--resume", "model/d", "--epochs", "100"]


def test_the_mnist_programs_lines() -> None:
    hosts = ["--ps", "localhost:2222", "--worker", "localhost:2223,localhost:2224,localhost:2225"]
    line = 'example.py --job_name="ps" --task_index=0'
    assert commands(line) == ["role", "ps", "--index", "0", *hosts]
    first = commands('example.py --job_name="worker" --task_index=0')
    assert first[:8] == ["role", "worker", "--index", "0", *hosts]
    assert {"mnist-sigmoid", "shared", "20", "100"} <= set(first)
    third = commands('example.py --job_name="worker" --task_index=2')
    assert third == [*["role", "worker", "--index", "2"], *hosts, *third[8:]]
    assert third[8:] == ["--data-dir", "data", "--log-every", "100", "--score"]


class Started:
    """Processes of a script, in one folder; none outlives the block."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._script = str(EXAMPLES / f"{name}.py")
        self._processes: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self, *arguments: str) -> int:
        number = len(self._processes)
        output = self.folder / f"{number}.out"
        with output.open("wb") as file:
            command = [sys.executable, self._script, *arguments]
            process = subprocess.Popen(command, cwd=self.folder, stdout=file, stderr=file)
        self._processes.append((process, output))
        return number

    def text(self, number: int) -> str:
        return self._processes[number][1].read_text()

    def wait_for_all(self) -> None:
        for number, (process, _) in enumerate(self._processes):
            assert process.wait(120) == 0, self.text(number)

    def close(self) -> None:
        for process, _ in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    with contextlib.closing(Started(tmp_path, request.param)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("started", ["train"], indirect=True)
def test_the_cifar_programs_roles_train_and_go_on(started: Started) -> None:
    (started.folder / "recipes.py").write_text(RECIPE_FILE)
    for epochs in (10, 20):
        (port,) = free_ports(1)
        lines = ["-m", "recipes.py:recipe", "-md", "model", "-e", str(epochs), "--distributed"]
        lines += ["--dist-start-port", str(port), "--dist-type"]
        worker = started.start(*lines, "worker", "--worker-index", "0")
        evaluator = started.start(*lines, "evaluator")
        master = started.start(*lines, "master")
        started.start(*lines, "worker", "--worker-index", "1")
        started.start(*lines, "ps", "--ps-index", "0")
        started.wait_for_all()
        assert "Test-Accuracy" in started.text(master)
        assert "precision @ 1 = " in started.text(evaluator)
        assert f"is through after {80} steps" in started.text(worker), "what was left to do"
        summary = json.loads((started.folder / "model/summary.json").read_text())
        assert summary["updates"] == epochs * 24 and summary["status"] == "finished"


def write_mnist(folder: Path) -> None:
    """Made-up files of MNIST's form: 5,000 images to hold out, and 600 more."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 5600), ("t10k", 200)):
        images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (count,), dtype=torch.uint8, generator=generator)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 2051, count, 28, 28) + images.numpy().tobytes()
        )
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 2049, count) + labels.numpy().tobytes()
        )


@pytest.mark.slow
@pytest.mark.parametrize("started", ["example"], indirect=True)
def test_the_mnist_programs_roles_end_with_three_lines(started: Started) -> None:
    (started.folder / "data").mkdir()
    write_mnist(started.folder / "data/mnist")
    ports = [f"localhost:{port}" for port in free_ports(4)]
    hosts = [f"--ps_hosts={ports[0]}", f"--worker_hosts={','.join(ports[1:])}", "--epochs=40"]
    started.start("--job_name=ps", "--task_index=0", *hosts)
    workers = [started.start("--job_name=worker", f"--task_index={i}", *hosts) for i in range(3)]
    started.wait_for_all()
    for number in workers:
        accuracy, total, cost = started.text(number).splitlines()[-3:]
        assert re.fullmatch(r"Test-Accuracy: 0\.\d+", accuracy)
        assert re.fullmatch(r"Total Time: \d+\.\d\ds", total)
        assert re.fullmatch(r"Final Cost: \d+\.\d{4}", cost)
    assert re.search(
        r"^Step: \d+, Epoch: \d+, Batch: \d+ of 6, Cost: [\d.]+, AvgTime: [\d.]+ms$",
        started.text(workers[0]),
        re.MULTILINE,
    )
