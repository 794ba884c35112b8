"""What a worker keeps of its own from one life to the next, on the disk of its machine.

Servers have the parameters, and what their optimizer keeps. What a worker keeps for itself (the
optimizer of its local steps) they never see. So it is written down before every push,
beside the number of that push; a worker that is started again is told which of its pushes are in,
and goes on with what was kept before the last of them:

    keeper = Keeper(folder, fresh=False, log=log)       # RUN/states/worker-1
    keeper.save(12, {"optimizer.element.exp_avg": ...}, {"position": 600})     # before push 12
    keeper.load(12)                                     # after the last step that is in; or None

One file holds a step, and is there whole or not at all: written under a temporary name, then
renamed. It outlives its process, which is what is asked of it; after a power failure it may be
damaged, which its checksum tells. Made by roles/run.py for a worker, which has it in its own
thread.
"""

import json
import logging
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

MOST_BYTES = 256 << 20
LEAST_KEPT, MOST_KEPT = 2, 1000
"""Of the newest steps: a push may have been sent or not, so two; and a checkpoint that a run goes
on from may be older than what was kept last."""
NAME = re.compile(r"kept-(\d{8,})\.safetensors")
Numbers = Mapping[str, float | int]


class Keeper:
    """One thread uses it."""

    def __init__(self, folder: Path | None, fresh: bool, log: logging.Logger) -> None:
        """None: nothing is kept. `fresh`: nor is it, and what is there is thrown away, so that a
        later life does not take it for its own."""
        self._folder = None if fresh else folder
        self._log = log
        self._is_fresh = fresh
        self._failed = False
        self._sizes = {} if folder is None else _sizes_in(folder)
        """In bytes, by step."""
        if fresh and folder is not None:
            self._drop(folder, list(self._sizes))

    def save(self, step: int, tensors: Mapping[str, Tensor], numbers: Numbers) -> None:
        """Keep what there is before push `step` is sent. What was kept of later steps belongs to
        pushes that no server has any more, and goes."""
        if self._folder is None:
            return
        path = _path(self._folder, step)
        temporary = path.with_name(f".{path.name}")
        own = {name: _own(tensor) for name, tensor in tensors.items()}
        about = {
            "step": str(step),
            "crc32": str(_checksum(own)),
            "numbers": json.dumps({**numbers}),
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(own, temporary, about)
            temporary.replace(path)
            self._sizes[step] = path.stat().st_size
            self._drop(self._folder, self._superfluous(step))
        except (OSError, SafetensorError) as error:
            self._tell_of_failure(step, error)

    def load(self, step: int) -> tuple[dict[str, Tensor], dict[str, float | int]] | None:
        """What was kept after that step, in memory of its own; None: begin anew. Whoever asked
        looks whether it is what was expected."""
        if not step:
            return None
        if self._is_fresh:
            self._begin_anew(step, "--fresh-worker-state")
        elif self._folder is None or step not in self._sizes:
            self._begin_anew(step, "nothing was kept of it here")
        else:
            try:
                return _read(_path(self._folder, step), step)
            except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
                self._begin_anew(step, f"what was kept is damaged, or no file of this run: {error}")
        return None

    def _begin_anew(self, step: int, why: str) -> None:
        self._log.warning("what this worker keeps begins anew after step %d: %s", step, why)

    def _superfluous(self, newest: int) -> list[int]:
        """Which steps go, now that there is this one."""
        found = [step for step in self._sizes if step > newest]
        num_bytes = 0
        for count, step in enumerate(sorted(self._sizes.keys() - found, reverse=True)):
            num_bytes += self._sizes[step]
            if count >= LEAST_KEPT and (num_bytes > MOST_BYTES or count >= MOST_KEPT):
                found.append(step)
        return found

    def _drop(self, folder: Path, steps: list[int]) -> None:
        for step in steps:
            _path(folder, step).unlink(missing_ok=True)
            del self._sizes[step]

    def _tell_of_failure(self, step: int, error: Exception) -> None:
        """Training goes on. Said once; what is there of this step is of another life."""
        if not self._failed:
            self._log.warning(
                "cannot keep the state of step %d: %s; if this worker is started again, what it "
                "keeps begins anew",
                step,
                error,
            )
        self._failed = True
        self._sizes.pop(step, None)
        if self._folder is not None and self._folder.is_dir():
            _path(self._folder, step).unlink(missing_ok=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"kept-{step:08d}.safetensors"


def _sizes_in(folder: Path) -> dict[int, int]:
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        found = [(NAME.fullmatch(entry.name), entry) for entry in entries if entry.is_file()]
        return {int(match[1]): entry.stat().st_size for match, entry in found if match is not None}


def _own(tensor: Tensor) -> Tensor:
    """As a file takes it: on the CPU, and with memory that is no other tensor's too."""
    tensor = tensor.detach().to("cpu").contiguous()
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if is_part else tensor


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(name.encode(), found)
        if tensors[name].numel():
            found = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _read(path: Path, step: int) -> tuple[dict[str, Tensor], dict[str, float | int]]:
    with safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if int(about["step"]) != step:
        raise ValueError(f"it is of step {about['step']}")
    if int(about["crc32"]) != _checksum(tensors):
        raise ValueError("its checksum is another one")
    numbers = json.loads(about["numbers"])
    if not isinstance(numbers, dict) or not {type(v) for v in numbers.values()} <= {int, float}:
        raise ValueError("its numbers are none")
    return tensors, numbers
