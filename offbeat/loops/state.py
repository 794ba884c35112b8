"""What a script keeps of its own, so that it goes on where it was when it is started again.

    state = offbeat.State(epoch=0, best=0.0)           # after distribute
    for epoch in range(state.epoch, 10):
        ...
        state.keep(epoch=epoch + 1)

Numbers, texts, lists and dicts of them as JSON, and tensors: nothing is pickled. Each worker's lies
in RUN/states, in a cluster on its own machine, beside the number of its last step; the newest one
whose steps the servers have is what a script finds that was started again.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from offbeat.errors import ConfigError, ModelError
from offbeat.loops import seat
from offbeat.run.rundir import role_name

NUM_KEPT = 100
"""A checkpoint that a run goes on from may be older than what was kept last."""


class State:
    """Its values are attributes, by the names that it is made with."""

    def __init__(self, **values: Any) -> None:
        """`values`: what they are in the beginning."""
        self._values = dict(values)
        here = seat.taken
        self._folder: Path | None = None
        if here is None:
            return
        if here.loop is None:
            raise ModelError("offbeat.State comes after offbeat.distribute, which finds the run")
        self._folder = here.states / role_name("worker", here.rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        step = max((s for s in _steps(self._folder) if s <= here.loop.num_known), default=None)
        if step is not None:
            self._values |= _read(self._folder, step)
            here.loop.step_number = step
            here.log.info("the script goes on after step %d", step)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"the state has no {name!r}") from None

    def keep(self, **changes: Any) -> None:
        """Change these values, and keep all of them for a script that is started again."""
        unknown = changes.keys() - self._values.keys()
        if unknown:
            raise ConfigError(
                f"the state has no {', '.join(sorted(unknown))}: name it where State is made"
            )
        self._values |= changes
        if self._folder is None:
            return
        assert seat.taken is not None and seat.taken.loop is not None
        _write(self._folder, seat.taken.loop.step_number, self._values)
        for step in sorted(_steps(self._folder))[:-NUM_KEPT]:
            for path in _paths(self._folder, step):
                path.unlink(missing_ok=True)


def _paths(folder: Path, step: int) -> tuple[Path, Path]:
    name = f"{step:08d}"
    return folder / f"{name}.json", folder / f"{name}.safetensors"


def _steps(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()]


def _write(folder: Path, step: int, values: dict[str, Any]) -> None:
    """The JSON last, and at once: without it the tensors are not there."""
    tensors = {k: v.detach().contiguous() for k, v in values.items() if isinstance(v, torch.Tensor)}
    plain = {k: v for k, v in values.items() if k not in tensors}
    of_plain, of_tensors = _paths(folder, step)
    try:
        text = json.dumps({"values": plain, "tensors": sorted(tensors)})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the state takes what JSON has, and tensors: {error}") from error
    if tensors:
        save_file({k: v.clone() for k, v in tensors.items()}, of_tensors)
    temporary = of_plain.with_name(f".{of_plain.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(of_plain)


def _read(folder: Path, step: int) -> dict[str, Any]:
    of_plain, of_tensors = _paths(folder, step)
    found = json.loads(of_plain.read_text(encoding="utf-8"))
    values: dict[str, Any] = found["values"]
    return values | (load_file(of_tensors) if found["tensors"] else {})
