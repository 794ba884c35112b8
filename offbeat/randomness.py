"""Random numbers come from explicit generators, one for each purpose, seeded by what they are
for."""

import hashlib

import torch


def make_seed(*key: int | str) -> int:
    """A seed of 63 bits that differs for every key, such as (run seed, rank, step)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def make_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(make_seed(*key))
