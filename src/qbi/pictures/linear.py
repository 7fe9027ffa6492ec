"""The best linear decoder, in closed form, and which errors it makes: what a server has after seconds, before anything is learned by steps."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_WEIGHTS = 50_000_000
"""Of the linear decoder; larger images are decoded at half the size, or a quarter, and brought back."""
MOST_COLUMNS = 2048
"""Up to which a column says of each feature whether it is alive: behind a rectifier that tells more than its value does."""
ALIVE = 0.01
"""Parts of the mean spread from which on a feature is alive: what was read is no exact zero where the client's was."""
QUIETEST = 0.05
"""Parts of the mean spread below which a feature is not brought to the others' scale: what rounding does to it would be, too."""
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
"""Of the penalty on weights, as parts of the number of images; the one is taken that errs least on images that were not used."""
MOST_DIRECTIONS = 768
"""In which the decoder is said to err."""


@dataclass(frozen=True)
class LinearFit:
    """Weights from columns to small images, and the error's directions, each as long as its spread."""

    weights: Tensor
    """(columns, values)."""
    directions: Tensor
    """(directions, values)."""


def shrinking(features: int, shape: tuple[int, int, int]) -> int:
    """How many times smaller on a side the images are that the weights make."""
    channels, height, width = shape
    times = 1
    while channels * height * width * columns_of(features) > MOST_WEIGHTS * times**2 and not (height | width) % (
        2 * times
    ):
        times *= 2
    return times


def columns_of(features: int) -> int:
    """A column for each feature, another for whether it is alive where these are few, and a constant."""
    return 1 + (2 * features if 2 * features < MOST_COLUMNS else features)


def columns(features: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """(k, columns) of features whose mean and spread are known."""
    scaled = (features - centre) / spread
    alive = [(features > ALIVE * spread.mean()).to(scaled)] if columns_of(len(spread)) > len(spread) + 1 else []
    return torch.cat([scaled, *alive, torch.ones_like(scaled[:, :1])], 1)


def smaller(images: Tensor, times: int) -> Tensor:
    """(k, values) of images shrunk so many times on a side."""
    return (F.avg_pool2d(images, times) if times > 1 else images).flatten(1)


def solve(pairs: Iterable[tuple[Tensor, Tensor]], given: Tensor, wanted: Tensor) -> LinearFit:
    """Ridge regression on parts of (columns, values); its strength and the error's directions by what was set apart.

    Memory: columns², columns × values and values² numbers.
    """
    gram = given.new_zeros(given.shape[1], given.shape[1])
    moments, rows = given.new_zeros(given.shape[1], wanted.shape[1]), 0
    for columns_here, values in pairs:
        gram.addmm_(columns_here.T, columns_here)
        moments.addmm_(columns_here.T, values)
        rows += len(values)
    unit = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * rows
    tried = []
    for strength in STRENGTHS:
        weights = torch.linalg.solve(gram + strength * unit, moments)
        tried.append((float((given @ weights - wanted).square().mean()), weights))
    weights = min(tried, key=lambda one: one[0])[1]
    return LinearFit(weights, principal(wanted - given @ weights))


def principal(errors: Tensor, most: int = MOST_DIRECTIONS) -> Tensor:
    """(k, values): the directions in which rows spread most, each as long as the spread; through the smaller of two Gram matrices."""
    rows, values = errors.shape
    if rows < values:
        sizes, across = torch.linalg.eigh(errors @ errors.T / rows)
        found = across.T @ errors / rows**0.5
    else:
        sizes, along = torch.linalg.eigh(errors.T @ errors / rows)
        found = along.T * sizes.clamp_min(0).sqrt()[:, None]
    largest: Tensor = found.flip(0)[: min(most, rows // 2)].clone()
    return largest
