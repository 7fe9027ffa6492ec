"""Trap weights (Boenisch et al.), the paper's baseline: rows that lean slightly to the negative."""

from dataclasses import dataclass

import torch

from qbi.errors import BadValue, require_positive
from qbi.records import CraftedRows

ROWS_AT_A_TIME = 2**24
"""Entries permuted at a time, which bounds the memory beside the weights."""


@dataclass(frozen=True)
class TrapWeights:
    """A random half of each row is negative normal; the other half mirrors it, scaled to weigh slightly less.

    Meant for inputs in [0, 1], where a sum that leans to the negative fires rarely. An odd number of features
    leaves one more negative entry. The bias is zero.
    """

    scale: float = 0.95
    name: str = "trap weights"

    def __post_init__(self) -> None:
        if not 0 < self.scale < 1:
            raise BadValue(f"trap weights: scale is {self.scale}; it must lie strictly between 0 and 1.")

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Draw magnitudes, mirror them, and scatter both halves over the row at random."""
        require_positive(self.name, neurons=neurons, features=features)
        weight = torch.empty(neurons, features, device=generator.device)
        half = (features + 1) // 2
        block = max(1, ROWS_AT_A_TIME // features)
        for start in range(0, neurons, block):
            rows = weight[start : start + block]
            negative = torch.randn(rows.shape[0], half, generator=generator, device=rows.device).abs_().neg_()
            mirrored = negative[:, : features - half] * -self.scale
            keys = torch.rand(rows.shape, generator=generator, device=rows.device)
            rows.scatter_(1, keys.argsort(1), torch.cat([negative, mirrored], 1))
        return CraftedRows(weight=weight, bias=torch.zeros(neurons, device=generator.device))
