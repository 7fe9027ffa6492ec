"""What a client can do to its update before it leaves."""

from qbi.defences.aggp import AGGP, keep_share, prune_rows, prune_rows_in_place
from qbi.defences.base import Chain, Defence, chain
from qbi.defences.guard import LeakGuard
from qbi.defences.rules import DropClose, DropDominated, DropSparse, Noise, Pruning, Sparsify

__all__ = [
    "AGGP",
    "Chain",
    "Defence",
    "DropClose",
    "DropDominated",
    "DropSparse",
    "LeakGuard",
    "Noise",
    "Pruning",
    "Sparsify",
    "chain",
    "keep_share",
    "prune_rows",
    "prune_rows_in_place",
]
