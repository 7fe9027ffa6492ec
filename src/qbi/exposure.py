"""What only the client knows of one layer in one step, and what follows from it: who can be read, exactly.

For a linear layer with rectified output the client sees each sample's share δ of every row's bias gradient. Row n then
holds Σ_i δ_in·x_i, and the server's quotient is the mixture of inputs with weights α_i = δ_in/Σδ. So the distance of
every row's quotient to every sample is a quadratic form in the batch's Gram matrix: the server's result is known here
before anything is sent, without reading a single gradient back.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from qbi.gram import gram

EXACT = 1e-10
"""Mean squared error below which a sample counts as read."""


@dataclass(frozen=True)
class Exposure:
    """One layer in one step: the inputs that reached it, and each sample's share of each row's bias gradient."""

    layer: str
    inputs: Float[Tensor, "b m"]
    shares: Float[Tensor, "n b"]
    above: Bool[Tensor, "n b"] | None = None
    """Which pre-activations lie above zero, where that was watched."""

    @property
    def active(self) -> Bool[Tensor, "n b"]:
        """Which samples send anything through which row."""
        return self.shares != 0

    @property
    def counts(self) -> Int[Tensor, " n"]:
        """How many samples stand in each row."""
        return self.active.sum(1)


def row_errors(exposure: Exposure) -> Float64[Tensor, "n b"]:
    """Mean squared error between each row's quotient and each sample; infinite for rows without a quotient."""
    shares = exposure.shares.double()
    total = shares.sum(1, keepdim=True)
    weights = shares / total
    matrix = gram(exposure.inputs)
    own = (weights @ matrix * weights).sum(1, keepdim=True)
    errors = (own - 2 * weights @ matrix + matrix.diagonal()) / exposure.inputs.shape[1]
    return torch.where((total != 0) & weights.isfinite().all(1, keepdim=True), errors.clamp_min(0), torch.inf)


@dataclass(frozen=True)
class Leak:
    """Samples a server could read from a layer, and the rows it would read them from."""

    layer: str
    samples: Bool[Tensor, " b"]
    rows: Bool[Tensor, " n"]

    @property
    def count(self) -> int:
        """The number of samples at risk."""
        return int(self.samples.sum())


def count_leaks(exposure: Exposure, *, threshold: float = EXACT) -> Leak:
    """The samples that single rows give away, named."""
    near = row_errors(exposure) < threshold
    return Leak(layer=exposure.layer, samples=near.any(0), rows=near.any(1))
