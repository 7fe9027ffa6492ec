"""How a client's sample stands in the input of the attacked layer, after the layers before it.

A prefix that was turned into the identity leaves every value of the sample in one of the layer's input features,
possibly in two (positive and negative part, to pass a ReLU), shifted, scaled or normalised. A `Carrier` records which,
so that rows can be written for the sample and samples read back from the features. Where the way loses something (pooling,
dropout, too few channels), it says what, and the "sample" is what remains.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.records import CraftedRows


@dataclass(frozen=True)
class Affine:
    """Known numbers stand on the sample: value = scale·sample + offset, one pair a value or one for all."""

    scale: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Normalised:
    """A normalisation layer acted on the sample; `channel` says which of its statistics each value met.

    `positions` is the number of values behind one statistic in one sample; `offset` is what the layer was made to add.
    """

    layer: str
    channel: Int[Tensor, " m"]
    positions: int = 1
    offset: float = 0.0


Change = Affine | Normalised


class Cause(Enum):
    """Why something of a sample does not arrive."""

    POOLING = "pooling"
    DROPOUT = "dropout"
    CUT = "cut"
    SQUASHED = "squashed"
    NARROW = "narrow"
    STRIDE = "stride"
    NORMALISED = "normalised"
    POSITIONS = "positions"
    SHIFT = "shift"
    """Values lie below the shift that was to carry them past a ReLU: a larger one may do."""


@dataclass(frozen=True)
class Shortfall:
    """A layer at which something of the sample is lost: where, why, and the sentence that says it."""

    label: str
    cause: Cause
    reason: str
    place: str = ""
    """The layer's path in the model."""

    @property
    def approximate(self) -> bool:
        """Whether the values still come back, up to public statistics of the domain."""
        return self.cause is Cause.NORMALISED

    def __str__(self) -> str:
        return f"{self.label} {self.reason}"


@dataclass(frozen=True)
class NormBehind:
    """A batch norm that a layer's products go into, alone or beside other channels."""

    layer: str
    start: int = 0
    """The first of its channels that are the layer's rows."""
    others: tuple[tuple[str, int], ...] = ()
    """Further norms that see the same products, and where: a server puts their scale to zero there."""

    def channels(self, rows: int) -> slice:
        """Where the layer's rows stand in the norm."""
        return slice(self.start, self.start + rows)


@dataclass(frozen=True)
class Carrier:
    """Where the sample stands in the layer's `width` input features, and the steps it went through."""

    shape: tuple[int, ...]
    width: int
    columns: Int[Tensor, " m"] | None = None
    """The feature that holds each value; the first ones in order, if not given."""
    negative: Int[Tensor, " m"] | None = None
    """The feature that holds each value's negative part, where the sample comes in two halves."""
    steps: tuple[Change, ...] = ()
    embedding: str | None = None
    """The embedding layer after which the sample begins, for text."""
    shortfalls: tuple[Shortfall, ...] = ()
    places: Int[Tensor, "..."] | None = field(default=None, repr=False)
    """Where each carried value stands in the client's flattened sample, one row a position; None if not known any more."""
    centre: float = 0.0
    spread_of_values: float = 1.0
    """Public statistics of what arrives: rows are written for (value − centre)/spread. Reading does not need them."""
    source: int = 0
    """Which of the model's inputs the sample is."""
    tokens: int = 1
    """How many vectors of one sample the layer sees one by one; 1 where it sees the sample whole."""

    reference: Float[Tensor, " w"] | None = field(default=None, repr=False)
    """Where the layer has no bias: a combination of its inputs that is about one for every sample, and stands in for it."""
    norm: NormBehind | None = None
    """A batch norm right behind the layer, of which only the subtraction of the mean is left: values are those minus the batch's mean."""
    senders: Int[Tensor, " t"] | None = field(default=None, repr=False)
    """Which of the positions that the layer sees of a sample send gradients; all, if not given."""

    @property
    def features(self) -> int:
        """The number of values carried of one sample, M; of one position where the layer sees them one by one."""
        return math.prod(self.shape) if self.columns is None else len(self.columns)

    @property
    def exact(self) -> bool:
        """Whether nothing is lost on the way."""
        return not self.shortfalls

    @property
    def is_plain(self) -> bool:
        """Whether what arrives is the sample itself, every value in its place."""
        in_place = self.columns is None or torch.equal(self.columns.cpu(), torch.arange(self.width))
        changed = self.steps or self.shortfalls or self.embedding or self.norm or self.tokens != 1
        return in_place and self.negative is None and self.reference is None and not changed

    def read(self, inputs: Float[Tensor, "k w"]) -> Float[Tensor, "k m"]:
        """Pick the sample out of the layer's input features; its steps are not undone here."""
        if self.columns is None:
            return inputs[:, : self.features]
        sample = inputs[:, self.columns.to(inputs.device)]
        return sample if self.negative is None else sample - inputs[:, self.negative.to(inputs.device)]

    @property
    def standing(self) -> Affine:
        """What stands on the sample when it reaches the layer, since it was last normalised."""
        scale, offset, steps = torch.ones(1), torch.zeros(1), list(self.steps)
        if steps and isinstance(last := steps[-1], Affine):
            scale, offset = last.scale, last.offset
            steps.pop()
        if steps and isinstance(norm := steps[-1], Normalised):
            offset = offset + scale * norm.offset
        return Affine(scale * self.spread_of_values, offset + scale * self.centre)

    def arrived(self, inputs: Float[Tensor, "k w"]) -> Float[Tensor, "k m"]:
        """What the rows see of the sample: the values with the numbers that stand on them taken off."""
        values, known = self.read(inputs), self.standing
        return (values - known.offset.to(values)) / known.scale.to(values)

    def spread(self, rows: CraftedRows) -> CraftedRows:
        """Write rows meant for the sample as rows of the layer: same pre-activations, whatever carries it."""
        weight, bias, known = rows.weight, rows.bias, self.standing
        if bool((known.scale != 1).any()):
            weight = weight / known.scale.to(weight)
        if bool((known.offset != 0).any()):
            bias = bias - (weight * known.offset.to(weight)).sum(1)
        if self.columns is None:
            return self._without_bias(CraftedRows(weight=weight, bias=bias))
        out = weight.new_zeros(weight.shape[0], self.width)
        out[:, self.columns.to(out.device)] = weight
        if self.negative is not None:
            out[:, self.negative.to(out.device)] = -weight
        return self._without_bias(CraftedRows(weight=out, bias=bias))

    def _without_bias(self, rows: CraftedRows) -> CraftedRows:
        """The same rows where there is no bias to set: the reference takes its place."""
        if self.reference is None:
            return rows
        weight = rows.weight + rows.bias[:, None] * self.reference.to(rows.weight)
        return CraftedRows(weight=weight, bias=torch.zeros_like(rows.bias))


def flat(samples: Tensor) -> Tensor:
    """One row per sample."""
    return torch.flatten(samples, 1)
