"""Detectors that look at one step: does a single sample stand out of the gradient?

D-SNR (Garov et al., "Hiding in Plain Sight") divides the norm of one sample's gradient by that of all the others
together. For a linear layer a sample's gradient is δ_i·x_iᵀ, so its norm is ‖δ_i‖·‖x_i‖, and in one row |δ_in|·‖x_i‖: both
follow from the exposure, without a backward pass for each sample.
"""

from jaxtyping import Float
from torch import Tensor

from qbi.exposure import Exposure


def layer_dsnr(exposure: Exposure) -> float:
    """The largest share that one sample has in the whole layer's gradient, over all the others; infinite if alone."""
    sizes = exposure.backprops.double().norm(dim=0) * exposure.inputs.double().norm(dim=1)
    return float(_dsnr(sizes[None])[0])


def row_dsnr(exposure: Exposure) -> Float[Tensor, " n"]:
    """The same for every row; 0 for rows that no sample reaches, infinite for rows with one sample."""
    return _dsnr(exposure.backprops.double().abs() * exposure.inputs.double().norm(dim=1))


def _dsnr(sizes: Tensor) -> Tensor:
    largest = sizes.amax(-1)
    others = sizes.square().sum(-1) - largest.square()
    # Rounding of the sum must not pass for other samples.
    alone = (sizes > 0).sum(-1) == 1
    ratio = largest / others.clamp_min(0).sqrt().clamp_min(1e-300)
    return ratio.masked_fill(alone, float("inf")).masked_fill(largest == 0, 0.0)
