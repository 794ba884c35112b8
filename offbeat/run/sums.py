"""Where there are no servers: where each worker's parameters lie, and what adds up the gradients.

Pure: it is told what every worker computes on. Called by a job, so that all processes of a run,
which have the same configuration, come to the same:

    >>> choose_sums("auto", [["cuda:0"], ["cuda:1"]], has_nccl=True).backend
    'nccl'
    >>> choose_sums("auto", [["cuda:0"], ["cuda:0"]], has_nccl=True).backend
    'gloo'
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.errors import ConfigError

GLOO, NCCL = "gloo", "nccl"
GPU, CPU = "cuda", "cpu"
Places = Sequence[Sequence[str]]
"""What each worker computes on, by its rank: names that are the same for one device only."""


@dataclass(frozen=True, slots=True)
class Sums:
    backend: str
    on_gpus: bool
    """Parameters, and what is added up, lie where each worker computes; else in the CPU's
    memory."""
    why: str

    @property
    def line(self) -> str:
        """For the log of a worker."""
        ways = {
            (NCCL, True): "with NCCL, on the GPUs",
            (GLOO, True): "with gloo, from the GPU by way of the CPU's memory",
            (GLOO, False): "with gloo, in the CPU's memory",
        }
        return f"gradients are added up {ways[self.backend, self.on_gpus]}: {self.why}"


def choose_sums(wanted: str, places: Places, *, has_nccl: bool) -> Sums:
    """`wanted`: what --server-device says. Several GPUs of one worker count by the first, where its
    gradient is."""
    if wanted == CPU:
        return Sums(GLOO, False, "--server-device cpu says so")
    for rank, own in enumerate(places):
        if not own[0].startswith(GPU):
            if wanted == GPU:
                raise ConfigError(
                    f"the parameters cannot be on cuda: worker {rank} computes on the CPU; leave "
                    f"--server-device cuda out"
                )
            return Sums(GLOO, False, f"worker {rank} computes on the CPU")
    if found := _shared(places):
        return Sums(GLOO, wanted == GPU, f"{found}, where NCCL refuses to")
    if not has_nccl:
        return Sums(GLOO, wanted == GPU, "torch was built without NCCL")
    return Sums(NCCL, True, "each worker has one of its own")


def _shared(places: Places) -> str:
    """Who computes on the same device as somebody else; empty: nobody."""
    owners: dict[str, int] = {}
    for rank, own in enumerate(places):
        for place in own:
            if (other := owners.setdefault(place, rank)) != rank:
                return f"workers {other} and {rank} share {place}"
    return ""
