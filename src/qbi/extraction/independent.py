"""Independent components: rough samples out of mixtures, because what is natural is not Gaussian."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

STEPS = 100
ENOUGH_VALUES = 12_288


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether samples have neighbours to be compared with."""
    return len(shape) == 3 and min(shape[1:]) >= 3


def contrasts(mixtures: Float[Tensor, "k m"], shape: tuple[int, ...], kind: int) -> Float[Tensor, "k t"]:
    """What is most unlike a Gaussian in mixtures of samples: for images their derivatives, of one of three kinds.

    Derivatives take away what all images share, and are large in few places.
    """
    if not is_image(shape) or math.prod(shape) != mixtures.shape[1]:
        return mixtures
    images = mixtures.reshape(len(mixtures), *shape)
    across, down = images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]
    if kind % 3 == 1:
        across, down = across[..., 1:] - across[..., :-1], down[..., 1:, :] - down[..., :-1, :]
    if kind % 3 == 2:
        return (across[..., 1:, :] - across[..., :-1, :]).flatten(1)
    return torch.cat([across.flatten(1), down.flatten(1)], 1)


def independent_components(values: Float[Tensor, "k t"], draws: torch.Generator) -> Float64[Tensor, "k k"]:
    """FastICA (Hyvärinen 1999), all components at once: the matrix that takes mixtures apart, rows of unit variance."""
    count = len(values)
    if count < 2:
        return torch.ones(count, count, dtype=torch.float64, device=values.device)
    # So many values of each mixture are enough for a start; evenly spaced ones miss no part of an image.
    values = values[:, :: max(1, values.shape[1] // ENOUGH_VALUES)]
    centred = values.double() - values.double().mean(1, keepdim=True)
    variances, axes = torch.linalg.eigh(centred @ centred.T / centred.shape[1])
    whiten = (axes / variances.clamp_min(1e-30 + 1e-12 * float(variances[-1])).sqrt()).T
    # Single precision is enough for a start, and twice as fast.
    white = (whiten @ centred).float()
    turn = torch.linalg.qr(torch.randn(count, count, generator=draws)).Q.to(white)
    for _ in range(STEPS):
        bent = torch.tanh(turn @ white)
        new = bent @ white.T / white.shape[1] - (1 - bent.square()).mean(1, keepdim=True) * turn
        left, _, right = torch.linalg.svd(new, full_matrices=False)
        new = left @ right
        settled = bool((new * turn).sum(1).abs().min() > 1 - 1e-6)
        turn = new
        if settled:
            break
    apart: Tensor = turn.double() @ whiten
    return apart
