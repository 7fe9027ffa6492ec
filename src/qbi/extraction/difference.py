"""Two states of one model: what was learned between them is a gradient up to scale, rounded to the size of the weights."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.errors import DataError


def weight_difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights before minus weights after, for everything that has a fraction; both must be of the same model."""
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())[0]
        raise DataError(f"update: {odd} stands on one side only; both states must be of the same model.")
    out = {}
    for name, value in before.items():
        if value.shape != after[name].shape:
            raise DataError(
                f"update: {name} has shape {tuple(value.shape)} before and {tuple(after[name].shape)} after; both states "
                "must be of the same model."
            )
        if value.is_floating_point():
            out[name] = value.float() - after[name].float()
    return out


def difference_rounding(weight: Float[Tensor, "n m"], difference: Float[Tensor, "n m"]) -> float:
    """The relative error of a difference of weights: they are rounded to their own size, not to that of the step."""
    sizes, moved = weight.norm(dim=1), difference.norm(dim=1)
    ratio = (sizes[moved > 0] / moved[moved > 0]).median() if bool((moved > 0).any()) else torch.ones(())
    return torch.finfo(weight.dtype).eps * max(1.0, float(ratio))
