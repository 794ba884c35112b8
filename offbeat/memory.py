"""Memory that several processes share: made once, sealed, passed on as a file descriptor.

It has no name in any file system, so nothing is left behind when its last user is gone, however
that ended. Used for the slots of a connection (transport/) and for the training data (data/).
"""

import fcntl
import mmap
import os
import tempfile
import warnings

import torch
from torch import Tensor

ALIGNMENT = 64
"""Parts begin at multiples of this many bytes: a cache line, and enough for any dtype."""


def make_memory(num_bytes: int) -> int:
    """A descriptor of so many zero bytes, which nobody can make shorter or longer any more.

    The caller owns the descriptor; whatever was mapped outlives it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("offbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    return _unlinked_file(num_bytes)


def map_memory(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Shared memory as a buffer; refuses a descriptor of less than `num_bytes`, which would turn
    a later access into a crash."""
    if os.fstat(descriptor).st_size < num_bytes:
        raise ValueError(f"the shared memory is smaller than the {num_bytes} bytes it should hold")
    return mmap.mmap(descriptor, num_bytes)


def view(buffer: mmap.mmap | memoryview, dtype: torch.dtype, count: int, offset: int) -> Tensor:
    """A tensor that lives in `buffer`, and keeps it alive; where that is for reading only, so is
    the tensor."""
    if not count:
        return torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)


def aligned(num_bytes: int) -> int:
    """The next place where a part may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _unlinked_file(num_bytes: int) -> int:
    """Where there is no memfd: a file that lost its name before anything was written to it."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix="offbeat-", dir=folder)
    os.unlink(path)  # noqa: PTH108
    os.ftruncate(descriptor, num_bytes)
    return descriptor
