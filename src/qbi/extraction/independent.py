"""Independent components: rough samples out of mixtures, because what is natural is not Gaussian."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

STEPS = 100
ENOUGH_VALUES, VALUES_PER_SAMPLE = 16_384, 64
"""So many values of each mixture, and more where there are many mixtures."""

OPPONENT = ((1.0, 1.0, 1.0), (1.0, -1.0, 0.0), (0.5, 0.5, -1.0))
"""Brightness, red against green, yellow against blue."""


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether samples have neighbours to be compared with."""
    return len(shape) == 3 and min(shape[1:]) >= 3


def contrasts(mixtures: Float[Tensor, "k m"], shape: tuple[int, ...], kind: int) -> Float[Tensor, "k t"]:
    """What is most unlike a Gaussian in mixtures of samples: for images their derivatives, to the second order, to the third in odd kinds.

    Derivatives take away what all images share, and are large in few places. Red, green and blue say nearly the same; their sum and their
    differences do not, so they are derived instead, each brought to one size.
    """
    if not is_image(shape) or math.prod(shape) != mixtures.shape[1]:
        return mixtures
    images = mixtures.reshape(len(mixtures), *shape)
    if shape[0] == 3:
        images = torch.einsum("oc,kchw->kohw", torch.tensor(OPPONENT).to(images), images)
    across, down = _across(images), _down(images)
    parts = [across, down, _down(across), _across(across), _down(down)]
    if kind % 2 and min(shape[1:]) > 3:
        parts += [_across(parts[2]), _down(parts[2])]
    # Evenly spaced values miss no part of an image.
    apart = max(1, sum(part[0].numel() for part in parts) // _enough(len(mixtures)))
    planes = [plane.flatten(1)[:, ::apart] for part in parts for plane in part.unbind(1) if plane.numel()]
    return torch.cat([plane / plane.square().mean().sqrt().clamp_min(1e-30) for plane in planes], 1)


def _enough(count: int) -> int:
    """Values of each of so many mixtures that are enough for a start."""
    return max(ENOUGH_VALUES, VALUES_PER_SAMPLE * count)


def _across(images: Tensor) -> Tensor:
    return images[..., 1:] - images[..., :-1]


def _down(images: Tensor) -> Tensor:
    return images[..., 1:, :] - images[..., :-1, :]


def independent_components(values: Float[Tensor, "k t"], draws: torch.Generator) -> Float64[Tensor, "k k"]:
    """FastICA (Hyvärinen 1999), all components at once: the matrix that takes mixtures apart, rows of unit variance."""
    count = len(values)
    if count < 2:
        return torch.ones(count, count, dtype=torch.float64, device=values.device)
    values = values[:, :: max(1, values.shape[1] // _enough(count))]
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
