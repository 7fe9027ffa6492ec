"""Random generators derived by name, so that a result depends on its seed and name and on nothing else."""

import hashlib

import torch


def derive_seed(seed: int, *names: object) -> int:
    """A 63-bit seed for one named purpose: independent of order, process and number of workers."""
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh torch generator for one named purpose."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))
