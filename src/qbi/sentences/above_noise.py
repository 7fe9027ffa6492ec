"""What stands above the noise of a gradient that is not exact: its directions, and the tokens of its tables."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.candidates import AT_ONCE
from qbi.sentences.span import Span, right_vectors

GAP = 4.0
"""How many times longer the least gradient of a token that is there must be than the largest of one that is not."""

CLOSE = 1.5
"""Distances up to this many times what the noise explains are none: it is measured, and spread over hundreds of dimensions."""


def rough_span(gradient: Float[Tensor, "n d"], most: int | None = None) -> Span:
    """The directions of a gradient that stand above its noise, which all its values have alike.

    Args:
        gradient: a row for each neuron.
        most: directions that there can be; with more above the noise, nothing is told.
    """
    count, width = gradient.shape
    values, right = right_vectors(gradient.double())
    rank = int((values > _threshold(values, count, width)).sum())
    if rank == 0:
        raise CannotRead("the gradient is no more than its noise.")
    if rank >= min(count, width) or (most is not None and rank > most):
        raise CannotRead(f"{rank} directions of the gradient stand above its noise, more than tell anything.")
    noise = math.sqrt(float(values[rank:].square().sum()) / ((count - rank) * (width - rank)))
    basis = right[:rank].T.contiguous().float()
    return Span(rank, width, noise, torch.ones_like(basis[:, 0]), basis, (1 / values[:rank]).float(), CLOSE)


@dataclass(frozen=True)
class Whitened:
    """A gradient's directions, each by how little it stands above the noise: one where it does not."""

    rank: int
    directions: Float[Tensor, "d m"] = field(repr=False)

    @classmethod
    def of(cls, gradient: Float[Tensor, "n d"]) -> "Whitened":
        """By its singular values."""
        values, right = right_vectors(gradient.double())
        limit = _threshold(values, *gradient.shape)
        weights = (limit / values.clamp_min(1e-300)).clamp(max=1.0)
        return cls(int((values > limit).sum()), (right.T * weights).float())

    def distances(self, vectors: Float[Tensor, "*k d"]) -> Float[Tensor, "*k"]:
        """Of each vector, were its length one."""
        far: Tensor = (vectors @ self.directions).norm(dim=-1) / vectors.norm(dim=-1).clamp_min(1e-30)
        return far


def _threshold(values: Float[Tensor, " m"], count: int, width: int) -> float:
    """Below it singular values are noise, which all entries have alike (Gavish and Donoho, arXiv 1305.5870: its polynomial for noise of unknown size)."""
    beta = min(count, width) / max(count, width)
    return (0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43) * float(values.median())


def tokens_of_tables(gradients: Mapping[str, Tensor], vocabulary: int, most: int) -> Int[Tensor, " v"] | None:
    """Tokens whose row, or column, of a trained table got a gradient; None where no table says so.

    Adapters of tables say the same, and so does the head of a language model, of the tokens that are foretold.
    """
    for gradient in gradients.values():
        if gradient.dim() != 2 or vocabulary not in gradient.shape:
            continue
        sizes = (gradient if len(gradient) == vocabulary else gradient.T).double().norm(dim=1)
        ranked, order = sizes.sort(descending=True)
        ahead, behind = ranked[:most], ranked[1 : most + 1]
        gaps = ahead[: len(behind)] / behind.clamp_min(1e-300)
        if not len(gaps) or float(ranked[0]) == 0:
            continue
        last = int(gaps.argmax())
        if float(gaps[last]) >= GAP:
            found: Tensor = order[: last + 1].sort().values
            return found
    return None


def nearest_tokens_at(
    arrivals: Arrivals, group: MapGroup, span: Span, vocabulary: int, positions: int, most: int
) -> Bool[Tensor, "v t"]:
    """For every position the tokens whose vectors lie nearest to the span."""
    rows = max(1, AT_ONCE // positions)
    parts = torch.arange(vocabulary, device=span.basis.device).split(rows)
    far = torch.cat([span.distances(arrivals.at(group, part[:, None].expand(-1, positions))) for part in parts])
    nearest = far.topk(min(most, vocabulary), dim=0, largest=False).indices
    return torch.zeros_like(far, dtype=torch.bool).scatter_(0, nearest, True)
