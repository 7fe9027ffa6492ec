"""Labels of a batch, from the bias gradient of the head alone."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def label_counts(bias_gradient: Float[Tensor, " c"], batch_size: int) -> Int[Tensor, " c"]:
    """How often each class stands in a batch, for cross-entropy taken as a mean.

    A class's bias gradient is its mean probability less its share of the batch. An untrained model is about as sure of every
    class, so the share is that probability less the gradient; whole numbers that add up to the batch are the nearest.
    """
    classes = len(bias_gradient)
    wanted = batch_size * (1 / classes - bias_gradient.double()).clamp_min(0)
    wanted = wanted * batch_size / wanted.sum().clamp_min(1e-300)
    counts = wanted.floor().long()
    missing = batch_size - int(counts.sum())
    if missing > 0:
        counts[(wanted - counts).topk(min(missing, classes)).indices] += 1
    return counts


def shared(found: Int[Tensor, " c"], truth: Int[Tensor, " c"]) -> float:
    """The share of a batch's labels that two counts have in common."""
    return float(torch.minimum(found, truth).sum()) / max(1, int(truth.sum()))
