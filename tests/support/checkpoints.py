"""Small checkpoints, of a model that has everything that one can have."""

import torch
from torch import nn

from offbeat.accounts import Account
from offbeat.flat import FlatModel
from offbeat.run.checkpoint import Checkpoint
from offbeat.shard import ShardState, partition


def small_model() -> nn.Module:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    module[0].bias.requires_grad_(False)
    return module


def make_checkpoint(version: int = 12, num_shards: int = 2, ema: bool = True) -> Checkpoint:
    flat = FlatModel(small_model())
    floats, ints = torch.zeros(6), torch.zeros(1, dtype=torch.int64)
    flat.write_buffers(floats, ints)
    shards = []
    for k, (lo, hi) in enumerate(partition(len(flat.params), num_shards)):
        tensors = {"params": flat.params[lo:hi].clone()}
        if ema:
            tensors["ema"] = flat.params[lo:hi] * 2
        if k == 0:
            tensors |= {"floats": floats, "ints": ints}
        accounts = {0: Account(1, 5, applied=3, dropped=1, lost=1)}
        shards.append(ShardState(version=version + k, tensors=tensors, accounts=accounts))
    return Checkpoint(
        version=version, manifest=flat.manifest, shards=tuple(shards), frozen=flat.frozen()
    )
