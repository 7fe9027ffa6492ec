"""Gaussian noise of image shape: the data for which the closed forms are exact."""

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.errors import require_positive


def gaussian_noise(count: int, shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, " count *shape"]:
    """Independent standard normal samples, already normalised by definition."""
    require_positive("Gaussian noise", count=count)
    return torch.randn(count, *shape, generator=generator, device=generator.device)
