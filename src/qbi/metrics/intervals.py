"""95 % intervals: of a mean over runs, and of a share of counted samples."""

import math
from collections.abc import Sequence

from qbi.errors import BadValue
from qbi.records import Interval

Z = 1.96
"""The paper multiplies the standard error over runs by this (erratum 10)."""


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean ± 1.96·s/√n over raw values; a single value has no width that could be known."""
    if not values:
        raise BadValue("interval: no values; at least one is needed.")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean=mean, low=float("nan"), high=float("nan"), count=1)
    variance = math.fsum((v - mean) ** 2 for v in values) / (count - 1)
    half = Z * math.sqrt(variance / count)
    return Interval(mean=mean, low=mean - half, high=mean + half, count=count)
