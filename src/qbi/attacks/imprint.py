"""Imprint, "Robbing the Fed" (Fowl et al.): equal rows, biases at quantiles, and neighbouring rows subtracted.

Every row measures the same scalar of a sample; its bias lets the samples above one quantile pass. Two neighbours differ
by the samples between their quantiles, so their difference isolates a sample although each row holds many. Needed here
to judge defences fairly: rules that look at single rows do not see it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.special import ndtri

from qbi.attacks.base import Attack, Carried, Knowledge, Mounted, Reading, loaded
from qbi.attacks.heads import equalise_head
from qbi.errors import require_positive
from qbi.extraction.quotients import read_rows
from qbi.records import Candidates, CraftedRows, Update

MEASURED = 256
"""Auxiliary samples from which the law of the measurement is taken, where there are as many."""


@dataclass(frozen=True)
class Imprint(Attack):
    """Rows that all measure the mean of a sample, biases at the quantiles of a normal law of the measurements.

    Args:
        mean: of the measurement over the domain, in units of the sample's values.
        std: its standard deviation.

    >>> from qbi.randomness import generator
    >>> Imprint(mean=0.0, std=0.5).rows(3, 4, generator(0)).bias.argsort().tolist()
    [2, 1, 0]
    """

    key: ClassVar[str] = "imprint"
    name: ClassVar[str] = "imprint"
    action: ClassVar[str] = "prepares the model with imprint and subtracts neighbouring rows"

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "Imprint":
        """With the measurement's law on samples of the domain."""
        if knowledge.auxiliary is None or len(knowledge.auxiliary) < 2:
            return cls()
        means = loaded(knowledge.auxiliary, slice(None), torch.empty(0)).mean(1)
        return cls(float(means.mean()), float(means.std()))

    @classmethod
    def auxiliary_useful(cls, knowledge: Knowledge) -> int:  # noqa: ARG003
        """Enough for a mean and a spread."""
        return MEASURED

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Row n fires for samples whose mean exceeds the n-th quantile."""
        require_positive(self.name, neurons=neurons, features=features)
        weight = torch.full((neurons, features), 1 / features, device=generator.device)
        levels = torch.arange(1, neurons + 1, dtype=torch.float64) / (neurons + 1)
        quantiles = torch.from_numpy(ndtri(levels.numpy())) * self.std + self.mean
        # Mounting scales rows by 1/√M; the measurement is kept at a size that float32 resolves.
        size = math.sqrt(features)
        return CraftedRows(weight * size, (-quantiles * size).float().to(generator.device))

    def set_behind(self, mounted: Mounted) -> None:
        """All rows must back-propagate one coefficient per sample."""
        equalise_head(mounted)

    def read(self, sent: Carried, update: Update, how: Reading) -> Candidates:
        """Read the differences of neighbouring rows, and the rows themselves."""
        weight, bias = sent.gradients(update)
        return read_rows(
            torch.cat([weight[:-1] - weight[1:], weight]),
            torch.cat([bias[:-1] - bias[1:], bias]),
            carrier=sent.carrier,
            rounding=how.rounding,
        )
