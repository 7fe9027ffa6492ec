"""Closed forms of the paper: the optimal bias, and what a QBI layer is expected to leak. No torch.

Symbols: B = `batch_size`, N = `neurons`, M = `features`, p = `probability` that one neuron fires for one
sample (1/B unless given). Erratum numbers refer to the list in `docs/errata.md`.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import optimize, special

from qbi.errors import BadValue, require_positive

if TYPE_CHECKING:
    pass

ACTIVE_LIMIT = 1 - 1 / math.e
"""Eq. 10: expected share of active neurons as the batch grows."""

UNIQUE_LIMIT = 1 / math.e
"""Eq. 11: expected share of neurons with exactly one sample as the batch grows."""


@dataclass(frozen=True)
class Expectation:
    """What theory expects of one setting: the bias, and A, P, R as shares of one."""

    neurons: int
    batch_size: int
    features: int
    bias: float
    probability: float
    active: float
    precision: float
    recall: float


def optimal_bias(batch_size: int, features: int) -> float:
    """Eq. 5, b* = Φ⁻¹(1/B)·√M: each neuron fires for one of B samples, as M grows."""
    _check_batch(batch_size, features)
    return float(special.ndtri(1 / batch_size)) * math.sqrt(features)


def exact_bias(batch_size: int, features: int) -> float:
    """The bias at which P(wᵀx + b > 0) is exactly 1/B for standard normal w and x (erratum 1).

    wᵀx is symmetric variance-gamma, (Q₁ − Q₂)/2 with Q ~ χ²_M; the quantile is solved in log-probability,
    bracketed around the asymptotic value, so it is stable from M = 1 to 10⁷.
    """
    _check_batch(batch_size, features)
    return bias_for_probability(1 / batch_size, features)


def bias_for_probability(probability: float, features: int) -> float:
    """The bias at which a neuron fires with the given probability, for standard normal rows and samples."""
    if not 0 < probability < 1:
        raise BadValue(f"theory: probability is {probability}; it must lie strictly between 0 and 1.")
    if probability == 0.5:
        return 0.0
    if probability > 0.5:
        return -bias_for_probability(1 - probability, features)
    target = math.log(probability)
    # The tail of wᵀx is never lighter than normal at this scale nor heavier than exponential, so |b| lies
    # below √M·|z| + 2·|log p| and the root is bracketed by zero on the other side.
    reach = math.sqrt(features) * abs(float(special.ndtri(probability))) + 2 * abs(target)
    root = optimize.brentq(
        lambda bias: math.log(fire_probability(bias, features)) - target,
        -reach,
        -1e-12 * reach,
        xtol=1e-13 * reach,
        rtol=1e-13,
    )
    return float(root)


def fire_probability(bias: float, features: int) -> float:
    """P(wᵀx + b > 0) for standard normal w and x of M entries: E[Φ(b/r)] over r = ‖x‖ ~ χ_M.

    The density of r is taken relative to its mode √(M−1) and normalised by its own integral, which avoids
    the cancellation of log-gamma terms at large M.
    """
    require_positive("theory", features=features)
    if bias > 0:
        return 1 - fire_probability(-bias, features)
    mode = math.sqrt(features - 1)
    # The mode of the weighted integrand lies further out when the bias is deep in the tail.
    tail_mode = math.sqrt((features - 1 + math.hypot(features - 1, 2 * bias)) / 2)
    low, high = max(0.0, mode - 9.0), tail_mode + 9.0
    nodes, weights = _panels(low, high)
    density = weights * np.exp(_log_density(nodes, mode))
    return float((density * special.ndtr(bias / nodes)).sum() / density.sum())


def _log_density(radius: np.ndarray, mode: float) -> np.ndarray:
    """Log density of the χ_M law of r, up to a constant: (M−1)·log(r/mode) − (r² − mode²)/2."""
    if mode == 0:
        return np.asarray(-(radius**2) / 2)
    step = (radius - mode) / mode
    return np.asarray(mode**2 * (np.log1p(step) - step - step**2 / 2))


def _panels(low: float, high: float, panels: int = 24, order: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Composite Gauss–Legendre nodes, the panels shrinking geometrically towards `low`.

    The refinement is for small M, where the integrand Φ(b/r) turns on sharply next to r = 0.
    """
    nodes, weights = np.polynomial.legendre.leggauss(order)
    if low > 0:
        edges = np.linspace(low, high, panels + 1)
    else:
        edges = np.concatenate([[0.0], np.geomspace(1e-12 * high, high, 3 * panels)])
    half = np.diff(edges) / 2
    centre = edges[:-1] + half
    return (centre[:, None] + half[:, None] * nodes).ravel(), (half[:, None] * weights).ravel()


