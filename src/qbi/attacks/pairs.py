"""Pattern-aware iterative random search: QBI rows redrawn until each isolates a sample of auxiliary data.

The search runs in Gram space: a try costs B numbers instead of a forward pass over N×M weights, and a block of
tries is decided at once. Only what was found is lifted back to weights. `naive_search` in `benchmarks` is the
method it replaces.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qbi.attacks.base import Attack, AuxiliaryGroup, InGramSpace, Knowledge, SampleSource, loaded
from qbi.attacks.qbi import QBI
from qbi.errors import BadValue, DataError, require_positive
from qbi.exposure.pattern import isolation
from qbi.gram import Law, condition, gram, law, lift
from qbi.records import CraftedRows

BLOCK = 8192
"""Tries drawn at a time. Part of what the seed means: changing it changes the draws."""


@dataclass(frozen=True)
class Search:
    """What the search of one group found: pre-activations without bias, one row a tuned neuron, and its cost."""

    found: Float[Tensor, "k b"]
    tries: int


@dataclass(frozen=True)
class PAIRS(Attack):
    """Algorithm 1 with errata 6 and 7.

    Neurons are tuned in groups of B on groups of B auxiliary samples. A neuron's row is redrawn until it isolates
    a sample that no earlier neuron of the group took. A group shares a budget of `budget_factor`·B·N tries and is
    abandoned after `patience` tries in a row without success; neurons not reached keep a plain QBI row.

    >>> from qbi.randomness import generator
    >>> domain = torch.randn(40, 64, generator=generator(0))
    >>> PAIRS(batch_size=8, auxiliary=domain).rows(40, 64, generator(1)).weight.shape
    torch.Size([40, 64])
    """

    key: ClassVar[str] = "pairs"
    name: ClassVar[str] = "PAIRS"
    deed: ClassVar[str] = "prepares the model with PAIRS"
    calibrated_at: ClassVar[tuple[int, ...]] = (20, 64)
    has_law: ClassVar[bool] = True

    batch_size: int
    auxiliary: SampleSource
    budget_factor: int = 5
    patience: int = 2000
    exact: bool = False
    progress: Callable[[int, int], None] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "PAIRS":
        """Tuned with samples of the domain, one for each neuron."""
        if knowledge.auxiliary is None:
            raise DataError("PAIRS: it tunes its rows with auxiliary data of the domain; give some (--aux).")
        return cls(knowledge.batch_size, knowledge.auxiliary)

    @classmethod
    def auxiliary_needed(cls, knowledge: Knowledge) -> int:
        """One sample for each neuron."""
        return knowledge.neurons

    @classmethod
    def auxiliary_useful(cls, knowledge: Knowledge) -> int:
        """Whole groups of B samples, also for a last group of fewer neurons."""
        return -(-knowledge.neurons // knowledge.batch_size) * knowledge.batch_size

    def groups(self, neurons: int) -> Iterator[tuple[slice, int]]:
        """The auxiliary samples of each group, always B of them, and the number of neurons tuned on them (Algorithm 1)."""
        available = len(self.auxiliary)
        for start in range(0, neurons, self.batch_size):
            end = min(start + self.batch_size, available)
            yield slice(max(0, end - self.batch_size), end), min(self.batch_size, neurons - start)

    @property
    def plain(self) -> QBI:
        """The attack whose rows are tuned."""
        return QBI(self.batch_size, exact=self.exact)

    def limit(self, neurons: int, batch_size: int) -> dict[str, float]:
        """That of the rows it starts from."""
        return self.plain.limit(neurons, batch_size)

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Search group by group, and lift what was found."""
        require_positive(self.name, neurons=neurons, budget_factor=self.budget_factor, patience=self.patience)
        available = len(self.auxiliary)
        if available < neurons:
            raise DataError(
                f"PAIRS: {available} auxiliary samples for {neurons} neurons; it needs one a neuron. "
                "Give more auxiliary data or attack fewer neurons."
            )
        bias = self.plain.bias(features)
        weight = torch.empty(neurons, features, device=generator.device)
        groups = list(self.groups(neurons))
        start = 0
        for number, (samples, count) in enumerate(groups):
            x = self._group(samples, features, generator.device)
            self._tune(weight[start : start + count], x, bias, neurons, generator)
            start += count
            if self.progress is not None:
                self.progress(number + 1, len(groups))
        return CraftedRows(weight, torch.full((neurons,), bias, device=generator.device))

    def _group(self, samples: slice, features: int, device: torch.device) -> Float[Tensor, "b m"]:
        x = loaded(self.auxiliary, samples, torch.empty(0, device=device))
        if x.shape[1] != features:
            raise DataError(
                f"PAIRS: auxiliary samples have {x.shape[1]} values, the layer carries {features}; "
                "both must come from the same kind of data."
            )
        return x

    def _tune(
        self,
        rows: Float[Tensor, "n m"],
        x: Float[Tensor, "b m"],
        bias: float,
        neurons: int,
        generator: torch.Generator,
    ) -> None:
        known = law(gram(x))
        budget = self.budget_factor * self.batch_size * neurons
        found = search(known, bias, rows.shape[0], budget, self.patience, generator).found
        tuned = found.shape[0]
        lift(x, found, known, generator, out=rows[:tuned])
        rows[tuned:].normal_(generator=generator)

    def firing(self, batch: InGramSpace, neurons: int, generator: torch.Generator) -> Bool[Tensor, "n t"]:
        """Tuned rows by the conditional law, unreached rows by the plain one."""
        if batch.group is None:
            raise DataError("PAIRS: its law needs the inner products of the auxiliary data too.")
        bias, untuned = self.plain.bias(batch.features), law(batch.test)
        budget = self.budget_factor * self.batch_size * neurons
        patterns = []
        for samples, count in self.groups(neurons):
            group = batch.group(samples)
            known = law(group.auxiliary)
            found = search(known, bias, count, budget, self.patience, generator).found
            tuned = condition(batch.test, group.cross, known).sample(found, generator)
            plain = untuned.sample(count - len(found), generator)
            patterns.append(torch.cat([tuned, plain]) > -bias)
        return torch.cat(patterns)

    def in_gram_space(self, x: Float[Tensor, "b m"]) -> InGramSpace:
        """With the inner products of its auxiliary samples."""

        def group(rows: slice) -> AuxiliaryGroup:
            others = loaded(self.auxiliary, rows, x)
            return AuxiliaryGroup(auxiliary=gram(others), cross=gram(x.float(), others))

        return InGramSpace(gram(x), x.shape[1], group=group)


