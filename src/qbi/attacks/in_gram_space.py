"""What an attack's layer does on given data, without ever building its weights.

For layers that no one needs to hold (tables, predictions), the firing pattern on T samples is drawn in its exact law
from their Gram matrix: T numbers a row instead of M. `mount` and a real forward pass are the check.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from qbi.attacks.pairs import search
from qbi.errors import BadValue
from qbi.gram import condition, law


@dataclass(frozen=True)
class AuxiliaryGroup:
    """One group of PAIRS in Gram space: its auxiliary samples among themselves, and the test samples with them."""

    auxiliary: Float64[Tensor, "a a"]
    cross: Float64[Tensor, "t a"]


def qbi_firing(
    test: Float64[Tensor, "t t"], bias: float, neurons: int, generator: torch.Generator
) -> Bool[Tensor, "n t"]:
    """The firing pattern of a QBI layer."""
    return law(test).sample(neurons, generator) > -bias


def pairs_firing(
    test: Float64[Tensor, "t t"],
    groups: Iterable[AuxiliaryGroup],
    bias: float,
    *,
    budget: int,
    patience: int,
    generator: torch.Generator,
) -> Bool[Tensor, "n t"]:
    """The firing pattern of a PAIRS layer: tuned rows by the conditional law, unreached rows by the plain one."""
    untuned = law(test)
    patterns = []
    for group in groups:
        known = law(group.auxiliary)
        neurons = known.batch_size
        found = search(known, bias, neurons, budget, patience, generator).found
        tuned = condition(test, group.cross, known).sample(found, generator)
        plain = untuned.sample(neurons - len(found), generator)
        patterns.append(torch.cat([tuned, plain]) > -bias)
    return torch.cat(patterns)


def trap_weights_firing(
    test: Float64[Tensor, "t t"],
    sums: Float64[Tensor, " t"],
    features: int,
    scale: float,
    neurons: int,
    generator: torch.Generator,
) -> Bool[Tensor, "n t"]:
    """The firing pattern of a trap-weights layer, by the central limit over its M entries.

    A row's entries are exchangeable: half of them −m with m = |N(0,1)|, half scale·m in the same magnitudes. That
    fixes their mean, variance v and covariance c, so that z ~ N(mean·s, (v − c)·G + c·ssᵀ) with s the samples' sums.
    """
    if features < 2:
        raise BadValue(f"trap weights: {features} feature; a row needs at least two.")
    mean_abs, second = math.sqrt(2 / math.pi), 1.0
    negative = (features + 1) // 2
    mirrored = features - negative
    mean = (scale * mirrored - negative) * mean_abs / features
    variance = (negative + scale**2 * mirrored) * second / features - mean**2
    # The row's sum is −(1 − scale)·Σm over mirrored magnitudes, less the unmatched entry of odd rows.
    sum_variance = ((1 - scale) ** 2 * mirrored + (negative - mirrored)) * (second - mean_abs**2)
    covariance = (sum_variance / features - variance) / (features - 1)
    centred = law((variance - covariance) * test + covariance * torch.outer(sums, sums))
    return centred.sample(neurons, generator) > -(mean * sums).float()
