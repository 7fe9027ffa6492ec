"""Labels of a batch, from the bias gradient of the head alone."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


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


def batch_labels(bias_gradient: Float[Tensor, " c"], batch_size: int) -> tuple[Int[Tensor, " b"], bool]:
    """Labels of a batch in rising order, and whether they are certain; for cross-entropy taken as a mean.

    A class with a negative gradient stands in the batch, whatever the model. With as many of them as samples these are the labels; else
    the rest go to the classes whose share is missing most, counted as `label_counts` does.

    >>> labels, certain = batch_labels(torch.tensor([0.1, -0.4, 0.1, 0.2]), 1)
    >>> labels.tolist(), certain
    ([1], True)
    """
    values = bias_gradient.double()
    present = values < 0
    wanted = batch_size * (1 / len(values) - values)
    counts = torch.zeros(len(values), dtype=torch.long, device=values.device)
    for _ in range(batch_size):
        # More than any share: classes that are there come before those that are likely.
        sure = (present & (counts == 0)) * (2.0 * batch_size + wanted.abs().max())
        counts[(wanted - counts + sure).argmax()] += 1
    return torch.arange(len(values), device=values.device).repeat_interleave(counts), int(present.sum()) == batch_size


def classifier(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The last linear layer with a bias, by name: where a network says its classes."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
    return found[-1] if found else None


def shared(found: Int[Tensor, " c"], truth: Int[Tensor, " c"]) -> float:
    """The share of a batch's labels that two counts have in common."""
    return float(torch.minimum(found, truth).sum()) / max(1, int(truth.sum()))
