"""What comes into a private step: so many samples, of one shape, filled up to one size."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from qbi.errors import BadValue


def mode_of(model: nn.Module, device: torch.device) -> Any:
    """What a model's code may go by beside its data: training or not, autocast, switches that its modules carry."""
    switches = tuple(
        (name, value)
        for m in model.modules()
        for name, value in vars(m).items()
        if isinstance(value, bool | int | str) and not name.startswith("_")
    )
    return switches, torch.is_autocast_enabled(device.type)


def count_samples(inputs: Any, targets: Any) -> int:
    """How many samples there are; every tensor has one row for each."""
    leaves = tree_leaves((inputs, targets))
    if not leaves or not all(type(v) is Tensor and v.dim() for v in leaves):
        raise BadValue(
            "private: inputs and targets are plain tensors with one row for each sample, alone or in tuples and dictionaries."
        )
    counts = {len(v) for v in leaves}
    if len(counts) != 1:
        raise BadValue(
            f"private: inputs and targets have {sorted(counts)} samples; every tensor has one row for each sample."
        )
    return counts.pop()


def filled(values: Tensor, size: int) -> Tensor:
    """A copy, filled up to `size` samples with zeros: shapes, and so the order of every sum, do not depend on how many there are, and samples
    that share memory, as windows of a series do, have their own."""
    missing = size - len(values)
    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])


def same_form(first: Any, inputs: Any, targets: Any) -> Any:
    """The structure, shapes and types of one sample; refuses a batch whose samples have others than the first's."""
    leaves, form = tree_flatten((inputs, targets))
    found = (form, tuple((v.shape[1:], v.dtype) for v in leaves))
    if first is not None and first != found:
        raise BadValue(
            f"private: this batch has samples of shape {tuple(leaves[0].shape[1:])}, the first had {tuple(first[1][0][0])}; shapes would "
            "tell of the data. Pad or cut every sample to one shape."
        )
    return found
