"""A head that lets one class speak: of a batch, only the samples with that label send anything back to the layers before it."""

import copy

import torch
from torch import nn

from qbi.errors import CannotMount
from qbi.extraction.labels import classifier

SURE = 30.0
"""How far below the others the output of the class lies: e⁻³⁰ is below every rounding."""


def one_class_speaks(model: nn.Module, label: int) -> nn.Module:
    """A copy of the model with such a head, for cross-entropy; fishing, after Wen et al. (arXiv 2202.00580).

    All rows of the head but one are zero, and that class is never expected. What comes back to the features is w_c (p_c − [y = c]): about
    nothing for every other label.

    >>> model = one_class_speaks(nn.Sequential(nn.Linear(3, 4)), 2)
    >>> model[0].weight.any(1).tolist(), model[0].bias.argmin().item()
    ([False, False, True, False], 2)
    """
    sent = copy.deepcopy(model)
    last = classifier(sent)
    if last is None or not 0 <= label < last[1].out_features or last[1].out_features < 3:
        raise CannotMount(f"head: no linear layer with a bias has an output for class {label} and two others.")
    head = last[1]
    with torch.no_grad():
        row = head.weight[label].clone()
        row = row if bool(row.any()) else torch.ones_like(row) / len(row) ** 0.5
        head.weight.zero_()
        head.weight[label] = row
        head.bias.zero_()
        head.bias[label] = -SURE
    return sent