def search(known: Law, bias: float, neurons: int, budget: int, patience: int, generator: torch.Generator) -> Search:
    """Find, in order, rows that isolate one sample each, every sample at most once.

    The sequential rules hold exactly although tries are decided a block at a time: a success is the first try that
    isolates a sample, and the search ends before the first gap of more than `patience` tries, after `budget` tries,
    or when neurons or samples run out.
    """
    if patience < 1 or budget < 1:
        raise BadValue(f"PAIRS: patience is {patience} and budget {budget}; both must be at least 1.")
    wanted = min(neurons, known.batch_size)
    taken = torch.zeros(known.batch_size, dtype=torch.bool, device=known.factor.device)
    found: list[Tensor] = []
    offset = last = successes = 0
    while successes < wanted:
        z = known.sample(BLOCK, generator)
        first = _first_successes(z > -bias, taken)
        order = np.sort(first[first < BLOCK])
        times = order + offset + 1
        gaps = np.diff(times, prepend=last)
        allowed = (gaps <= patience) & (times <= budget)
        usable = int(allowed.size if allowed.all() else allowed.argmin())
        usable = min(usable, wanted - successes)
        if usable:
            index = torch.from_numpy(order[:usable]).to(z.device)
            found.append(z[index])
            taken |= (found[-1] > -bias).any(0)
            last = int(times[usable - 1])
            successes += usable
        offset += BLOCK
        if usable < order.size or offset - last >= patience or offset >= budget:
            break
    tries = last if successes == wanted else min(last + patience, budget)
    empty = torch.empty(0, known.batch_size, device=known.factor.device)
    return Search(found=torch.cat(found) if found else empty, tries=tries)


def _first_successes(fired: Tensor, taken: Tensor) -> np.ndarray:
    """For each sample not yet taken, the first row of the block that isolates it (BLOCK where none does)."""
    isolated = isolation(fired)
    rows = torch.arange(fired.shape[0], device=fired.device)
    useful = isolated.isolates & ~taken[isolated.sample]
    first = torch.full((fired.shape[1],), BLOCK, device=fired.device)
    first.scatter_reduce_(0, isolated.sample, torch.where(useful, rows, BLOCK), "amin")
    return first.cpu().numpy()
