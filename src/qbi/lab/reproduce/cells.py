"""One cell of a table: a setting and a run. Its name is its seed, so order and workers cannot matter."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from jaxtyping import Bool, Int
from torch import Tensor

from qbi.exposure import leakage
from qbi.randomness import derive_seed
from qbi.records import Leakage

Approach = Literal["gram", "direct", "gradients"]
"""How a cell is computed: in Gram space, by real forward passes, or by real gradients read back."""

Measured = Mapping[str, float]
Result = dict[str, Measured]
"""For each method: active, precision, precision_among_active, recall, as means over the run's batches."""

NEURONS = (200, 500, 1000)
BATCH_SIZES = (20, 50, 100, 200)
GRID = tuple((n, b) for n in NEURONS for b in BATCH_SIZES)
"""The paper's twelve settings."""

TEXT_GRID = tuple((1000, b) for b in BATCH_SIZES)
FEDERATION_GRID = ((200, 20),)

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
    route: Approach = "gram"

    @property
    def key(self) -> str:
        """The unique name under which the result is stored."""
        return f"{self.item}/{self.neurons}/{self.batch_size}/{self.run}/{self.seed}/{self.route}"

    def seed_for(self, *purpose: object) -> int:
        """A seed for one purpose; the same for every route, so that routes see the same data."""
        return derive_seed(self.seed, self.item, self.neurons, self.batch_size, self.run, *purpose)


def mean_over(fired: Bool[Tensor, "n t"], batches: Int[Tensor, "k b"]) -> Measured:
    """A, P, R of each batch, averaged raw; `batches` holds columns of the pattern."""
    return asdict(Leakage.mean([leakage(fired[:, columns]) for columns in batches]))
