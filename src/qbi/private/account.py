"""What has left about one sample: counted before anything leaves, and written into the ledger where there is one."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

from torch import Tensor

from qbi.errors import BadValue
from qbi.private import boundary
from qbi.private.goal import LIFETIME_BITS, Budget
from qbi.private.ledger import BudgetSpent, Ledger


@dataclass
class Account:
    """Participations of one private training, and a total that they may not pass.

    Args:
        budget: what each one costs.
        family: of the model: what was learned through one model of a family counts for all.
        ledger: kept over restarts; without one, only what this process knows of is counted.
        data: the data set's name in the ledger.
        total: bits about one sample over everything in the ledger, or over this training where there is none.
    """

    budget: Budget
    family: str
    ledger: Ledger | None = None
    data: str = "data"
    total: float | None = None
    participations: float = 0.0
    admitted: ReferenceType[boundary.Boundary] | None = None
    """The boundary that admitted the training, which is not kept alive."""
    running: float = 0.0
    """Participations of the pass that runs."""
    paid_to: set[object] = field(default_factory=set)
    """Owners' ledgers, and boundaries without one, that charged the pass that runs."""

    def __post_init__(self) -> None:
        if self.total is None:
            self.total = self.budget.bits() if self.budget.participations > 1 else LIFETIME_BITS
        if not self.total > 0:
            raise BadValue(f"private: total is {self.total}; it is a positive number of bits.")

    @property
    def bits(self) -> float:
        """About one sample, through this training."""
        return self.budget.bits(self.participations)

    def spend(self, participations: float) -> None:
        """So many more participations are about to begin; raises where the total does not allow it."""
        assert self.total is not None
        more = self.budget.bits(participations)
        if self.bits + more > self.total * (1 + 1e-9):
            raise BudgetSpent(
                f"the budget is used up: {self.bits:.4g} of {self.total:.4g} bits about each sample have left in {self.participations:g} "
                f"participations, and one more costs {more:.3g}. State a larger total= before training, or stop here."
            )
        self.running, self.paid_to = participations, set()
        if self.ledger is not None:
            self.ledger.check(self.data, more, self.total)
        self.settle()
        # A pass that began outside of a round is in the ledger by the training's own name and total; the owner's round charges it again, by its own.
        if self.ledger is not None and (self.ledger.path.resolve(), self.data) not in self.paid_to:
            self.ledger.spend(self.data, self.family, self.budget.noise, participations, limit=self.total)
        self.participations += participations

    def settle(self) -> None:
        """Pay for the pass that runs where its next step is released: it may have begun outside of any round, or in another one."""
        here = (self.admitted() if self.admitted is not None else None) or boundary.current()
        if here is None:
            return
        payee: object = here.ledger or ref(here)
        if payee not in self.paid_to:
            here.charge(self.budget.bits(self.running))
            self.paid_to.add(payee)

    def publish(self, training: object, states: Sequence[boundary.State]) -> None:
        """Tell the boundary what has just been released, and was settled before."""
        here = self.admitted() if self.admitted is not None else None
        if here is not None:
            here.publish(training, states)

    def __str__(self) -> str:
        times = "1 participation" if self.participations == 1 else f"{self.participations:g} participations"
        return f"{times}, at most {self.bits:.4g} of {self.total:.4g} bits about one sample"


def family_of(parameters: Iterable[Tensor]) -> str:
    """Models with the same shapes are one family."""
    shapes = " ".join("×".join(map(str, p.shape)) for p in parameters)
    return hashlib.sha256(shapes.encode()).hexdigest()[:12]
