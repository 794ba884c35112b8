"""A worker's codecs, one for each shard, and what they keep from one of its lives to the next.

An exchange (exchange.py) has them, and encodes with them; a worker keeps their state on disk before
each push (keeping.py), and puts it back when it is started again:

    keeper.save(step, codecs.state(), {})
    codecs.restore(tensors)     # False: there is nothing of theirs in it
"""

from collections.abc import Collection, Mapping

from torch import Tensor

from offbeat.run.job import Job

KEPT = "codec/"
"""What the names of all begin with that codecs keep."""


class Codecs:
    """Belong to the worker, whichever connections there are. One thread uses them."""

    def __init__(self, job: Job) -> None:
        self.of_shards = [job.make_codec() for _ in job.slices]
        """None: there are none."""
        self.are_used = False
        """There is a connection that codes."""
        self._slices = job.slices
        self._prefix = KEPT if job.codec is None else f"{KEPT}{job.codec.label}/"

    @property
    def keep(self) -> bool:
        """Whether anything outlives a step."""
        return any(codec is not None and codec.state() for codec in self.of_shards)

    @property
    def may_keep(self) -> bool:
        """Whether a former life may have kept something."""
        keeping = [codec for codec in self.of_shards if codec is not None and codec.may_keep]
        return self.are_used and bool(keeping)

    def state(self) -> dict[str, Tensor]:
        """The tensors themselves, by names that say of which part of the vector they are."""
        return {
            f"{self._prefix}{lo}-{hi}/{name}": tensor
            for codec, (lo, hi) in zip(self.of_shards, self._slices, strict=True)
            if codec is not None
            for name, tensor in codec.state().items()
        }

    def restore(self, tensors: Mapping[str, Tensor], shards: Collection[int] | None = None) -> bool:
        """Go on with what `state` gave in another life, with as many servers or others; `shards`:
        of these only. False: nothing in it is of these codecs, who begin anew."""
        found = self._recut(tensors)
        for shard, (codec, state) in enumerate(zip(self.of_shards, found, strict=True)):
            if codec is not None and (shards is None or shard in shards):
                codec.load(state)
        return any(found)

    def _recut(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """For each shard what is its own. Vectors as long as their part are cut as the shards are
        now; where nothing was kept there are zeros. What else there is stays with its part."""
        found: list[dict[str, Tensor]] = [{} for _ in self._slices]
        for key, tensor in tensors.items():
            if not key.startswith(self._prefix):
                continue
            part, _, name = key.removeprefix(self._prefix).partition("/")
            lo, hi = map(int, part.split("-"))
            for state, (first, end) in zip(found, self._slices, strict=True):
                begins, ends = max(lo, first), min(hi, end)
                if tensor.shape == (hi - lo,) and begins < ends:
                    whole = state.setdefault(name, tensor.new_zeros(end - first))
                    whole[begins - first : ends - first] = tensor[begins - lo : ends - lo]
                elif (lo, hi) == (first, end):
                    state[name] = tensor
        return found


def parted(kept: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What codecs have kept, and what others have."""
    of_codecs = {name: tensor for name, tensor in kept.items() if name.startswith(KEPT)}
    return of_codecs, {name: kept[name] for name in kept.keys() - of_codecs.keys()}
