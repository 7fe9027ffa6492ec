"""A use of a weight as a linear map on vectors: its rows, the vectors that meet them, and where the products go."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qbi.uses.kinds import Adjoint, Convolution, Kind, Pairs, convolve_back


@dataclass(frozen=True)
class LinearView:
    """One linear map inside an operation; a convolution in groups has one for each of them."""

    rows: Callable[[Tensor], Tensor]
    """From the weight's shape to (neurons, width)."""
    columns: Callable[[Tensor], Tensor]
    """From the operation's input to (…, width), samples first."""
    put: Callable[[Tensor, Tensor], Tensor]
    """The operation's output with these products (…, neurons) in their place."""
    takes_bias: bool = True
    """Whether a bias stands on each row; else it is added behind."""
    bias: slice = field(default_factory=lambda: slice(None))
    """Which entries of the operation's bias are those of the rows."""


def linear_views(kind: Kind) -> list[LinearView]:
    """Every linear map in a use; none where it is no such thing."""
    if isinstance(kind, Pairs):
        turned = kind.transposed
        return [LinearView(lambda w: w.T if turned else w, lambda x: x, lambda _out, products: products)]
    if isinstance(kind, Convolution):
        return [_of_group(kind, number) for number in range(kind.groups)]
    if isinstance(kind, Adjoint) and kind.forward.groups == 1:
        return [_of_adjoint(kind)]
    return []


def _of_group(kind: Convolution, number: int) -> LinearView:
    sides, each = len(kind.stride), kind.shape[0] // kind.groups

    def columns(given: Tensor) -> Tensor:
        patches: Tensor = kind.patches(given.reshape(-1, *given.shape[-sides - 1 :]))[:, number]
        return patches.mT

    def put(out: Tensor, products: Tensor) -> Tensor:
        own = products.mT.contiguous().reshape(*out.shape[: -sides - 1], each, *out.shape[-sides:])
        if kind.groups == 1:
            return own
        parts = list(out.split(each, dim=-sides - 1))
        parts[number] = own
        return torch.cat(parts, dim=-sides - 1)

    return LinearView(
        lambda w: w[number * each : (number + 1) * each].flatten(1),
        columns,
        put,
        bias=slice(number * each, (number + 1) * each),
    )


def _of_adjoint(kind: Adjoint) -> LinearView:
    sides = len(kind.forward.stride)
    wide = math.prod(kind.forward.shape[1:])

    def put(out: Tensor, products: Tensor) -> Tensor:
        """Every product goes to the one place of its patch: a transposed convolution with a kernel of ones and zeros."""
        kernel = torch.eye(wide, dtype=products.dtype, device=products.device)
        kernel = kernel.reshape(wide, *kind.forward.shape[1:])
        return convolve_back(products.movedim(-1, 1), kernel, kind).reshape(out.shape)

    return LinearView(
        lambda w: w.flatten(1).T, lambda x: x.reshape(-1, *x.shape[-sides - 1 :]).movedim(1, -1), put, takes_bias=False
    )
