"""Trap weights (Boenisch et al.), the paper's baseline: rows that lean slightly to the negative."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from qbi.attacks.base import Attack, Knowledge, loaded
from qbi.attacks.gram_space import InGramSpace
from qbi.attacks.input_range import InputRange
from qbi.errors import BadValue, DataError, require_positive
from qbi.exposure.pattern import leakage
from qbi.gram import gram, law
from qbi.randomness import generator as named_generator
from qbi.records import CraftedRows, Leakage

ROWS_AT_A_TIME = 2**24
"""Entries permuted at a time, which bounds the memory beside the weights."""

SCALE_GAPS = tuple(0.4 * 0.75**k for k in range(28))
"""Tried values of 1 − scale: from 0.4 down to 0.0002, a quarter less each time."""

TUNING_BATCHES = 4
"""Auxiliary batches on which the scale is chosen."""


@dataclass(frozen=True)
class TrapWeights(Attack):
    """A random half of each row is negative normal; the other half mirrors it, scaled to weigh slightly less.

    Meant for inputs in [0, 1], where a sum that leans to the negative fires rarely. An odd number of features
    leaves one more negative entry. The bias is zero. Which scale is best depends on the data: `prepare` chooses it on
    auxiliary samples.

    >>> from qbi.randomness import generator
    >>> rows = TrapWeights(scale=0.97).rows(4, 10, generator(0))
    >>> (rows.weight < 0).sum(1).tolist(), rows.bias.tolist()
    ([5, 5, 5, 5], [0.0, 0.0, 0.0, 0.0])
    """

    key: ClassVar[str] = "trap-weights"
    name: ClassVar[str] = "trap weights"
    action: ClassVar[str] = "prepares the model with trap weights"
    domain: ClassVar[InputRange] = InputRange.UNIT
    has_law: ClassVar[bool] = True

    scale: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.scale < 1:
            raise BadValue(f"trap weights: scale is {self.scale}; it must lie strictly between 0 and 1.")

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "TrapWeights":
        """At the scale the user wants, or the one that reads most of auxiliary batches."""
        wanted = knowledge.settings.get("trap_scale")
        if wanted is not None:
            return cls(wanted)
        source, size = knowledge.auxiliary, knowledge.batch_size
        batches = 0 if source is None else min(TUNING_BATCHES, len(source) // size)
        if source is None or batches == 0:
            return cls()
        x = loaded(source, slice(0, batches * size), torch.empty(0))
        domain = InGramSpace(gram(x), x.shape[1], x.double().sum(1))
        return cls(
            best_scale(domain, knowledge.neurons, size, lambda gap: named_generator(knowledge.seed, "trap scale", gap))
        )

    @classmethod
    def auxiliary_useful(cls, knowledge: Knowledge) -> int:
        """A few batches to choose the scale on."""
        return TUNING_BATCHES * knowledge.batch_size

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Draw magnitudes, mirror them, and scatter both halves over the row at random."""
        require_positive(self.name, neurons=neurons, features=features)
        weight = torch.empty(neurons, features, device=generator.device)
        half = (features + 1) // 2
        block = max(1, ROWS_AT_A_TIME // features)
        for start in range(0, neurons, block):
            rows = weight[start : start + block]
            negative = torch.randn(rows.shape[0], half, generator=generator, device=rows.device).abs_().neg_()
            mirrored = negative[:, : features - half] * -self.scale
            keys = torch.rand(rows.shape, generator=generator, device=rows.device)
            rows.scatter_(1, keys.argsort(1), torch.cat([negative, mirrored], 1))
        return CraftedRows(weight=weight, bias=torch.zeros(neurons, device=generator.device))

    def firing(self, batch: InGramSpace, neurons: int, generator: torch.Generator) -> Bool[Tensor, "n t"]:
        """By the central limit over a row's M entries.

        They are exchangeable: half of them −m with m = |N(0,1)|, half scale·m in the same magnitudes. That fixes their
        mean, variance v and covariance c, so that z ~ N(mean·s, (v − c)·G + c·ssᵀ) with s the samples' sums.
        """
        features, scale, sums = batch.features, self.scale, batch.sums
        if features < 2 or sums is None:
            raise DataError(f"trap weights: {features} features; their law needs two and the samples' sums.")
        mean_abs, second = math.sqrt(2 / math.pi), 1.0
        negative = (features + 1) // 2
        mirrored = features - negative
        mean = (scale * mirrored - negative) * mean_abs / features
        variance = (negative + scale**2 * mirrored) * second / features - mean**2
        # The row's sum is −(1 − scale)·Σm over mirrored magnitudes, less the unmatched entry of odd rows.
        sum_variance = ((1 - scale) ** 2 * mirrored + (negative - mirrored)) * (second - mean_abs**2)
        covariance = (sum_variance / features - variance) / (features - 1)
        centred = law((variance - covariance) * batch.test + covariance * torch.outer(sums, sums))
        return centred.sample(neurons, generator) > -(mean * sums).float()


def best_scale(domain: InGramSpace, neurons: int, batch_size: int, draws: Callable[[float], torch.Generator]) -> float:
    """The scale with the highest R on auxiliary batches: what an attacker with such data would choose.

    `domain` holds a whole number of batches; `draws` gives the random numbers for one tried value.
    """
    batches = torch.arange(len(domain.test) // batch_size * batch_size).reshape(-1, batch_size)

    def recall(gap: float) -> float:
        fired = TrapWeights(1 - gap).firing(domain, neurons, draws(gap))
        return Leakage.mean([leakage(fired[:, columns]) for columns in batches]).recall

    return 1 - max(SCALE_GAPS, key=recall)
