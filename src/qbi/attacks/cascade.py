"""Cascade: rows spread over quantiles, so that whenever a sample is taken out, another row has just become single.

The paper gives every row the quantile 1/B. For a reader that takes out what it has read that is the wrong choice: samples of
small norm fire nowhere, and rows with two samples are lost. Rows between a few samples and half of the batch, as in codes
for erasure channels, are all used up one after the other. Which spread is best for N rows and B samples is found on
activation patterns alone, which cost nothing in Gram space.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import torch
from jaxtyping import Bool, Float64
from scipy.special import ndtri
from torch import Tensor

from qbi.attacks.base import Attack, Carried, Knowledge, Reading, loaded
from qbi.attacks.gram_space import InGramSpace
from qbi.attacks.joint import read_whole
from qbi.errors import BadValue, require_positive
from qbi.exposure.pattern import leakage
from qbi.gram import law
from qbi.randomness import generator as named_generator
from qbi.records import Candidates, CraftedRows, Leakage, Update

LOWEST, HIGHEST, POWERS = (0.5, 1.0, 2.0), (0.05, 0.1, 0.2, 0.5), (0.5, 1.0, 2.0)
"""What is tried: the smallest quantile times B, the largest quantile, and how they are spaced between."""

PARTS = (1.0, 0.95, 0.85)
"""Parts of the rows with which a spread is tried."""

TRIED_BATCHES = 3
ROOMY = 4.0
"""Rows per sample from which on the usual spread reads everything, and nothing is tried."""


@dataclass(frozen=True)
class Spread:
    """Quantiles from `lowest`/B to `highest`, evenly in their logarithm where `power` is 1, more at the low end above 1."""

    lowest: float = 0.5
    highest: float = 0.5
    power: float = 1.0

    def quantiles(self, neurons: int, batch_size: int) -> Float64[Tensor, " n"]:
        """One for each row, the smallest first."""
        place = (torch.arange(neurons, dtype=torch.float64) + 0.5) / neurons
        low, high = math.log(min(self.lowest / batch_size, self.highest)), math.log(self.highest)
        return (low + (high - low) * place**self.power).exp()

    def biases(self, neurons: int, batch_size: int, features: int) -> Float64[Tensor, " n"]:
        """The bias that lets a row of standard normal weights fire at its quantile."""
        return torch.from_numpy(ndtri(self.quantiles(neurons, batch_size).numpy())) * math.sqrt(features)


SCARCE = (Spread(1.0, 0.5, 2.0), Spread(2.0, 0.2, 1.0), Spread(2.0, 0.05, 0.5))
"""Spreads that do well where there are few rows for a sample."""

DRAWN = 4
"""Layers drawn for an expectation."""


@dataclass(frozen=True)
class Cascade(Attack):
    """Rows at spread quantiles, read as a whole.

    Args:
        batch_size: the batch the rows are made for.
        spread: how the rows' quantiles lie; `prepare` chooses it on auxiliary samples.
        unmixing: go on by unmixing where no single row is left.

    >>> from qbi.randomness import generator
    >>> bias = Cascade(batch_size=20).rows(50, 100, generator(0)).bias
    >>> bool((bias[1:] > bias[:-1]).all())
    True
    """

    key: ClassVar[str] = "cascade"
    name: ClassVar[str] = "cascade"
    action: ClassVar[str] = "spreads its rows over quantiles and subtracts what it has found"
    calibrated_at: ClassVar[tuple[int, ...]] = (20, 200)
    has_law: ClassVar[bool] = True

    batch_size: int
    spread: Spread = Spread()
    unmixing: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise BadValue(f"cascade: batch size is {self.batch_size}; it must be at least 2.")

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "Cascade":
        """With the spread that reads most of samples of the domain."""
        size, neurons = knowledge.batch_size, knowledge.neurons
        available = 0 if knowledge.auxiliary is None else len(knowledge.auxiliary)
        if neurons >= ROOMY * size or knowledge.auxiliary is None or available < size:
            return cls(size)
        x = loaded(knowledge.auxiliary, slice(0, TRIED_BATCHES * size), torch.empty(0))
        products = (x @ x.T).double()
        starts = range(0, max(1, len(x) - size + 1), size)
        batches = [products[s : s + size, s : s + size] for s in starts]
        return cls(size, best_spread(batches, neurons, x.shape[1], knowledge.seed))

    @classmethod
    def auxiliary_useful(cls, knowledge: Knowledge) -> int:
        """A few batches, where rows are scarce."""
        return TRIED_BATCHES * knowledge.batch_size if knowledge.neurons < ROOMY * knowledge.batch_size else 0

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Random rows, each with the bias of its quantile."""
        require_positive(self.name, neurons=neurons, features=features)
        weight = torch.empty(neurons, features, device=generator.device).normal_(generator=generator)
        bias = self.spread.biases(neurons, self.batch_size, features)
        return CraftedRows(weight, bias.float().to(generator.device))

    def read(self, sent: Carried, update: Update, how: Reading) -> Candidates:
        """The whole update at once."""
        return read_whole(sent, update, how, unmixing=self.unmixing)

    def firing(self, batch: InGramSpace, neurons: int, generator: torch.Generator) -> Bool[Tensor, "n t"]:
        """Exact in law: N(0, G) above each row's own bias."""
        biases = self.spread.biases(neurons, self.batch_size, batch.features).to(batch.test)
        return law(batch.test).sample(neurons, generator) > -biases[:, None]

    def expected(self, batch: InGramSpace, neurons: Sequence[int], generator: torch.Generator) -> tuple[Leakage, ...]:
        """Where rows are scarce, at the best of a few spreads, as a server would choose it."""
        out = []
        for count in neurons:
            tried = (self.spread,) if count >= ROOMY * len(batch.test) else (self.spread, *SCARCE)
            found = [self._expected_at(spread, batch, count, generator) for spread in tried]
            out.append(max(found, key=lambda f: f.recall))
        return tuple(out)

    def _expected_at(self, spread: Spread, batch: InGramSpace, neurons: int, generator: torch.Generator) -> Leakage:
        attack = replace(self, spread=spread, batch_size=max(2, len(batch.test)))
        patterns = [attack.firing(batch, neurons, generator) for _ in range(DRAWN)]
        recall = sum(float(peeled(fired).double().mean()) for fired in patterns) / DRAWN
        return replace(Leakage.mean([leakage(fired) for fired in patterns]), recall=recall)

    def readable(self, fired: Bool[Tensor, "n b"]) -> Bool[Tensor, " b"]:
        """Who is reached by taking samples out of rows one after another; unmixing may add to it."""
        return peeled(fired)


