"""What a client can do to its update before it leaves."""

from qbi.defences.aggp import AGGP, keep_share, prune_rows, prune_rows_in_place
from qbi.defences.ambient import AmbientGuard
from qbi.defences.base import Chain, Defence, StepDefence, chain, protected_step
from qbi.defences.budget import Budget, BudgetSpent, Ledger, with_group_norm
from qbi.defences.guard import LeakGuard
from qbi.defences.private import DPSGD, Guarantee
from qbi.defences.rules import DropClose, DropDominated, DropSparse, HideReadable, Noise, NoisyRows, Pruning, Sparsify

__all__ = [
    "AGGP",
    "DPSGD",
    "AmbientGuard",
    "Budget",
    "BudgetSpent",
    "Chain",
    "Defence",
    "DropClose",
    "DropDominated",
    "DropSparse",
    "Guarantee",
    "HideReadable",
    "LeakGuard",
    "Ledger",
    "Noise",
    "NoisyRows",
    "Pruning",
    "Sparsify",
    "StepDefence",
    "chain",
    "keep_share",
    "protected_step",
    "prune_rows",
    "prune_rows_in_place",
    "with_group_norm",
]
