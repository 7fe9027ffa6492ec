"""Quantile-based bias initialisation: random rows, and one bias that makes each fire for one sample in B."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from qbi import theory
from qbi.attacks.base import Attack, Knowledge
from qbi.attacks.gram_space import InGramSpace
from qbi.attacks.random_rows import predict
from qbi.errors import require_positive
from qbi.gram import law
from qbi.records import CraftedRows, Leakage


@dataclass(frozen=True)
class QBI(Attack):
    """Section "Quantile-Based Bias Initialization": w ~ N(0, I), b = Φ⁻¹(1/B)·√M (Eq. 5).

    Args:
        batch_size: the batch the rows are made for, B.
        exact: take the finite-M quantile, which matters below a hundred features.

    >>> from qbi.randomness import generator
    >>> rows = QBI(batch_size=20).rows(200, 3072, generator(0))
    >>> tuple(rows.weight.shape), round(float(rows.bias[0]), 2)
    ((200, 3072), -91.17)
    """

    key: ClassVar[str] = "qbi"
    name: ClassVar[str] = "QBI"
    action: ClassVar[str] = "prepares the model with QBI"
    calibrated_at: ClassVar[tuple[int, ...]] = (8, 20, 64, 200)
    has_law: ClassVar[bool] = True

    batch_size: int
    exact: bool = False

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "QBI":
        """For the expected batch."""
        return cls(knowledge.batch_size)

    def bias(self, features: int) -> float:
        """The bias of every row."""
        solve = theory.exact_bias if self.exact else theory.optimal_bias
        return solve(self.batch_size, features)

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Draw the rows."""
        require_positive(self.name, neurons=neurons)
        bias = self.bias(features)
        weight = torch.empty(neurons, features, device=generator.device).normal_(generator=generator)
        return CraftedRows(weight=weight, bias=torch.full((neurons,), bias, device=generator.device))

    def firing(self, batch: InGramSpace, neurons: int, generator: torch.Generator) -> Bool[Tensor, "n t"]:
        """Exact in law: N(0, G) above the bias."""
        return law(batch.test).sample(neurons, generator) > -self.bias(batch.features)

    def expected(
        self, batch: InGramSpace, neurons: Sequence[int], generator: torch.Generator, *, draws: int = 32_768
    ) -> tuple[Leakage, ...]:
        """For every number of neurons from one set of draws."""
        return predict(law(batch.test), self.bias(batch.features), neurons, generator, draws=draws)

    def limit(self, neurons: int, batch_size: int) -> Leakage:
        """The paper's closed forms: random rows on normal data, read one at a time (erratum 19)."""
        recall = theory.expected_recall(neurons, batch_size)
        return Leakage.of(theory.expected_active(batch_size), theory.expected_precision(batch_size), recall)
