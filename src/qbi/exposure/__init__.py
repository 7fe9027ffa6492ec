"""What only the client knows of its own step: who fired, each sample's share of every row, and what follows from it."""

from qbi.exposure.pattern import Isolation, Observation, isolated_samples, isolation, leakage, observe
from qbi.exposure.record import Exposure, Leak, count_leaks, difference_leaks, row_errors
from qbi.exposure.watching import Watch, vulnerable_layers, watched

__all__ = [
    "Exposure",
    "Isolation",
    "Leak",
    "Observation",
    "Watch",
    "count_leaks",
    "difference_leaks",
    "isolated_samples",
    "isolation",
    "leakage",
    "observe",
    "row_errors",
    "vulnerable_layers",
    "watched",
]
