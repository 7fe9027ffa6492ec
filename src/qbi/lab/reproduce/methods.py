"""The paper's attacks, evaluated in Gram space on one set of inner products."""

from jaxtyping import Int
from torch import Tensor

from qbi.attacks import PAIRS, QBI, Attack, InGramSpace, TrapWeights
from qbi.attacks.trap_weights import TUNING_BATCHES, best_scale
from qbi.lab.reproduce.cells import Cell, Measured, mean_over
from qbi.randomness import generator

METHODS = (TrapWeights.key, QBI.key, PAIRS.key)
"""In the order of the paper's columns."""


def measured(cell: Cell, attack: Attack, batch: InGramSpace, batches: Int[Tensor, "k b"]) -> Measured:
    """An attack on all test batches with one set of rows."""
    draws = generator(cell.seed_for(attack.key.replace("-", " ")), device=batch.test.device)
    return mean_over(attack.firing(batch, cell.neurons, draws), batches)


def tuning_samples(cell: Cell, available: int) -> int:
    """How many auxiliary samples the scale of trap weights is chosen on: a whole number of batches."""
    return min(TUNING_BATCHES, available // cell.batch_size) * cell.batch_size


def tuned_trap_weights(cell: Cell, auxiliary: InGramSpace) -> TrapWeights:
    """Trap weights at the scale that reads most of the auxiliary batches."""
    device = auxiliary.test.device
    return TrapWeights(
        best_scale(
            auxiliary,
            cell.neurons,
            cell.batch_size,
            lambda gap: generator(cell.seed_for("trap scale", gap), device=device),
        )
    )
