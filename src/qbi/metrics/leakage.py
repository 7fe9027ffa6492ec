"""A, P and R over several batches."""

from collections.abc import Sequence

from qbi.records import Leakage


def mean_leakage(each: Sequence[Leakage]) -> dict[str, float]:
    """A, P, P among active rows, and R, averaged raw."""
    count = len(each)
    return {
        "active": sum(e.active for e in each) / count,
        "precision": sum(e.precision for e in each) / count,
        "precision_among_active": sum(e.precision_among_active for e in each) / count,
        "recall": sum(e.recall for e in each) / count,
    }
