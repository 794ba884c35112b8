"""CIFAR with a server, a master, workers and an evaluator, each started by hand; or all in one.

    python train.py -m simplecnn -md model/simplecnn -nc 10 -e 100

    D="-m simplecnn -md model/dist -nc 10 -e 100 --distributed"
    D="$D --ps-count 1 --worker-count 2 --dist-start-port 7000"
    python train.py $D --dist-type ps --ps-index 0
    python train.py $D --dist-type master
    python train.py $D --dist-type worker --worker-index 0
    python train.py $D --dist-type worker --worker-index 1
    python train.py $D --dist-type evaluator

A folder that holds a checkpoint is gone on with. Servers listen at the start port and the ports
below it, on --host. Off this machine that takes a token: OFFBEAT_TOKEN, or --token-file.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from offbeat.cli import main
from offbeat.recipes.base import BUILT_IN

PACE = ["--checkpoint-every", "1000", "--log-every", "25", "--seed", "1234"]


def find_recipe(name: str, num_classes: int) -> str:
    """The recipe called `name` for so many classes: those for 100 end in -100."""
    wanted = name if num_classes == 10 else f"{name}-{num_classes}"
    if ":" in name:  # one of the user's own
        return name
    if wanted not in BUILT_IN:
        raise SystemExit(f"train.py: error: no recipe {name!r} for {num_classes} classes")
    return wanted


def find_hosts(given: argparse.Namespace) -> list[str]:
    """ps i listens at P - i; the master would be at P + 1, worker i at P + 2 + i."""
    port, host = given.dist_start_port, given.host
    servers = [f"{host}:{port - i}" for i in range(given.ps_count)]
    workers = [f"{host}:{port + 2 + i}" for i in range(given.worker_count)]
    master = f"{host}:{port + 1}"
    return ["--ps", ",".join(servers), "--worker", ",".join(workers), "--master", master]


def find_work(given: argparse.Namespace) -> list[str]:
    """What is trained, and where it is kept; a run that is there is resumed."""
    epochs = ["--epochs", str(given.epochs)]
    if any(Path(given.model_dir, "checkpoints").glob("0*")):
        return ["--resume", given.model_dir, *epochs]
    summaries = []
    if importlib.util.find_spec("tensorboard") is not None:
        summaries = ["--tensorboard", "--summary-every", "50"]
    recipe = find_recipe(given.model, given.num_classes)
    run = ["--recipe", recipe, "--run-dir", given.model_dir, "--data-dir", given.data_dir]
    return [*run, *epochs, *PACE, *summaries]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", default="simplecnn", help="a recipe")
    parser.add_argument("-md", "--model-dir", required=True, help="the run's folder")
    parser.add_argument("-nc", "--num-classes", type=int, default=10)
    parser.add_argument("-e", "--epochs", type=int, default=100)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--dist-type", choices=("ps", "master", "worker", "evaluator"))
    parser.add_argument("--ps-count", type=int, default=1)
    parser.add_argument("--worker-count", type=int, default=2)
    parser.add_argument("--dist-start-port", type=int, default=7000)
    parser.add_argument("--ps-index", type=int, default=0)
    parser.add_argument("--worker-index", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1", help="where the servers are")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--token-file")
    given = parser.parse_args(arguments)
    if given.distributed and given.dist_type is None:
        parser.error("--distributed needs --dist-type")
    return given


def command(given: argparse.Namespace) -> list[str]:
    """The command of Offbeat's that does it."""
    if not given.distributed:
        alone = ["--engine", "inproc", "--workers", "1"]
        work = find_work(given)
        return ["train", *work, *([] if "--resume" in work else alone)]
    index = {"ps": given.ps_index, "worker": given.worker_index}.get(given.dist_type, 0)
    role = ["role", given.dist_type, "--index", str(index), *find_hosts(given)]
    if given.token_file is not None:
        role += ["--token-file", given.token_file]
    if given.dist_type == "master":
        return [*role, *find_work(given)]
    return role if given.dist_type == "ps" else [*role, "--data-dir", given.data_dir]


if __name__ == "__main__":
    sys.exit(main(command(parse(sys.argv[1:]))))
