"""QBI where what arrives is far from normal: the quantile of each row is measured on other data of the kind."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.attacks.base import Attack, Knowledge, SampleSource, loaded
from qbi.records import CraftedRows

USEFUL = 4
"""Samples for each one of the batch: enough to find the quantile at which one of the batch fires."""


@dataclass(frozen=True)
class Measured(Attack):
    """Random rows; each bias lets one of B auxiliary samples fire.

    Features behind other layers are rectified, correlated and of unlike sizes; Eq. 5's quantile of a normal variable is wrong for
    them, and this one is right by construction.
    """

    key: ClassVar[str] = "measured"
    name: ClassVar[str] = "measured quantiles"
    action: ClassVar[str] = "sets each row's quantile by other data of the kind"
    quick: ClassVar[bool] = True

    batch_size: int
    auxiliary: SampleSource | None = None

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "Measured":
        """For the expected batch."""
        return cls(knowledge.batch_size, knowledge.auxiliary)

    @classmethod
    def auxiliary_useful(cls, knowledge: Knowledge) -> int:
        """A few for each sample of the batch."""
        return min(4096, max(64, USEFUL * knowledge.batch_size))

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Normal rows, scaled to what varies, at the measured quantile."""
        weight = torch.randn(neurons, features, generator=generator, device=generator.device)
        if self.auxiliary is None or len(self.auxiliary) < 2:
            bias = torch.full((neurons,), -math.sqrt(features), device=weight.device)
            return CraftedRows(weight=weight, bias=bias)
        known = loaded(self.auxiliary, slice(None), weight)
        weight = weight / known.std(0).clamp_min(1e-6)
        return CraftedRows(weight=weight, bias=-self._quantiles(known @ weight.T))

    def _quantiles(self, reach: Float[Tensor, "a n"]) -> Float[Tensor, " n"]:
        """Between the values at which one of B fires and the next one does not."""
        place = max(1, round(len(reach) / self.batch_size))
        top = reach.topk(min(place + 1, len(reach)), 0).values
        return top[-2:].mean(0)
