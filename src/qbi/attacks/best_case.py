"""The best case for a server against clipping and noise: one sample alone, all else known, its whole clipped gradient spent on it.

The server chose the model, so the gradient is any linear map of the sample it likes; it knows the mean and the principal components of
other data of the kind, and reads with a Wiener filter. What a real server reads is less: other samples, labels and heads share the
gradient. So measured values of real servers lie below these, and these below the bounds of `qbi.theory.guarantees`.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.errors import BadValue
from qbi.randomness import Draws, normal_like

CONSTANTS = (0.0, 0.1, 0.2, 0.4, 0.8)
"""Shares of the gradient, relative to the sample's, that a server tries to give to a constant."""

SPREAD = 0.5
"""How much the logarithm of a sample's length varies, as far as a server knows."""

TRIED = 200


@dataclass(frozen=True)
class BestCase:
    """What a server knows beforehand, and how it would spend a sample's gradient.

    Args:
        mean: of other samples.
        components: their principal directions, one per row.
        variances: along them.
        examples: some of the others, to try out what reads best.
    """

    mean: Float[Tensor, " m"]
    components: Float[Tensor, "k m"]
    variances: Float[Tensor, " k"]
    examples: Float[Tensor, "e m"]

    @classmethod
    def knowing(cls, others: Float[Tensor, "n m"]) -> "BestCase":
        """From other samples of the same kind."""
        if len(others) < 2:
            raise BadValue(f"best case: {len(others)} other samples; principal components need at least two.")
        mean = others.mean(0)
        centred = (others - mean).double()
        if len(others) < others.shape[1]:
            values, left = torch.linalg.eigh(centred @ centred.T)
            directions = (left.T @ centred) / values.clamp_min(1e-30).sqrt()[:, None]
        else:
            values, right = torch.linalg.eigh(centred.T @ centred)
            directions = right.T
        kept = (values > max(1e-9 * float(values[-1]), 0.0)).nonzero()[:, 0].flip(0)
        variances = (values[kept] / (len(others) - 1)).to(others)
        return cls(mean, directions[kept].to(others), variances, others[:TRIED])

    def gains(self, noise: float, rounds: int = 1) -> Float[Tensor, " k"]:
        """How much of the gradient's length to give each component: water poured on the square roots of the variances."""
        roots = self.variances.sqrt()
        if not len(roots):
            return roots
        ratio = rounds / noise**2
        levels = roots.cumsum(0) / (ratio + torch.arange(1, len(roots) + 1, device=roots.device))
        level = levels[max(0, int((roots > levels).sum()) - 1)]
        power = ((roots / level - 1).clamp_min(0) / ratio).clamp_min(0)
        return (power / self.variances).sqrt()

    def read(self, samples: Float[Tensor, "b m"], noise: float, draws: Draws, rounds: int = 1) -> Float[Tensor, "b m"]:
        """Each sample as it comes back out of its own clipped gradient under noise, over rounds on the same sample."""
        return self.mean + self._read((samples - self.mean) @ self.components.T, noise, draws, rounds) @ self.components

    def errors(self, samples: Float[Tensor, "b m"], noise: float, draws: Draws, rounds: int = 1) -> Float[Tensor, " b"]:
        """Mean squared errors of what `read` gives, without forming it: what lies outside the components is lost whole."""
        away = samples - self.mean
        values = away @ self.components.T
        outside = (away.square().sum(1) - values.square().sum(1)).clamp_min(0)
        return ((self._read(values, noise, draws, rounds) - values).square().sum(1) + outside) / samples.shape[1]

    def _read(self, values: Tensor, noise: float, draws: Draws, rounds: int) -> Tensor:
        """Clipping takes the length away, so part of the gradient goes to a constant, as a bias does: how much is tried out."""
        if not len(self.variances):
            return values  # samples that are all the same: the mean is each of them, and nothing is left to read
        own = self.known
        errors = [(self._through(own, noise, draws, rounds, c) - own).square().mean() for c in CONSTANTS]
        return self._through(values, noise, draws, rounds, CONSTANTS[int(torch.stack(errors).argmin())])

    @cached_property
    def known(self) -> Tensor:
        """The examples along the components."""
        return (self.examples - self.mean) @ self.components.T

    def _through(self, values: Tensor, noise: float, draws: Draws, rounds: int, constant: float) -> Tensor:
        gains, spread = self.gains(noise, rounds), noise / math.sqrt(rounds)
        sent = values * gains
        lengths = (sent.square().sum(1, keepdim=True) + constant**2).sqrt().clamp_min(1e-30)
        received = sent / lengths + spread * normal_like(sent, draws)
        signal = gains.square() * self.variances
        expected = math.sqrt(float(signal.sum()) + constant**2)
        length = torch.full_like(lengths, expected)
        if constant:
            told = constant / lengths + spread * normal_like(lengths, draws)
            # Lengths a sample may have, about what is expected, weighed by how well they explain the constant.
            grid = expected * torch.logspace(-1, 1, 101, device=sent.device, dtype=sent.dtype)
            likely = -((told - constant / grid) ** 2) / (2 * spread**2) - (grid / expected).log() ** 2 / (2 * SPREAD**2)
            length = (likely.softmax(1) * grid).sum(1, keepdim=True)
        return received * length * gains * self.variances / (signal + (spread * length) ** 2).clamp_min(1e-30)
