"""Random numbers: seeded by name for results that can be repeated, from the operating system for what protects."""

import hashlib
import math
import os
import secrets

import numpy as np
import torch
from torch import Tensor


def derive_seed(seed: int, *names: object) -> int:
    """A 63-bit seed for one named purpose: independent of order, process and number of workers."""
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh torch generator for one named purpose."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))


class SystemEntropy:
    """Random numbers straight from the operating system's cryptographic source.

    A generator that was seeded can be run again by whoever guesses the seed, and torch's has 32 bits of it; one that is not
    cryptographic can be continued by whoever knows part of its output, and a server knows where a gradient is zero. So
    noise that is to protect comes from here, value by value.
    """

    def normal(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Standard normal values by the Box–Muller transform of 64 bits each, rounded to multiples of 2⁻¹⁶.

        Rounded, because two values share one radius and one angle: where they keep all their digits, one tells of the other. For
        heuristic defences; what is proven is proven of `qbi.private.noise`.
        """
        count = math.prod(shape)
        pairs = (count + 1) // 2
        words = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64).astype(np.float64).reshape(2, -1)
        uniform = torch.from_numpy(words).add_(0.5).mul_(2.0**-64)
        radius = uniform[0].log_().mul_(-2).sqrt_().mul_(2.0**16)
        angle = uniform[1].mul_(2 * math.pi)
        out = torch.cat([radius * angle.cos(), radius * angle.sin()]).round_().mul_(2.0**-16).float()
        return out[:count].reshape(tuple(shape))

    def integer(self) -> int:
        """128 bits."""
        return secrets.randbits(128)


Draws = torch.Generator | SystemEntropy
"""Where a defence takes its random numbers from: the system where it protects, a generator where a result is to be repeated."""


def normal_like(values: Tensor, draws: Draws) -> Tensor:
    """Standard normal values of the same shape, type and place."""
    if isinstance(draws, SystemEntropy):
        return draws.normal(values.shape).to(values)
    return torch.randn(values.shape, generator=draws, device=draws.device).to(values)


def random_integer(draws: Draws) -> int:
    """A large random number, to seed something that is not secret by itself."""
    if isinstance(draws, SystemEntropy):
        return draws.integer()
    return int(torch.randint(2**62, (), generator=draws, device=draws.device))
