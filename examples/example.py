"""MNIST with a sigmoid network: one server and three workers, asynchronous, each started by hand.

    pc-01$ python example.py --job_name="ps" --task_index=0
    pc-02$ python example.py --job_name="worker" --task_index=0
    pc-03$ python example.py --job_name="worker" --task_index=1
    pc-04$ python example.py --job_name="worker" --task_index=2

Worker 0 is the master. On other machines than this one, every process is told where the others
are, as --ps_hosts=pc-01:2222 --worker_hosts=pc-02:2222,pc-03:2222,pc-04:2222, and knows the token
(OFFBEAT_TOKEN, or --token_file). MNIST is fetched where it is missing.
"""

import argparse
import sys
import time
from pathlib import Path

from offbeat.cli import main
from offbeat.data import fetch
from offbeat.data.datasets import load_dataset
from offbeat.errors import MissingDataError
from offbeat.run.progress import make_meter, say

HOSTS = [f"localhost:{port}" for port in (2222, 2223, 2224, 2225)]


def have_mnist(data_dir: str) -> None:
    try:
        load_dataset("mnist", data_dir)
    except MissingDataError:
        with make_meter() as meter:
            fetch.get("mnist", Path(data_dir), source=None, say=say, meter=meter)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job_name", required=True, choices=("ps", "worker"))
    parser.add_argument("--task_index", type=int, default=0)
    parser.add_argument("--ps_hosts", default=HOSTS[0])
    parser.add_argument("--worker_hosts", default=",".join(HOSTS[1:]))
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--run_dir", default=f"runs/{time.strftime('%Y%m%d-%H%M%S')}-example")
    parser.add_argument("--token_file")
    return parser.parse_args(arguments)


def command(given: argparse.Namespace) -> list[str]:
    """The command of Offbeat's that does it."""
    role = ["role", given.job_name, "--index", str(given.task_index)]
    role += ["--ps", given.ps_hosts, "--worker", given.worker_hosts]
    if given.token_file is not None:
        role += ["--token-file", given.token_file]
    if given.job_name == "ps":
        return role
    role += ["--data-dir", given.data_dir, "--log-every", "100"]
    if given.task_index:
        return [*role, "--score"]
    run = ["--recipe", "mnist-sigmoid", "--split", "shared", "--run-dir", given.run_dir]
    return [*role, *run, "--epochs", str(given.epochs)]


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if given.job_name == "worker":
        have_mnist(given.data_dir)
    sys.exit(main(command(given)))
