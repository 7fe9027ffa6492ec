"""Sites and uses as records."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Site:
    """One linear map of a model: where its rows stand in a trained parameter, and where their biases stand."""

    weight: str
    rows: Tensor = field(repr=False)
    """(neurons, width): places in the flat parameter."""
    bias: str | None = None
    bias_rows: Tensor | None = field(default=None, repr=False)
    group: int = 0
    groups: int = 1
    """Which of how many maps this parameter is made of."""
    calls: int = 1
    """How often it is used in one pass."""

    @property
    def name(self) -> str:
        """As reports call it."""
        name = self.weight.removesuffix(".weight")
        return f"{name}[{self.group}]" if self.groups > 1 else name

    def is_at(self, name: str, rows: Tensor) -> bool:
        """Whether a use is one of this map."""
        return name == self.weight and rows.shape == self.rows.shape and torch.equal(rows, self.rows)


@dataclass(frozen=True)
class Uses:
    """What a model does with its trained parameters."""

    sites: tuple[Site, ...]
    others: Mapping[str, tuple[str, ...]]
    """For each trained parameter, the names of its uses that are no linear maps."""
    trained: tuple[str, ...]

    def of(self, name: str) -> tuple[Site, ...]:
        """The linear maps that a parameter is part of, as weight or as bias."""
        return tuple(s for s in self.sites if name in (s.weight, s.bias))
