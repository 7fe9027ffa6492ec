"""95 % intervals: of a mean over runs, and of a share of counted samples."""

import math
from collections.abc import Sequence

from scipy import stats

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


def share_interval(hits: int, count: int) -> Interval:
    """Wilson's interval for a share of `count` independent trials."""
    if count < 1 or not 0 <= hits <= count:
        raise BadValue(f"interval: {hits} of {count} is no share.")
    found = stats.binomtest(hits, count).proportion_ci(method="wilson")
    return Interval(mean=hits / count, low=float(found.low), high=float(found.high), count=count)
