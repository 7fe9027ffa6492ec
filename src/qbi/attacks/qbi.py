"""Quantile-based bias initialisation: random rows, and one bias that makes each fire for one sample in B."""

from dataclasses import dataclass

import torch

from qbi import theory
from qbi.errors import require_positive
from qbi.records import CraftedRows


@dataclass(frozen=True)
class QBI:
    """Section "Quantile-Based Bias Initialization": w ~ N(0, I), b = Φ⁻¹(1/B)·√M (Eq. 5).

    `exact` takes the finite-M quantile instead, which matters below a hundred features.
    """

    batch_size: int
    exact: bool = False
    name: str = "QBI"

    def bias(self, features: int) -> float:
        """The bias of every row."""
        solve = theory.exact_bias if self.exact else theory.optimal_bias
        return solve(self.batch_size, features)

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Draw the rows."""
        require_positive(self.name, neurons=neurons)
        bias = self.bias(features)
        weight = torch.empty(neurons, features, device=generator.device).normal_(generator=generator)
        return CraftedRows(weight=weight, bias=torch.full((neurons,), bias, device=generator.device))
