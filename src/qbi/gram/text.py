"""Gram matrices of embedded texts, without ever forming the embedded texts."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

POSITIONS = 16
"""Token positions multiplied in float32 before they are added up in float64."""


def embedded_gram(
    a: Int[Tensor, "a t"], b: Int[Tensor, "b t"], table: Float[Tensor, "v d"], other: Float[Tensor, "v d"] | None = None
) -> Float64[Tensor, "a b"]:
    """Inner products of embedded texts, a few positions at a time: never the whole a×(t·d) matrix.

    With `other`, the second texts are embedded by that table.
    """
    second = table if other is None else other
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=table.device)
    for start in range(0, a.shape[1], POSITIONS):
        left = table[a[:, start : start + POSITIONS]].flatten(1)
        right = left if a is b and other is None else second[b[:, start : start + POSITIONS]].flatten(1)
        total += left @ right.T
    return total


def embedded_sums(tokens: Int[Tensor, "a t"], table: Float[Tensor, "v d"]) -> Float64[Tensor, " a"]:
    """The sum of each embedded text's values."""
    return table.double().sum(1)[tokens].sum(1)