def peeled(fired: Bool[Tensor, "n b"]) -> Bool[Tensor, " b"]:
    """Samples that stand alone in a row once those found before are taken out."""
    left = fired.clone()
    found = torch.zeros(fired.shape[1], dtype=torch.bool, device=fired.device)
    while True:
        alone = (left & (left.sum(1, keepdim=True) == 1)).any(0)
        if not bool(alone.any()):
            return found
        found |= alone
        left[:, alone] = False


def best_spread(batches: Iterable[Float64[Tensor, "b b"]], neurons: int, features: int, seed: int) -> Spread:
    """The spread that reads most of these batches, by their Gram matrices; of equals the one with fewer samples in a row."""
    laws = [(len(matrix), law(matrix)) for matrix in batches]

    def share(spread: Spread) -> float:
        """With all rows, and with some missing: what reads all by luck alone is not the best."""
        total = 0.0
        for (number, (size, known)), part in product(enumerate(laws), PARTS):
            draws = named_generator(seed, "spread", number, part, device=known.factor.device)
            count = round(part * neurons)
            biases = spread.biases(count, size, features).to(known.factor)
            total += float(peeled(known.sample(count, draws) > -biases[:, None]).double().mean())
        return total / len(laws) / len(PARTS)

    tried = [Spread(*setting) for setting in product(LOWEST, HIGHEST, POWERS)]
    return max(tried, key=lambda s: (round(share(s), 3), -s.highest))
