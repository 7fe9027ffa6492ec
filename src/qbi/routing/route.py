"""The sample on its way through a model: which of its values stands where."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from qbi.carrier import Affine, Cause, Change, Shortfall
from qbi.routing.graph import Traced
from qbi.routing.path import tensors


@dataclass(frozen=True)
class Route:
    """The sample on its way: which of its values stands where in one sample's activations, counted from 1; 0 is none."""

    plus: Any
    scale: Any
    offset: Any
    count: int
    shape: tuple[int, ...]
    minus: Any = None
    nonnegative: bool = False
    steps: tuple[Change, ...] = ()
    shortfalls: tuple[Shortfall, ...] = ()
    embedding: str | None = None
    base: float = 0.0
    """What the last normalisation layer was made to add; `offset` counts from there."""
    whole: bool = True
    """Whether the values are still the client's own; after a loss of another kind they are what came out of it."""

    @property
    def present(self) -> int:
        """How many of the sample's values are still there."""
        return sum(_distinct(t) for t in tensors(self.plus))

    def lose(self, label: str, place: str, cause: Cause, reason: str) -> "Route":
        """The same, with a loss noted."""
        return replace(self, shortfalls=(*self.shortfalls, Shortfall(label, cause, reason, place)))


def _distinct(places: Tensor) -> int:
    """How many different numbers above zero there are."""
    found = places[places > 0]
    seen = torch.zeros(int(found.max()) + 1 if len(found) else 0, dtype=torch.bool, device=places.device)
    seen[found] = True
    return int(seen.sum())


@dataclass(frozen=True)
class Way:
    """The nodes to pass, and what is needed to look at them."""

    traced: Traced
    nodes: Sequence[fx.Node]
    shift: float
    moved: set[fx.Node] = field(repr=False)

    @property
    def layers(self) -> list[str]:
        """The names of the modules on the way."""
        return [str(n.target) for n in self.nodes if n.op == "call_module"]


def fresh(shape: tuple[int, ...]) -> Route:
    """A sample of which every value stands in its own place."""
    count = math.prod(shape)
    plus = torch.arange(1, count + 1).reshape(shape)
    return Route(plus, torch.ones(shape), torch.zeros(shape), count, shape)


def first_places(plus: Tensor, count: int) -> Tensor:
    """The first position of each of the sample's values; −1 for those that are lost."""
    held = plus.flatten()
    places = torch.full((count + 1,), -1)
    used = (held > 0).nonzero()[:, 0].flip(0)
    places[held[used]] = used
    return places[1:]


def noted(affine: Affine) -> tuple[Affine, ...]:
    """The step, if it is one."""
    return () if bool((affine.scale == 1).all()) and bool((affine.offset == 0).all()) else (affine,)
