"""Norms and sums of samples' gradients that are never formed: from products of inputs and of backprops, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qbi.uses import Use
from qbi.uses.kinds import Convolution, LookUp, Pairs

TERMS = 2**17
"""Products in one float64 sum."""

MOST_SAMPLES = 128
"""Samples in one float64 sum."""

GUARD = 1e-5
"""Of the sizes of all products, added to a norm that comes from products."""


@dataclass(frozen=True)
class Returned:
    """A use with what came back to it, in float32, samples first; a look-up's input stays whole numbers."""

    use: Use
    given: Tensor
    back: Tensor


def returned(use: Use, back: Tensor) -> Returned:
    """A use and its backprop, ready for arithmetic."""
    given = use.given if isinstance(use.kind, LookUp) else use.given.float()
    return Returned(use, given, back.detach().movedim(use.axis, 0).float())


def product_squares(part: Returned) -> Tensor:
    """Squared norms of weights' gradients, and what rounding could hide of them."""
    if isinstance(part.use.kind, LookUp):
        return torch.cat([_looked_up_squares(part.use.kind, g, b) for g, b in _by_samples(part)])
    kind = part.use.kind
    assert isinstance(kind, Pairs | Convolution)
    if kind.positions(part.back) == 1 and isinstance(kind, Pairs):
        a, b = kind.pairs(part.given, part.back)
        return a.double().square().sum((1, 2, 3)) * b.double().square().sum((1, 2, 3))
    out = []
    for given, back in _by_samples(part):
        a, b = (v.double() for v in kind.pairs(given, back))
        exact = ((a @ a.mT) * (b @ b.mT)).sum((1, 2, 3)).clamp_min(0)
        sizes = (a.square().sum(3).sqrt() * b.square().sum(3).sqrt()).sum((1, 2))
        out.append((exact.sqrt() + GUARD * sizes).square())
    return torch.cat(out)


def _looked_up_squares(kind: LookUp, given: Tensor, back: Tensor) -> Tensor:
    """What came back to the same row adds up; rows apart from each other do not."""
    index, rows = kind.flat(given, back)
    rows = rows.double()
    same = index[:, :, None] == index[:, None, :]
    exact = ((rows @ rows.mT) * same).sum((1, 2)).clamp_min(0)
    sizes = rows.square().sum(2).sqrt().sum(1)
    return (exact.sqrt() + GUARD * sizes).square()


def _by_samples(part: Returned) -> Sequence[tuple[Tensor, Tensor]]:
    """A use a number of samples at a time, so that nothing large is held and float64 sums stay short."""
    kind = part.use.kind
    positions = kind.positions(part.back) if isinstance(kind, Pairs | Convolution) else part.given[0].numel()
    each = max(1, min(MOST_SAMPLES, TERMS // max(1, positions)))
    return list(zip(part.given.split(each), part.back.split(each), strict=True))


def add_products(total: Tensor, part: Returned, weights: Tensor) -> None:
    """total += Σ wᵢ·gᵢ, one product in float64."""
    kind, start = part.use.kind, 0
    for given, back in _by_samples(part):
        w = weights[start : start + len(back)]
        start += len(back)
        if isinstance(kind, LookUp):
            index, rows = kind.flat(given, back)
            total.index_add_(0, index.reshape(-1), (rows.double() * w[:, None, None]).flatten(0, 1))
            continue
        assert isinstance(kind, Pairs | Convolution)
        a, b = kind.pairs(given, back)
        scaled = b.double() * w[:, None, None, None]
        # groups: (T·m, o)ᵀ · (T·m, i)
        left, right = scaled.transpose(0, 1).flatten(1, 2), a.transpose(0, 1).flatten(1, 2).double()
        total.view(len(left), left.shape[2], right.shape[2]).baddbmm_(left.mT, right)
