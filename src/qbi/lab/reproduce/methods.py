"""The paper's attacks, evaluated in Gram space on one set of inner products."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from qbi.attacks import PAIRS, QBI, Attack, InGramSpace, InputRange, TrapWeights
from qbi.attacks.base import SampleSource
from qbi.attacks.trap_weights import TUNING_BATCHES, best_scale
from qbi.lab.reproduce.cells import Cell, Measured, Result, mean_over
from qbi.randomness import generator

METHODS = (TrapWeights.key, QBI.key, PAIRS.key)
"""In the order of the paper's columns."""


@dataclass(frozen=True)
class GramSource:
    """What a cell takes of its data, images or texts: the test samples by their inner products, in each range that an attack wants."""

    spaces: Mapping[InputRange, InGramSpace]
    batches: Int[Tensor, "k b"]
    """Test batches, by the samples' numbers in the spaces."""


def paper_attacks(cell: Cell, auxiliary: SampleSource, tuning: InGramSpace) -> tuple[QBI, PAIRS, TrapWeights]:
    """The paper's three, each as an attacker with the auxiliary half would prepare it."""
    return QBI(cell.batch_size), PAIRS(cell.batch_size, auxiliary), tuned_trap_weights(cell, tuning)


def attacks_measured(cell: Cell, attacks: tuple[QBI, PAIRS, TrapWeights], source: GramSource) -> dict[str, Measured]:
    """All three on the same test batches, and the scale that trap weights were given."""
    found: Result = {a.key: measured(cell, a, source.spaces[a.domain], source.batches) for a in attacks}
    trap = attacks[-1]
    return {**found, trap.key: {**found[trap.key], "scale": trap.scale}}


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
