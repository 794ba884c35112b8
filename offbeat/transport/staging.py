"""How values get from a slot to the device that computes, and back.

Slots lie in the CPU's memory, which a transport owns and may share with another process. A worker's
towers (towers.py) have a staging between it and their devices; one tower on the CPU has no use for
it, since it computes in the slots themselves. Copies are begun, and may go on while something else
is done:

    staging.upload(slot.values, params); staging.ready()      # now the device may compute on them
    staging.download(gradient, slot.values); staging.done()   # now they may be sent
    staging.forget()                                          # now the slot's memory may go
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Staging(ABC):
    """One thread uses it. Sources stay as they are until the wait that belongs to them."""

    @abstractmethod
    def upload(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy from a slot to a device."""

    @abstractmethod
    def ready(self) -> None:
        """Have what the devices compute from here on see what was uploaded. The CPU need not wait
        for that."""

    @abstractmethod
    def download(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy from a device into a slot, when that device is through with what it was
        told so far."""

    @abstractmethod
    def done(self) -> None:
        """Wait until what was downloaded is in its slot, and nothing is copied any more."""

    @abstractmethod
    def forget(self) -> None:
        """Nothing is being copied, and the slots' memory is about to go away: let go of it."""


def make_staging(devices: Sequence[torch.device], slot_device: torch.device) -> Staging:
    """The one for towers on these devices."""
    is_cuda = any(device.type == "cuda" for device in devices)
    return CudaStaging() if is_cuda and slot_device.type == "cpu" else PlainStaging()


class PlainStaging(Staging):
    """Plain copies within the CPU's memory, each of them there as soon as it was begun; or within
    a GPU's, in the order of what it is told."""

    def upload(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def ready(self) -> None:
        pass

    def download(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def done(self) -> None:
        pass

    def forget(self) -> None:
        pass


class CudaStaging(Staging):
    """Each device copies in the stream in which it computes, from and to memory that CUDA was told
    of (pinned); where that cannot be, copies are slower."""

    def __init__(self) -> None:
        self._pinned: dict[int, bool] = {}
        """By address: whether CUDA could be told of it."""
        self._busy: set[torch.device] = set()

    def upload(self, source: Tensor, target: Tensor) -> None:
        self._copy(source, target, slot=source, device=target.device)

    def ready(self) -> None:
        """A stream keeps the order of what it is told."""

    def download(self, source: Tensor, target: Tensor) -> None:
        self._copy(source, target, slot=target, device=source.device)

    def done(self) -> None:
        for device in self._busy:
            torch.cuda.current_stream(device).synchronize()
        self._busy.clear()

    def forget(self) -> None:
        for address, is_pinned in self._pinned.items():
            if is_pinned:
                _cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def _copy(self, source: Tensor, target: Tensor, slot: Tensor, device: torch.device) -> None:
        if device.type == "cuda":
            self._pin(slot)
            self._busy.add(device)
        target.copy_(source, non_blocking=True)

    def _pin(self, slot: Tensor) -> None:
        if slot.data_ptr() in self._pinned:
            return
        size = slot.numel() * slot.element_size()
        is_pinned = int(_cudart().cudaHostRegister(slot.data_ptr(), size, 0)) == 0
        self._pinned[slot.data_ptr()] = is_pinned
        if not is_pinned:  # whoever asks CUDA next would be told of it, as if it were his error
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
