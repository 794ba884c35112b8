"""Each worker's share of a dataset, for a DataLoader in a script of the user's."""

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler as TorchSampler

from offbeat.data.batches import Share, own_order
from offbeat.loops.distribute import seed as run_seed
from offbeat.place import rank, world_size


class Sampler(TorchSampler[int]):
    """Disjoint shares that together are everything; in a new order every epoch, which depends on
    nothing but `seed` (None: the run's), the rank and the number of the epoch.

        loader = DataLoader(data, batch_size=64, sampler=offbeat.Sampler(data))

    Epochs count by themselves; `set_epoch` says which one is next.
    """

    def __init__(self, data: Sized, *, shuffle: bool = True, seed: int | None = None) -> None:
        self._data = data
        self._shuffle = shuffle
        self._seed = run_seed() if seed is None else seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(range(rank(), len(self._data), world_size()))

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if not self._shuffle:
            return iter(range(rank(), len(self._data), world_size()))
        share = Share(rank=rank(), num_shares=world_size(), batch_size=1, seed=self._seed)
        return iter(own_order(share, epoch, len(self._data)).tolist())
