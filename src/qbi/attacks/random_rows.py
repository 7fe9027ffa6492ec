"""What layers of random rows with one bias are expected to do on a batch: A, P and R for every number of neurons at once."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool
from scipy.special import gammaln
from torch import Tensor

from qbi.errors import BadValue
from qbi.exposure.pattern import isolation
from qbi.gram import Law
from qbi.records import Leakage


def predict(
    known: Law, bias: float, neurons: Sequence[int], generator: torch.Generator, *, draws: int = 32_768
) -> tuple[Leakage, ...]:
    """Expected A, P, R of layers of random rows with one bias on this batch, for every N from one set of draws.

    With c_j of D draws isolating sample j, the chance that N neurons miss it is estimated without bias by the
    share of N-subsets of the draws that miss it, C(D − c_j, N) / C(D, N).
    """
    if draws < max(neurons):
        raise BadValue(f"predict: {draws} draws are fewer than the {max(neurons)} neurons asked for.")
    fired = _draw_firing(known, bias, draws, generator)
    found = isolation(fired)
    counts = torch.bincount(found.sample[found.isolates], minlength=known.batch_size).cpu().numpy()
    active, precision = float((found.counts > 0).double().mean()), float(found.isolates.double().mean())
    recalls = [float(np.mean(1 - _miss_probability(counts, n, draws))) for n in neurons]
    return tuple(Leakage.of(active, precision, recall) for recall in recalls)


def _draw_firing(known: Law, bias: float, draws: int, generator: torch.Generator) -> Bool[Tensor, "d b"]:
    block = max(1, min(draws, 2**24 // known.batch_size))
    parts = [known.sample(min(block, draws - start), generator) > -bias for start in range(0, draws, block)]
    return torch.cat(parts)


def _miss_probability(counts: np.ndarray, neurons: int, draws: int) -> np.ndarray:
    rest = draws - counts
    possible = rest >= neurons
    safe = np.where(possible, rest, neurons)
    log = gammaln(safe + 1) - gammaln(safe - neurons + 1) - (math.lgamma(draws + 1) - math.lgamma(draws - neurons + 1))
    return np.where(possible, np.exp(log), 0.0)