def expected_active(batch_size: int, probability: float | None = None) -> float:
    """Eq. 8, E[A] = 1 − (1 − p)^B: the share of neurons that fire for at least one sample."""
    p = _probability(batch_size, probability)
    return 1.0 if p == 1 else -math.expm1(batch_size * math.log1p(-p))


def expected_precision(batch_size: int, probability: float | None = None) -> float:
    """Eq. 9, E[P] = B·p·(1 − p)^(B−1): the share of neurons that fire for exactly one sample."""
    return batch_size * isolation_probability(batch_size, probability)


def expected_recall(neurons: int, batch_size: int, probability: float | None = None) -> float:
    """Eq. 12, E[R] = 1 − (1 − p·(1 − p)^(B−1))^N: the share of samples that some neuron isolates.

    A limit for random rows that are read one at a time, not for every conceivable attack (erratum 19).
    """
    require_positive("theory", neurons=neurons)
    q = isolation_probability(batch_size, probability)
    return 1.0 if q == 1 else -math.expm1(neurons * math.log1p(-q))


def isolation_probability(batch_size: int, probability: float | None = None) -> float:
    """p·(1 − p)^(B−1): one neuron fires for one given sample and for none of the others."""
    p = _probability(batch_size, probability)
    if p == 1:
        return 1.0 if batch_size == 1 else 0.0
    return p * math.exp((batch_size - 1) * math.log1p(-p))


def neurons_needed(recall: float, batch_size: int, probability: float | None = None) -> int:
    """The smallest N whose expected recall reaches the wanted one."""
    if not 0 < recall < 1:
        raise BadValue(f"theory: recall is {recall}; it must lie strictly between 0 and 1.")
    q = isolation_probability(batch_size, probability)
    if q == 0:
        raise BadValue(
            f"theory: no neuron ever isolates a sample at probability {probability} and batch size {batch_size}."
        )
    if q == 1:
        return 1
    neurons = max(1, math.ceil(math.log1p(-recall) / math.log1p(-q)))
    # The logarithms may round across an integer; the definition decides.
    while neurons > 1 and expected_recall(neurons - 1, batch_size, probability) >= recall:
        neurons -= 1
    while expected_recall(neurons, batch_size, probability) < recall:
        neurons += 1
    return neurons


def expectation(neurons: int, batch_size: int, features: int, *, exact: bool = False) -> Expectation:
    """Everything at once for one setting, with the asymptotic or the exact bias."""
    require_positive("theory", neurons=neurons)
    bias = exact_bias(batch_size, features) if exact else optimal_bias(batch_size, features)
    return Expectation(
        neurons=neurons,
        batch_size=batch_size,
        features=features,
        bias=bias,
        probability=fire_probability(bias, features),
        active=expected_active(batch_size),
        precision=expected_precision(batch_size),
        recall=expected_recall(neurons, batch_size),
    )


def _probability(batch_size: int, probability: float | None) -> float:
    require_positive("theory", batch_size=batch_size)
    p = 1 / batch_size if probability is None else probability
    if not 0 <= p <= 1:
        raise BadValue(f"theory: probability is {p}; it must lie between 0 and 1.")
    return p


def _check_batch(batch_size: int, features: int) -> None:
    require_positive("theory", batch_size=batch_size, features=features)
    if batch_size == 1:
        raise BadValue(
            "theory: batch size is 1; its bias would be infinite, and a batch of one sample can be read from "
            "any linear layer with a bias as it is. Use a batch size of at least 2."
        )
