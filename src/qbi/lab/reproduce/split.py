"""Which samples a run tunes on and which it tests on."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from qbi.errors import DataError
from qbi.lab.reproduce.cells import BATCHES, Cell
from qbi.randomness import generator


@dataclass(frozen=True)
class Split:
    """Auxiliary samples for PAIRS, and test batches out of the other half."""

    auxiliary: Int[Tensor, " a"]
    batches: Int[Tensor, "k b"]


def split_half(cell: Cell, samples: int) -> Split:
    """A fresh random half and half (erratum 14). Batches are disjoint where the half is large enough for ten."""
    half = samples // 2
    if half < max(cell.neurons, cell.batch_size):
        raise DataError(
            f"{cell.item}: half of {samples} samples is {half}; the cell ({cell.neurons}, {cell.batch_size}) needs "
            f"{max(cell.neurons, cell.batch_size)}. Give more data, or leave the cell out with --cells."
        )
    draw = generator(cell.seed_for("split"))
    order = torch.randperm(samples, generator=draw)
    test = order[half:]
    if len(test) >= BATCHES * cell.batch_size:
        batches = test[: BATCHES * cell.batch_size].reshape(BATCHES, cell.batch_size)
    else:
        batches = torch.stack(
            [test[torch.randperm(len(test), generator=draw)[: cell.batch_size]] for _ in range(BATCHES)]
        )
    return Split(auxiliary=order[:half], batches=batches)
