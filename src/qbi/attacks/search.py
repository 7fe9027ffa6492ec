"""Tries of PAIRS in Gram space: a try costs B numbers instead of a forward pass, and a block of tries is decided at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qbi.errors import BadValue
from qbi.gram import Law

BLOCK = 8192
"""Tries drawn at a time. Part of what the seed means: changing it changes the draws."""


@dataclass(frozen=True)
class Search:
    """What the search of one group found: pre-activations without bias, one row per tuned neuron, and its cost."""

    found: Float[Tensor, "k b"]
    tries: int


def search(known: Law, bias: float, neurons: int, budget: int, patience: int, generator: torch.Generator) -> Search:
    """Find, in order, rows that isolate one sample each, every sample at most once.

    The sequential rules hold exactly although tries are decided a block at a time: a success is the first try that
    isolates a sample, and the search ends before the first gap of more than `patience` tries, after `budget` tries,
    or when neurons or samples run out.
    """
    return search_together([known], bias, [neurons], budget, patience, [generator])[0]


def search_together(
    known: Sequence[Law],
    bias: float,
    neurons: Sequence[int],
    budget: int,
    patience: int,
    draws: Sequence[torch.Generator],
) -> list[Search]:
    """Searches of several groups of the same size, block by block side by side; each goes as it would by itself."""
    if patience < 1 or budget < 1:
        raise BadValue(f"PAIRS: patience is {patience} and budget {budget}; both must be at least 1.")
    hunts = [
        _Hunt(law, own, min(count, law.batch_size), budget, patience)
        for law, own, count in zip(known, draws, neurons, strict=True)
    ]
    while active := [hunt for hunt in hunts if not hunt.over]:
        z = torch.stack([hunt.law.sample(BLOCK, hunt.draws) for hunt in active])
        usable = [hunt.take(first) for hunt, first in zip(active, _first_alone(z > -bias), strict=True)]
        index = np.concatenate([rows + place * BLOCK for place, rows in enumerate(usable)])
        picked = z.flatten(0, 1)[torch.from_numpy(index).to(z.device)]
        for hunt, rows in zip(active, picked.split([len(rows) for rows in usable]), strict=True):
            hunt.found.append(rows)
    return [hunt.result for hunt in hunts]


@dataclass
class _Hunt:
    """Where the search of one group stands."""

    law: Law
    draws: torch.Generator
    wanted: int
    budget: int
    patience: int

    def __post_init__(self) -> None:
        self.found = [torch.empty(0, self.law.batch_size, device=self.law.factor.device)]
        self.taken = np.zeros(self.law.batch_size, dtype=bool)
        self.offset = self.last = self.successes = 0
        self.over = self.wanted == 0

    def take(self, first: np.ndarray) -> np.ndarray:
        """The rows of a block that count, given the first that isolates each sample."""
        first = np.where(self.taken, BLOCK, first)
        order = np.sort(first[first < BLOCK])
        times = order + self.offset + 1
        gaps = np.diff(times, prepend=self.last)
        allowed = (gaps <= self.patience) & (times <= self.budget)
        usable = min(int(allowed.size if allowed.all() else allowed.argmin()), self.wanted - self.successes)
        if usable:
            self.taken |= first <= order[usable - 1]
            self.last = int(times[usable - 1])
            self.successes += usable
        self.offset += BLOCK
        barren = self.offset - self.last >= self.patience
        self.over = self.successes == self.wanted or usable < order.size or barren or self.offset >= self.budget
        return order[:usable]

    @property
    def result(self) -> Search:
        """What was found, and at what cost."""
        complete = self.successes == self.wanted
        return Search(torch.cat(self.found), self.last if complete else min(self.last + self.patience, self.budget))


def _first_alone(fired: Bool[Tensor, "g n b"]) -> np.ndarray:
    """For each sample of each group, the first row of the block that fires for it alone (BLOCK where none does)."""
    alone = fired & (fired.sum(-1, keepdim=True) == 1)
    happens, row = alone.view(torch.uint8).max(1)
    return torch.where(happens > 0, row, BLOCK).cpu().numpy()
