"""Whether values are numbers."""

from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite: by their sum, which one pass forms, and one by one only where that overflows."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
