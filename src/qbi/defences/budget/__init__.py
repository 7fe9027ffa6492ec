"""A bound that holds against every server: per-sample clipping, noise on the sum, and a ledger of what was spent."""

from qbi.defences.budget.account import Account
from qbi.defences.budget.clipping import Clipping, with_group_norm
from qbi.defences.budget.goal import Budget
from qbi.defences.budget.ledger import BudgetSpent, Ledger

__all__ = ["Account", "Budget", "BudgetSpent", "Clipping", "Ledger", "with_group_norm"]
