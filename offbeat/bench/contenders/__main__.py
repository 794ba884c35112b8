"""One process of a contender."""

import importlib
import os
import sys
from pathlib import Path

import torch

from offbeat.bench.contenders import CONTENDERS, Part
from offbeat.data.shared import open_shared
from offbeat.recipes.base import load_recipe
from offbeat.roles.control import DATA_VARIABLE
from offbeat.run.job import Facts
from offbeat.run.making import rejoin_job
from offbeat.run.rundir import RunFolder


def main(name: str, index: int, folder: RunFolder) -> None:
    config, described = folder.read_config()
    sources = open_shared(int(os.environ[DATA_VARIABLE]))
    job = rejoin_job(config, load_recipe(config.recipe), Facts(**described["job"]), sources)
    torch.set_num_threads(1)
    part = Part(name=name, index=index, job=job, folder=folder)
    importlib.import_module(f"offbeat.bench.contenders.{CONTENDERS[name].module}").work(part)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), RunFolder(Path(sys.argv[3])))
