"""A server that knows how a client counts: every row mirrored, and outgoing weights scaled row by row.

Each row fires for all samples but about one, so no row holds few samples and no bias is negative. The scales make sure that the
difference of two rows holds all samples too. The server knows the scales: it divides them out, and the row that always fires
minus a mirrored one is the one sample again. See `docs/defences.md`: counting rows and pairs of rows does not see it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from qbi.attacks.base import Attack, Carried, Knowledge, Mounted, Reading
from qbi.attacks.heads import equalise_head, next_linear
from qbi.attacks.qbi import QBI
from qbi.extraction.quotients import read_rows
from qbi.records import Candidates, CraftedRows, Update

LARGEST = 3.0
"""Outgoing weights are multiplied by numbers between 1 and this."""


@dataclass(frozen=True)
class Scaled(Attack):
    """Row 0 always fires; all others are QBI's rows with the other sign, and every row has a scale of its own behind it.

    >>> from qbi.randomness import generator
    >>> bool((Scaled(batch_size=20).rows(50, 100, generator(0)).bias > 0).all())
    True
    """

    key: ClassVar[str] = "scaled"
    name: ClassVar[str] = "scaled mirrors"
    action: ClassVar[str] = "mirrors every row, scales what stands behind, and divides the scales out again"

    batch_size: int

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "Scaled":
        """For the expected batch."""
        return cls(knowledge.batch_size)

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """QBI's rows with the other sign, and one that always fires."""
        plain = QBI(self.batch_size).rows(neurons, features, generator)
        weight, bias = -plain.weight, -plain.bias
        weight[0] *= 1e-3
        bias[0] = math.sqrt(features)
        return CraftedRows(weight, bias)

    def set_behind(self, mounted: Mounted) -> None:
        """Equal outgoing weights, times a scale that the server knows."""
        equalise_head(mounted)
        layer = next_linear(mounted)
        draws = torch.Generator().manual_seed(self.batch_size)
        scales = 1 + (LARGEST - 1) * torch.rand(layer.in_features, generator=draws)
        with torch.no_grad():
            layer.weight.mul_(scales.to(layer.weight))

    def read(self, sent: Carried, update: Update, how: Reading) -> Candidates:
        """Divide the scales out, and take every row from the one that always fires."""
        weight, bias = sent.gradients(update)
        head = next_linear(sent).weight.detach()
        strongest = head.abs().amax(1).argmax()
        scales = head[strongest] / head[strongest, 0]
        weight, bias = weight / scales[:, None], bias / scales
        return read_rows(weight[:1] - weight[1:], bias[:1] - bias[1:], carrier=sent.carrier, rounding=how.rounding)
