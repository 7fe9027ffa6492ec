"""What a server finds out of how a client's loss weighs samples: by class, and by a factor that is the same for all of a batch.

A weighted mean divides by the weights of a batch's labels, a client may scale its gradients, or not say how many samples it has.
Each of these is one unknown number, and rows in which one sample stands alone all give the same value for it; mixtures give
any value. So the value that most rows agree on is taken.
"""

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from qbi.federation.client import Loss

AGREE = 1e-4
"""Relative distance up to which two rows give the same factor."""

FEWEST_ROWS = 5
"""Rows that must agree."""


def class_weights(loss: Loss, outputs: int, like: Tensor) -> Float64[Tensor, " c"] | None:
    """The weight of each class in a loss that is a weighted mean over samples; None where it is no such thing.

    >>> weights = torch.tensor([1.0, 3.0, 0.5]).double()
    >>> loss = lambda out, y: torch.nn.functional.cross_entropy(out, y, weight=weights)
    >>> class_weights(loss, 3, torch.zeros(1).double()).tolist()
    [1.0, 3.0, 0.5]
    """
    draws = torch.Generator().manual_seed(1)
    out = torch.randn(3, outputs, generator=draws, dtype=torch.float64).to(like)
    out[1] *= 3
    weights = torch.ones(outputs, dtype=torch.float64, device=like.device)

    def alone(row: int, label: int) -> Tensor:
        target: Any = torch.tensor([label], device=like.device)
        return loss(out[row : row + 1], target)

    for label in range(1, outputs):
        both = loss(out[:2], torch.tensor([0, label], device=like.device))
        first, second = alone(0, 0), alone(1, label)
        weights[label] = (both - first) / (second - both)
    if not bool(weights.isfinite().all()) or not bool((weights > 0).all()):
        return None
    labels = torch.tensor([0, outputs - 1, min(1, outputs - 1)], device=like.device)
    each = torch.stack([alone(row, int(label)) for row, label in enumerate(labels)])
    own = weights[labels]
    right = bool((loss(out, labels) - (own * each).sum() / own.sum()).abs() <= 1e-6 * each.abs().sum())
    return weights.round(decimals=9) if right else None


def agreed(factors: Float64[Tensor, " k"]) -> float | None:
    """The value that most of many agree on, if enough do.

    >>> agreed(torch.tensor([0.1, 2.0, 2.00001, 2.0, 1.99999, 2.0, 7.0, -3.0]).double())
    2.0
    """
    logs = factors[factors.isfinite() & (factors > 0)].log().sort().values
    if len(logs) < FEWEST_ROWS:
        return None
    upto = torch.searchsorted(logs, logs + AGREE)
    count = upto - torch.arange(len(logs), device=logs.device)
    best = int(count.argmax())
    if int(count[best]) < FEWEST_ROWS:
        return None
    return round(float(logs[best : int(upto[best])].median().exp()), 9)
