"""QBI with half of its rows mirrored: (w, b) becomes (−w, −b), which fires for all samples but the one.

A rule that prunes rows with few samples leaves such a row alone. One more row fires for every sample; with equal outgoing
weights its gradient minus a mirrored row's holds the one sample again. Needed to judge defences fairly.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from qbi.attacks.base import Attack, Carried, Knowledge, Mounted, Reading
from qbi.attacks.heads import equalise_head
from qbi.attacks.qbi import QBI
from qbi.extraction.quotients import read_rows
from qbi.records import Candidates, CraftedRows, Update


@dataclass(frozen=True)
class Mirrored(Attack):
    """Row 0 always fires, the next half is mirrored, the rest is plain QBI.

    >>> from qbi.randomness import generator
    >>> bias = Mirrored(batch_size=20).rows(5, 100, generator(0)).bias
    >>> (bias > 0).tolist()
    [True, True, True, False, False]
    """

    key: ClassVar[str] = "mirrored"
    name: ClassVar[str] = "mirrored QBI"
    action: ClassVar[str] = "prepares the model with mirrored QBI rows and subtracts them"

    batch_size: int

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "Mirrored":
        """For the expected batch."""
        return cls(knowledge.batch_size)

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """QBI's rows, half of them with the other sign."""
        plain = QBI(self.batch_size).rows(neurons, features, generator)
        sign = torch.ones(neurons, device=generator.device)
        sign[1 : neurons // 2 + 1] = -1
        weight, bias = plain.weight * sign[:, None], plain.bias * sign
        weight[0], bias[0] = 0, math.sqrt(features)
        return CraftedRows(weight, bias)

    def set_behind(self, mounted: Mounted) -> None:
        """All rows must back-propagate one coefficient per sample."""
        equalise_head(mounted)

    def read(self, sent: Carried, update: Update, how: Reading) -> Candidates:
        """Read every row, and every row taken from the one that always fires."""
        weight, bias = sent.gradients(update)
        return read_rows(
            torch.cat([weight[:1] - weight[1:], weight]),
            torch.cat([bias[:1] - bias[1:], bias]),
            carrier=sent.carrier,
            rounding=how.rounding,
        )
