"""Batches and auxiliary samples as their inner products."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float64
from torch import Tensor


@dataclass(frozen=True)
class AuxiliaryGroup:
    """Auxiliary samples in Gram space: among themselves, and the test samples with them."""

    auxiliary: Float64[Tensor, "a a"]
    cross: Float64[Tensor, "t a"]


@dataclass(frozen=True)
class InGramSpace:
    """A batch as its inner products: all that the law of an attack's activations needs.

    `sums` are the sums of each sample's values, for attacks whose rows do not average to zero; `group` gives auxiliary samples.
    """

    test: Float64[Tensor, "t t"]
    features: int
    sums: Float64[Tensor, " t"] | None = None
    group: Callable[[slice], AuxiliaryGroup] | None = None
