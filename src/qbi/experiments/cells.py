"""One cell of a table: a setting and a run. Its name is its seed, so order and workers cannot matter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Int
from torch import Tensor

from qbi.metrics import leakage
from qbi.randomness import derive_seed

Route = Literal["gram", "direct", "gradients"]
Measured = Mapping[str, float]
Result = dict[str, Measured]
"""For each method: active, precision, precision_among_active, recall, as means over the run's batches."""

BATCHES = 10
"""Test batches a run, as in the paper."""


@dataclass(frozen=True, order=True)
class Cell:
    """What is computed, and under which seed. `item` names the data and the question."""

    item: str
    neurons: int
    batch_size: int
    run: int
    seed: int = 0
    route: Route = "gram"

    @property
    def key(self) -> str:
        """The unique name under which the result is stored."""
        return f"{self.item}/{self.neurons}/{self.batch_size}/{self.run}/{self.seed}/{self.route}"

    def seed_for(self, *purpose: object) -> int:
        """A seed for one purpose; the same for every route, so that routes see the same data."""
        return derive_seed(self.seed, self.item, self.neurons, self.batch_size, self.run, *purpose)


def mean_leakage(fired: Bool[Tensor, "n t"], batches: Int[Tensor, "k b"]) -> Measured:
    """A, P, R of each batch, averaged raw; `batches` holds columns of the pattern."""
    each = [leakage(fired[:, columns]) for columns in batches]
    return {
        "active": sum(e.active for e in each) / len(each),
        "precision": sum(e.precision for e in each) / len(each),
        "precision_among_active": sum(e.precision_among_active for e in each) / len(each),
        "recall": sum(e.recall for e in each) / len(each),
    }
