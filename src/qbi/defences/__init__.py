"""What a client can do to its update before it leaves."""

from qbi.defences.aggp import AGGP, keep_share, prune_rows, prune_rows_in_place
from qbi.defences.applying import DefenceReport, LeakRefused, defended_step
from qbi.defences.base import Chain, Defence, StepDefence, chain, protected_step
from qbi.defences.private import DPSGD, Guarantee
from qbi.defences.rules import DropClose, DropDominated, DropSparse, HideReadable, Noise, NoisyRows, Sparsify

__all__ = [
    "AGGP",
    "DPSGD",
    "Chain",
    "Defence",
    "DefenceReport",
    "DropClose",
    "DropDominated",
    "DropSparse",
    "Guarantee",
    "HideReadable",
    "LeakRefused",
    "Noise",
    "NoisyRows",
    "Sparsify",
    "StepDefence",
    "chain",
    "defended_step",
    "keep_share",
    "protected_step",
    "prune_rows",
    "prune_rows_in_place",
]
