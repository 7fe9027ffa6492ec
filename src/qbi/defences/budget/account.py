"""How often a sample has taken part: counted before anything leaves, and written into the ledger where there is one."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from qbi.defences.budget.goal import LIFETIME_BITS, Budget
from qbi.defences.budget.ledger import BudgetSpent, Ledger
from qbi.errors import BadValue


@dataclass
class Account:
    """Participations of one guard.

    Args:
        budget: what each one costs.
        samples: size of the data set, where batches go through it without putting back: a new participation begins when a batch
            no longer fits into what is left. Not given, every step counts for every sample.
        ledger: kept over restarts; without one, only this guard's own steps are known.
        data: the data set's name in the ledger.
        limit: bits about one sample over everything in the ledger.
    """

    budget: Budget
    samples: int | None = None
    ledger: Ledger | None = None
    data: str = "data"
    limit: float | None = None
    participations: int = 0
    _left: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise BadValue(f"budget: the data set has {self.samples} samples; it must have at least one.")
        if self.limit is None and self.budget.participations > 1:
            self.limit = self.budget.bits()
        if self.limit is None and self.ledger is not None:
            self.limit = LIFETIME_BITS

    @property
    def bits(self) -> float:
        """About one sample, through this guard."""
        return self.budget.bits(self.participations)

    def take_part(self, batch: int, parameters: Iterable[Tensor]) -> None:
        """One more batch is about to leave; raises where the budget does not allow it."""
        if self.samples is not None and batch <= self._left:
            self._left -= batch
            return
        if self.ledger is not None:
            self.ledger.spend(self.data, family_of(parameters), self.budget.noise, limit=self.limit)
        elif self.limit is not None and self.budget.bits(self.participations + 1) > self.limit * (1 + 1e-9):
            raise BudgetSpent(
                f"the budget is used up: {self.bits:.4g} of {self.limit:.4g} bits about each sample have left in {self.participations} "
                "participations. State more `participations` or more bits before training, or stop here."
            )
        self.participations += 1
        self._left = 0 if self.samples is None else max(0, self.samples - batch)

    def __str__(self) -> str:
        how = "" if self.samples is not None else " (every step counted for every sample: give samples= for less)"
        return f"{self.participations} participations, at most {self.bits:.4g} bits about one sample{how}"


def family_of(parameters: Iterable[Tensor]) -> str:
    """Models with the same shapes are one family."""
    shapes = " ".join("×".join(map(str, p.shape)) for p in parameters)
    return hashlib.sha256(shapes.encode()).hexdigest()[:12]
