"""Pattern-aware iterative random search: QBI rows redrawn until each isolates a sample of auxiliary data.

The search runs in Gram space: a try costs B numbers instead of a forward pass over N×M weights, and a block of
tries is decided at once. Only what was found is lifted back to weights. `naive_search` in `benchmarks` is the
method it replaces.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qbi.attacks.base import Attack, Knowledge, SampleSource, loaded
from qbi.attacks.gram_space import AuxiliaryGroup, InGramSpace
from qbi.attacks.qbi import QBI
from qbi.attacks.search import BLOCK, search, search_together
from qbi.errors import DataError, require_positive
from qbi.gram import condition, gram, law, laws, lift
from qbi.records import CraftedRows, Leakage

TOGETHER = 2**23
"""Pre-activations held at a time while groups are searched side by side."""


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
    action: ClassVar[str] = "prepares the model with PAIRS"
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

    def limit(self, neurons: int, batch_size: int) -> Leakage:
        """That of the rows it starts from."""
        return self.plain.limit(neurons, batch_size)

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Search group by group, and lift what was found."""
        require_positive(self.name, neurons=neurons, budget_factor=self.budget_factor, patience=self.patience)
        available = len(self.auxiliary)
        if available < neurons:
            raise DataError(
                f"PAIRS: {available} auxiliary samples for {neurons} neurons; it needs one per neuron. "
                "Give more auxiliary data or attack fewer neurons."
            )
        weight = torch.empty(neurons, features, device=generator.device)
        groups = [_Group(samples, count) for samples, count in self.groups(neurons)]
        seeds = torch.randint(2**62, (len(groups),), generator=generator, device=generator.device).tolist()
        draws = [torch.Generator(generator.device).manual_seed(seed) for seed in seeds]
        # Samples that must be loaded are loaded once, a group at a time; those at hand are looked up again.
        together = max(1, TOGETHER // (BLOCK * self.batch_size)) if isinstance(self.auxiliary, Tensor) else 1
        start = 0
        for first in range(0, len(groups), together):
            some = groups[first : first + together]
            self._tune(weight[start:], some, neurons, draws[first : first + together])
            start += sum(group.neurons for group in some)
            if self.progress is not None:
                self.progress(first + len(some), len(groups))
        return CraftedRows(weight, torch.full((neurons,), self.plain.bias(features), device=generator.device))

    def _samples(self, samples: slice, features: int, device: torch.device) -> Float[Tensor, "b m"]:
        x = loaded(self.auxiliary, samples, torch.empty(0, device=device))
        if x.shape[1] != features:
            raise DataError(
                f"PAIRS: auxiliary samples have {x.shape[1]} values, the layer carries {features}; "
                "both must come from the same kind of data."
            )
        return x

    def _tune(
        self, rows: Float[Tensor, "n m"], groups: "list[_Group]", neurons: int, draws: list[torch.Generator]
    ) -> None:
        """Search some groups together, and lift what was found into the first rows."""
        features = rows.shape[1]
        samples = [self._samples(group.samples, features, rows.device) for group in groups]
        known = laws([gram(x) for x in samples])
        budget = self.budget_factor * self.batch_size * neurons
        sizes = [group.neurons for group in groups]
        results = search_together(known, self.plain.bias(features), sizes, budget, self.patience, draws)
        parts = rows[: sum(sizes)].split(sizes)
        for part, x, known_law, result, own in zip(parts, samples, known, results, draws, strict=True):
            tuned = result.found.shape[0]
            lift(x, result.found, known_law, own, out=part[:tuned])
            part[tuned:].normal_(generator=own)

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


@dataclass(frozen=True)
class _Group:
    """Auxiliary samples, and the number of neurons that are tuned on them."""

    samples: slice
    neurons: int
