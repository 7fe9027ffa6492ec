"""What a server sees of several clients: a weighted mean, a sum that only the sum reveals, noise shared among them.

Secure aggregation is taken at its word: the server gets the sum of all participants' updates and nothing else. A sybil is a
participant of the server's own that sends zeros, so that the sum is that of the honest ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from qbi.errors import BadValue
from qbi.records import Update


def weighted_mean(updates: Sequence[Update], weights: Sequence[float] | None = None) -> Update:
    """The mean of the updates, weighted by their samples unless weights are given: FedAvg's aggregate."""
    shares = [float(u.samples) for u in updates] if weights is None else list(weights)
    if len(shares) != len(updates) or not updates or sum(shares) <= 0:
        raise BadValue(
            f"aggregation: {len(updates)} updates and {len(shares)} weights; they must agree and not be zero."
        )
    total = sum(shares)
    return _combined(updates, [share / total for share in shares])


def secure_sum(updates: Sequence[Update]) -> Update:
    """The sum of the updates: all that secure aggregation lets a server see."""
    if not updates:
        raise BadValue("secure aggregation: nobody takes part.")
    return _combined(updates, [1.0] * len(updates))


def _combined(updates: Sequence[Update], factors: Sequence[float]) -> Update:
    names = updates[0].gradients.keys()
    if any(u.gradients.keys() != names for u in updates):
        raise BadValue("aggregation: the updates are of different models.")
    gradients = {
        name: torch.stack([f * u.gradients[name] for f, u in zip(factors, updates, strict=True)]).sum(0)
        for name in names
    }
    steps, batches = (max(getattr(u, name) for u in updates) for name in ("steps", "batches"))
    count = sum(u.batch_size for u in updates)
    return Update(gradients, updates[0].buffers, count, updates[0].loss, steps, batches)


def sybil(like: Update) -> Update:
    """An update of zeros, from a participant that holds no data."""
    return replace(like, gradients={n: torch.zeros_like(g) for n, g in like.gradients.items()}, batch_size=0)


def clipped(update: Update, bound: float) -> Update:
    """The update, scaled down to a norm of at most `bound`."""
    norm = update_norm(update.gradients)
    factor = min(1.0, bound / norm) if norm > 0 else 1.0
    return replace(update, gradients={n: g * factor for n, g in update.gradients.items()})


def update_norm(gradients: Mapping[str, Tensor]) -> float:
    """The norm of all entries together."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def noise_share(update: Update, deviation: float, clients: int, generator: torch.Generator) -> Update:
    """Distributed differential privacy: each of `clients` adds noise of deviation/√clients, so that the sum has `deviation`.

    Who takes part with zeros and no noise (a sybil) leaves the sum with less than was promised.
    """
    if clients < 1 or deviation < 0:
        raise BadValue(
            f"noise share: {clients} clients, deviation {deviation}; there must be one, and none below zero."
        )
    own = deviation / math.sqrt(clients)
    noisy = {
        n: g + own * torch.randn(g.shape, generator=generator, device=generator.device).to(g)
        for n, g in update.gradients.items()
    }
    return replace(update, gradients=noisy)


def participating(clients: int, share: float, generator: torch.Generator) -> Int[Tensor, " k"]:
    """Which clients are asked in a round: a random share of them, at least one."""
    if not 0 < share <= 1:
        raise BadValue(f"participation: {share} is no share; it lies above 0 and not above 1.")
    return torch.randperm(clients, generator=generator)[: max(1, round(share * clients))]
