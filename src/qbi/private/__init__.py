"""The private step: each sample alone, clipped, released on a grid; its budget, its ledger, and the boundary."""

from qbi.private.allowed import NotReleased
from qbi.private.boundary import Boundary
from qbi.private.goal import Budget
from qbi.private.ledger import BudgetSpent, Ledger
from qbi.private.rates import RateSearch, find_rate
from qbi.private.refusals import with_group_norm
from qbi.private.reporting import StepReport
from qbi.private.step import Private

__all__ = [
    "Boundary",
    "Budget",
    "BudgetSpent",
    "Ledger",
    "NotReleased",
    "Private",
    "RateSearch",
    "StepReport",
    "find_rate",
    "with_group_norm",
]
