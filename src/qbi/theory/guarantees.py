"""What holds against every server when each sample's gradient is clipped to C and noise of σC is added to their sum.

Symbols: σ = `noise`, T = `participations` (how often the same sample stood in a sum that left). Nothing here depends on the
model that was sent, on the other samples, or on C. Derivations and scope: `docs/guarantees.md`.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special, stats

from qbi.errors import BadValue


def bits(noise: float, participations: float = 1, dimensions: int | None = None) -> float:
    """At most this many bits about one sample leave: T·½·P·log₂(1 + 1/(Pσ²)), which is below 0.72·T/σ² for every P.

    A sample's share of the sum is a signal of power C² in P = `dimensions` values with noise σ²C² each: the capacity of that channel.
    """
    _check(noise, participations)
    if noise == 0:
        return math.inf
    if dimensions is None:
        return participations / (2 * noise**2 * math.log(2))
    return participations * dimensions / 2 * math.log1p(1 / (dimensions * noise**2)) / math.log(2)


def noise_for_bits(most: float, participations: float = 1) -> float:
    """The noise at which at most that many bits leave."""
    _positive("bits", most)
    return math.sqrt(participations / (2 * most * math.log(2)))


def shift(noise: float, participations: float = 1) -> float:
    """μ = √T/σ: how far apart, in standard deviations, the updates with and without a sample can lie."""
    _check(noise, participations)
    return math.inf if noise == 0 else math.sqrt(participations) / noise


def reconstruction(chance: float, noise: float, participations: float = 1) -> float:
    """γ ≤ Φ(Φ⁻¹(κ) + μ): the chance of a reconstruction that a guess without the update makes with chance κ."""
    if not 0 <= chance <= 1:
        raise BadValue(f"guarantees: the chance of a guess is {chance}; it lies between 0 and 1.")
    reach = shift(noise, participations)
    if chance in (0, 1) or math.isinf(reach):
        return float(chance > 0)
    return float(special.ndtr(special.ndtri(chance) + reach))


def noise_for_reconstruction(most: float, chance: float, participations: float = 1) -> float:
    """The noise at which a reconstruction of chance κ succeeds with chance γ at most."""
    if not 0 < chance < most < 1:
        raise BadValue(
            f"guarantees: a reconstruction of chance {most} against {chance} by guessing; 0 < guess < goal < 1 is needed."
        )
    return math.sqrt(participations) / float(special.ndtri(most) - special.ndtri(chance))


def delta(epsilon: float, noise: float, participations: float = 1) -> float:
    """δ(ε) of T Gaussian sums, exactly: Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ). One sample added or removed, no sampling."""
    reach = shift(noise, participations)
    if math.isinf(reach):
        return 1.0
    left = special.log_ndtr(reach / 2 - epsilon / reach)
    right = epsilon + special.log_ndtr(-reach / 2 - epsilon / reach)
    return float(math.exp(left) * -math.expm1(min(0.0, right - left)))


def epsilon(at_delta: float, noise: float, participations: float = 1) -> float:
    """The smallest ε at which `delta` is not above the wanted one."""
    if not 0 < at_delta < 1:
        raise BadValue(f"guarantees: δ is {at_delta}; it lies between 0 and 1.")
    reach = shift(noise, participations)
    if math.isinf(reach):
        return math.inf
    if delta(0, noise, participations) <= at_delta:
        return 0.0
    most = reach**2 / 2 + reach * abs(float(special.ndtri(at_delta))) + 1
    return float(optimize.brentq(lambda e: delta(e, noise, participations) - at_delta, 0, most, rtol=1e-12))


def noise_for_epsilon(most: float, at_delta: float, participations: float = 1) -> float:
    """The noise at which (ε, δ) holds, without help from sampling."""
    _positive("ε", most)
    return float(optimize.brentq(lambda s: epsilon(at_delta, s, participations) - most, 1e-4, 1e5, rtol=1e-9))


def poisson_epsilon(at_delta: float, noise: float, rate: float, steps: int) -> float:
    """ε where each sample is in each of so many sums by a chance of its own: Opacus' RDP accountant. One sample added or removed."""
    _sampled(rate, steps)
    if noise == 0:
        return math.inf
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    return min(float(accountant.get_epsilon(at_delta)), epsilon(at_delta, noise, steps))


def noise_for_poisson_epsilon(most: float, at_delta: float, rate: float, steps: int) -> float:
    """The noise at which (ε, δ) holds with the help of Poisson sampling."""
    _positive("ε", most)
    _sampled(rate, steps)
    low, high = 1e-2, 1e4
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if poisson_epsilon(at_delta, middle, rate, steps) <= most else (middle, high)
    return high


