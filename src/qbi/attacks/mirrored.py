"""QBI with half of its rows mirrored: (w, b) becomes (−w, −b), which fires for all samples but the one.

A rule that prunes rows with few samples leaves such a row alone. One more row fires for every sample; with equal outgoing
weights its gradient minus a mirrored row's holds the one sample again. Needed to judge defences fairly.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.attacks.qbi import QBI
from qbi.extraction.read import read_rows
from qbi.records import Candidates, CraftedRows


@dataclass(frozen=True)
class Mirrored:
    """Row 0 always fires, the next half is mirrored, the rest is plain QBI."""

    batch_size: int
    name: str = "mirrored QBI"

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """QBI's rows, half of them with the other sign."""
        plain = QBI(self.batch_size).rows(neurons, features, generator)
        sign = torch.ones(neurons, device=generator.device)
        sign[1 : neurons // 2 + 1] = -1
        weight, bias = plain.weight * sign[:, None], plain.bias * sign
        weight[0], bias[0] = 0, math.sqrt(features)
        return CraftedRows(weight, bias)


def read_mirrored(weight: Float[Tensor, "n m"], bias: Float[Tensor, " n"]) -> Candidates:
    """Read every row, and every row taken from the one that always fires."""
    return read_rows(torch.cat([weight[:1] - weight[1:], weight]), torch.cat([bias[:1] - bias[1:], bias]))
