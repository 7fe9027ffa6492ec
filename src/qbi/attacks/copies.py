"""A server that knows noise in rows: each QBI row stands there several times, and the copies are averaged.

Noise that is drawn for every row apart averages out over copies as it does over rounds; what a client adds to one row must
therefore hold for all that a server can ask for, not for a row.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from qbi.attacks.base import Attack, Carried, Knowledge, Mounted, Reading
from qbi.attacks.heads import equalise_head
from qbi.attacks.qbi import QBI
from qbi.extraction.quotients import read_rows
from qbi.records import Candidates, CraftedRows, Update

COPIES_PER_SAMPLE = 2
"""Different rows for each expected sample; all others are copies of them."""


@dataclass(frozen=True)
class Copies(Attack):
    """As many different QBI rows as twice the batch, each copied until the layer is full.

    >>> from qbi.randomness import generator
    >>> rows = Copies(batch_size=2).rows(12, 50, generator(0))
    >>> bool((rows.weight[0] == rows.weight[4]).all())
    True
    """

    key: ClassVar[str] = "copies"
    name: ClassVar[str] = "copied rows"
    action: ClassVar[str] = "writes each QBI row many times and averages the copies"

    batch_size: int

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "Copies":
        """For the expected batch."""
        return cls(knowledge.batch_size)

    def different(self, neurons: int) -> int:
        """How many rows are not copies."""
        return min(neurons, COPIES_PER_SAMPLE * self.batch_size)

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """QBI's rows, over and over."""
        plain = QBI(self.batch_size).rows(self.different(neurons), features, generator)
        again = torch.arange(neurons, device=generator.device) % len(plain.bias)
        return CraftedRows(plain.weight[again], plain.bias[again])

    def set_behind(self, mounted: Mounted) -> None:
        """Copies must back-propagate the same."""
        equalise_head(mounted)

    def read(self, sent: Carried, update: Update, how: Reading) -> Candidates:
        """Average the copies, then divide."""
        weight, bias = sent.gradients(update)
        count = self.different(len(bias))
        again = torch.arange(len(bias), device=bias.device) % count
        sums = weight.new_zeros(count, weight.shape[1]).index_add_(0, again, weight)
        totals = bias.new_zeros(count).index_add_(0, again, bias)
        return read_rows(sums, totals, carrier=sent.carrier, rounding=how.rounding)
