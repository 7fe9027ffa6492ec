"""The three methods of the tables, evaluated in Gram space on one set of inner products."""

from collections.abc import Callable

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from qbi.attacks import PAIRS
from qbi.attacks.in_gram_space import AuxiliaryGroup, pairs_firing, qbi_firing, trap_weights_firing
from qbi.experiments.cells import Cell, Measured, mean_leakage
from qbi.randomness import generator
from qbi.theory import optimal_bias

SCALE_GAPS = tuple(0.4 * 0.75**k for k in range(28))
"""Tried values of 1 − scale for trap weights: from 0.4 down to 0.0002, a quarter less each time."""


TRAP_BATCHES = 4
"""Auxiliary batches on which the scale of trap weights is chosen."""


def qbi_measured(cell: Cell, test: Float64[Tensor, "t t"], batches: Int[Tensor, "k b"], features: int) -> Measured:
    """QBI on all test batches with one set of rows."""
    draws = generator(cell.seed_for("qbi"), device=test.device)
    return mean_leakage(qbi_firing(test, optimal_bias(cell.batch_size, features), cell.neurons, draws), batches)


def pairs_measured(
    cell: Cell,
    test: Float64[Tensor, "t t"],
    batches: Int[Tensor, "k b"],
    features: int,
    group: Callable[[slice], AuxiliaryGroup],
) -> Measured:
    """PAIRS, tuned on the first N auxiliary samples in groups of B; `group` gives a group's inner products."""
    draws = generator(cell.seed_for("pairs"), device=test.device)
    starts = range(0, cell.neurons, cell.batch_size)
    fired = pairs_firing(
        test,
        (group(slice(start, min(start + cell.batch_size, cell.neurons))) for start in starts),
        optimal_bias(cell.batch_size, features),
        budget=PAIRS.budget_factor * cell.batch_size * cell.neurons,
        patience=PAIRS.patience,
        generator=draws,
    )
    return mean_leakage(fired, batches)


def trap_measured(
    cell: Cell,
    test: Float64[Tensor, "t t"],
    sums: Float64[Tensor, " t"],
    batches: Int[Tensor, "k b"],
    features: int,
    scale: float,
) -> Measured:
    """Trap weights at one scale; the scale is kept with the result."""
    draws = generator(cell.seed_for("trap weights"), device=test.device)
    fired = trap_weights_firing(test, sums, features, scale, cell.neurons, draws)
    return {**mean_leakage(fired, batches), "scale": scale}


def best_trap_scale(
    cell: Cell,
    auxiliary: Float64[Tensor, "a a"],
    sums: Float64[Tensor, " a"],
    features: int,
) -> float:
    """The scale with the highest R on auxiliary batches: what an attacker with such data would choose.

    `auxiliary` holds a whole number of batches of B samples, or one smaller batch.
    """
    batches = torch.arange(len(sums) // cell.batch_size * cell.batch_size).reshape(-1, cell.batch_size)

    def recall(gap: float) -> float:
        draws = generator(cell.seed_for("trap scale", gap), device=auxiliary.device)
        fired = trap_weights_firing(auxiliary, sums, features, 1 - gap, cell.neurons, draws)
        return mean_leakage(fired, batches)["recall"]

    return 1 - max(SCALE_GAPS, key=recall)
