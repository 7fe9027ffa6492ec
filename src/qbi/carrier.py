"""How a client's sample stands in the input of the attacked layer, after the layers before it.

A prefix that was turned into the identity leaves the sample in the first features of the layer's input, possibly
as two halves (positive and negative part, to pass a ReLU), shifted, or normalised. A `Carrier` records which, so
that rows can be written for the sample and samples read back from the features.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.records import CraftedRows


@dataclass(frozen=True)
class Shift:
    """A constant was added, so that a ReLU lets everything pass."""

    value: float


@dataclass(frozen=True)
class Normalised:
    """A normalisation layer acted on the sample; the name says which."""

    layer: str


Step = Shift | Normalised


@dataclass(frozen=True)
class Carrier:
    """Where the sample stands in the layer's `width` input features, and the steps it went through."""

    shape: tuple[int, ...]
    width: int
    paired: bool = False
    steps: tuple[Step, ...] = ()
    offset: float = 0.0
    """The constant that stands on the sample's features when they reach the layer."""
    embedding: str | None = None
    """The embedding layer after which the sample begins, for text."""

    @property
    def features(self) -> int:
        """The number of values in one sample, M."""
        return math.prod(self.shape)

    def read(self, inputs: Float[Tensor, "k w"]) -> Float[Tensor, "k m"]:
        """Take the sample out of the layer's input features; its steps are not undone here."""
        sample = inputs[:, : self.features]
        return sample - inputs[:, self.features : 2 * self.features] if self.paired else sample

    def spread(self, rows: CraftedRows) -> CraftedRows:
        """Write rows meant for the sample as rows of the layer: same pre-activations, whatever carries it."""
        bias = rows.bias - self.offset * rows.weight.sum(1) if self.offset else rows.bias
        if self.width == self.features:
            return CraftedRows(weight=rows.weight, bias=bias)
        weight = rows.weight.new_zeros(rows.weight.shape[0], self.width)
        weight[:, : self.features] = rows.weight
        if self.paired:
            weight[:, self.features : 2 * self.features] = -rows.weight
        return CraftedRows(weight=weight, bias=bias)


def describe(steps: tuple[Step, ...]) -> str:
    """The steps in words, for reports."""
    words = [f"shifted by {s.value:g}" if isinstance(s, Shift) else f"normalised by {s.layer}" for s in steps]
    return ", ".join(words) or "unchanged"


def flat(samples: Tensor) -> Tensor:
    """One row a sample."""
    return torch.flatten(samples, 1)
