"""What a server finds out of how a client's loss weighs samples: by class, and by a factor that is the same for all of a batch.

A weighted mean divides by the weights of a batch's labels, a client may scale its gradients, or not say how many samples it has.
Each of these is one unknown number, and rows in which one sample stands alone all give the same value for it; mixtures give
any value. So the value that most rows agree on is taken.
"""

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional

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


PROBED = (0.01, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
"""Sizes of outputs at which a loss is looked at."""


MOST_PROBED = 256
"""Outputs up to which it is looked at."""


def is_cross_entropy(loss: Loss, outputs: int, like: Tensor) -> bool:
    """Whether a loss sends back what cross-entropy does for every label, over a batch's mean or sum: only then a mixture cannot pass for a sample.

    Several samples that fire the same rows hide in one direction if their output gradients are parallel, e(i) = t(i)·u, and their mixture m
    passes if it sends the sum, e(m) = T·u with T = Σ t(i). Where outputs are affine in what fires, m's outputs are those of the samples,
    weighed by t(i)/T. Where a loss is strictly convex in the outputs, as cross-entropy is but for a constant, samples of one label and sign have
    (T - t(i))·u·(m - o(i)) > 0, and Σ t(i)·u·(m - o(i)) = 0: there are none. Of opposite signs, or of different labels, there are none with three
    outputs or more, since each gradient is negative at its label alone. Squared errors have such pairs, and so have losses that flatten
    out, smoothed labels and corners.

    >>> is_cross_entropy(torch.nn.functional.cross_entropy, 4, torch.zeros(1).double())
    True
    >>> is_cross_entropy(torch.nn.CrossEntropyLoss(label_smoothing=0.1), 4, torch.zeros(1).double())
    False
    """
    if outputs > MOST_PROBED:
        return False
    draws = torch.Generator().manual_seed(2)
    sizes = torch.tensor(PROBED, dtype=torch.float64).repeat(outputs)[:, None]
    out = (sizes * torch.randn(len(sizes), outputs, generator=draws, dtype=torch.float64)).to(like)
    target = torch.arange(outputs, device=like.device).repeat_interleave(len(PROBED))

    def sent(by: Loss) -> Tensor:
        with torch.enable_grad():
            leaf = out.clone().requires_grad_()
            return torch.autograd.grad(by(leaf, target), leaf)[0]

    given, usual = sent(loss), sent(functional.cross_entropy)
    # Each entry by the size of its row: a mean over many rows is small everywhere.
    size = usual.norm(dim=1, keepdim=True).clamp_min(1e-9 / len(out))
    return any(bool(((given - factor * usual).abs() <= 1e-9 * factor * size).all()) for factor in (1, len(out)))


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
