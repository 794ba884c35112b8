"""Steps whose loss is compiled (`--compile`), and with it the backward pass, by torch.compile.

towers.py uses it for whole batches; the odd last one of an epoch is computed as ever, since code is
compiled for one size. What cannot be compiled is found out at the first try, and computed as ever
from then on:

    compiled = Compiled(batch_size, log.warning)
    value = compiled.compute(step, loss, batch, undo)     # step(loss), or step(the compiled loss)
"""

import contextlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offbeat.data.batches import Batch, batch_length, leaves
from offbeat.errors import ConfigError, in_a_line

OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1}
"""Draw the random numbers that the plain step draws; and start no processes to compile in, which
would have to be ended."""
ONE_AT_A_TIME = threading.Lock()
"""Held for a first step, in which torch compiles: it does not bear several threads doing so."""

T = TypeVar("T")
Loss = Callable[[nn.Module, Batch], Tensor]


class Compiled:
    """Of one worker; one thread uses it. `batch_size`: examples of a whole batch on one device,
    None: as many as the first one has; `tell` is told where compiling fails."""

    def __init__(
        self,
        batch_size: int | None,
        tell: Callable[[str], None],
        make: Callable[[Loss], Loss] = lambda loss: torch.compile(loss, options=OPTIONS),
    ) -> None:
        self._batch_size = batch_size
        self._tell = tell
        self._make = make
        self._made: Loss | None = None
        self._devices: set[torch.device] = set()
        """Where a step was made: torch compiles for each."""
        self._is_given_up = False

    def compute(
        self, step: Callable[[Loss], T], loss: Loss, part: Batch, undo: Callable[[], None]
    ) -> T:
        """What `step` comes to, with the compiled loss where that can be. `undo` takes back what a
        step that failed has left."""
        self._batch_size = self._batch_size or batch_length(part)
        if self._is_given_up or batch_length(part) != self._batch_size:
            return step(loss)
        device = next(leaves(part)).device
        try:
            with ONE_AT_A_TIME if device not in self._devices else contextlib.nullcontext():
                self._made = self._made or self._make(loss)
                result = step(self._made)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            undo()
            result = step(loss)  # which fails likewise where it is the loss's own error
            self._give_up(error)
        self._devices.add(device)
        return result

    def _give_up(self, error: BaseException) -> None:
        self._is_given_up = True
        reason = getattr(error, "inner_exception", error)
        self._tell(f"the step is not compiled: {in_a_line(reason)}")


def check_toolchain(devices: Iterable[torch.device]) -> None:
    """Have what torch compiles with, and is not here, said before a run begins."""
    kinds = {device.type for device in devices}
    if "cuda" in kinds and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "compile on a GPU needs Triton, which is not installed: pip install triton, or leave "
            "--compile out"
        )
    for compilers in (_compilers(kind) for kind in kinds):
        if not any(shutil.which(compiler) for compiler in compilers):
            raise ConfigError(
                f"compile needs a C++ compiler, and there is no {' or '.join(compilers)} here: "
                f"install one (apt install g++), or leave --compile out"
            )
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        raise ConfigError(
            f"compile needs Python's headers, and there is no {header}: install them (apt install "
            f"python3-dev), or leave --compile out"
        )


def _compilers(kind: str) -> list[str]:
    """What torch, or Triton, would look for."""
    if kind == "cuda":
        return [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return [os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")]