def poisson_reconstruction(chance: float, noise: float, rate: float, steps: int) -> float:
    """γ where a sample is in each of so many sums by a chance of its own: the mean over how often it was, which can only help a server to know."""
    _sampled(rate, steps)
    often = np.arange(steps + 1)
    weights = stats.binom.pmf(often, steps, rate)
    return float(
        sum(w * reconstruction(chance, noise, int(k)) for k, w in zip(often, weights, strict=True) if w > 1e-300)
    )


def _sampled(rate: float, steps: int) -> None:
    if not 0 < rate <= 1 or steps < 1:
        raise BadValue(
            f"guarantees: sampling at rate {rate} in {steps} steps; the rate lies in (0, 1], and there is a step."
        )


@dataclass(frozen=True)
class Prior:
    """What a server knows of samples before the update: a Gaussian with these variances along its principal components."""

    variances: tuple[float, ...]
    span: float
    """The range of values that PSNR is measured against."""

    @property
    def features(self) -> int:
        """Values of a sample; components without a variance are not listed but counted by whoever lists them as zero."""
        return len(self.variances)

    @classmethod
    def of(cls, samples: np.ndarray, span: float | None = None) -> "Prior":
        """From samples of the domain, one per row."""
        rows = np.asarray(samples, dtype=np.float64).reshape(len(samples), -1)
        if len(rows) < 2:
            raise BadValue(f"guarantees: {len(rows)} samples; a prior needs at least two.")
        spread = float(rows.max() - rows.min())
        rows = rows - rows.mean(0)
        products = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
        values = np.linalg.eigvalsh(products)[::-1].clip(0) / (len(rows) - 1)
        kept = np.zeros(rows.shape[1])
        kept[: len(values)] = values[: rows.shape[1]]
        return cls(tuple(kept.tolist()), spread if span is None else span)

    def psnr(self, squared_error: float) -> float:
        """dB of a mean squared error a value."""
        return math.inf if squared_error == 0 else 10 * math.log10(self.span**2 / squared_error)


def smallest_error(prior: Prior, most_bits: float) -> float:
    """The least mean squared error a value that so many bits allow: the Gaussian's rate and distortion.

    Whatever was read, the estimate carries no more bits than the update did; to lie closer than this on average would take more.
    Holds of Gaussian samples. Others of the same covariance have more structure, and a server that knows it may come closer.
    """
    variances = np.sort(np.asarray(prior.variances))[::-1]
    if most_bits <= 0 or not variances.any():
        return float(variances.mean())
    if math.isinf(most_bits):
        return 0.0
    logs = np.log(variances[variances > 0])
    # With the first k components in use, the water's level follows from the bits they share.
    levels = (np.cumsum(logs) - 2 * math.log(2) * most_bits) / np.arange(1, len(logs) + 1)
    level = math.exp(levels[int((logs > levels).sum()) - 1])
    return float(np.minimum(variances, level).mean())


def largest_psnr(prior: Prior, noise: float, participations: float = 1) -> float:
    """The best PSNR, of the mean squared error over Gaussian samples; of others, what a server without a better prior reaches."""
    return prior.psnr(smallest_error(prior, bits(noise, participations)))


def linear_error(prior: Prior, noise: float, participations: float = 1) -> float:
    """The least mean squared error a value where the update is linear in the sample: van Trees' bound, at its best design.

    With power a_k spent on component k, Σ a_k = 1, Fisher information and prior add up to 1/λ_k + T·a_k/(λ_k·σ²), so the error is
    Σ λ_k/(1 + T·a_k/σ²). It is least where √λ_k is poured into water: 1 + T·a_k/σ² = √(λ_k/ν).
    """
    _check(noise, participations)
    roots = np.sort(np.sqrt(np.asarray(prior.variances)))[::-1]
    ratio = participations / noise**2 if noise else math.inf
    if math.isinf(ratio):
        return 0.0
    # With the first k components in use, √ν follows from the power they share.
    counts = np.arange(1, len(roots) + 1)
    levels = np.cumsum(roots) / (ratio + counts)
    used = int((roots > levels).sum())
    level = levels[used - 1]
    return float((roots[:used].sum() * level + (roots[used:] ** 2).sum()) / len(roots))


def most_likely_guess(hits: int, tried: int, confidence: float = 0.95) -> float:
    """An upper bound for κ from held-out samples (Clopper and Pearson): never below about 3/n, however few were guessed."""
    if not 0 <= hits <= tried or tried < 1:
        raise BadValue(f"guarantees: {hits} of {tried} guesses; count at least one sample.")
    return 1.0 if hits == tried else float(stats.beta.ppf(confidence, hits + 1, tried - hits))


def _check(noise: float, participations: float) -> None:
    if not noise >= 0 or not participations >= 0:
        raise BadValue(f"guarantees: noise {noise}, {participations} participations; neither may be negative.")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise BadValue(f"guarantees: {name} is {value}; it must be positive.")
