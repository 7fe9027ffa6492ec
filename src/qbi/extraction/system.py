"""An update as a linear system, seen from the server: what it knows of the client's shares without knowing a single sample.

A layer's gradients are G = δX and g = δ1, with δ the N×B matrix of shares and X the batch. Whatever the server reads is a
combination of the rows of G: a sample is cᵀG with cᵀg = 1, and its pre-activations are cᵀ(GWᵀ + g bᵀ). So decoding never
touches the M values of a sample: it works with coefficients c, with the N×N products of rows and weights, and with a few random
projections of the rows. The samples themselves are formed once, at the end.

Memory: a few N×N matrices in float64 beside the gradients.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qbi.errors import CannotRead

SKETCH = 32
"""Random projections in which residuals are judged."""

MOST_ROWS = 4096
ENOUGH_ROWS = 1024
ROWS_PER_SAMPLE = 8
"""Rows that are decoded: at most the first, and of wider layers eight for each sample or the second, whichever is more.

Memory grows with their square.
"""

FLOOR = 1e-8
"""Singular values below this share of the largest are taken for rounding."""

CHUNK = 8192
"""Columns multiplied at a time."""


@dataclass(frozen=True)
class System:
    """What the server holds of one layer in one answer."""

    kept: Tensor
    """Which rows of the layer stand here."""
    products: Float64[Tensor, "n n"]
    """Entry (n, k): what row n adds to the pre-activation of neuron k."""
    bias: Float64[Tensor, " n"]
    """g."""
    sketch: Float64[Tensor, "n s"]
    """Random projections of the rows, the bias gradient among them."""
    sizes: Float64[Tensor, " n"]
    """Norms of the rows."""
    basis: Float64[Tensor, "n r"]
    """An orthonormal basis of the space of shares, each row in units of its size."""
    gap: float
    """How far the singular values fall behind the rank."""
    rounding: float
    """The relative error of the gradients."""

    @property
    def rank(self) -> int:
        """How many samples the answer holds, as far as they are independent."""
        return self.basis.shape[1]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.bias)

    @property
    def tells_samples_apart(self) -> bool:
        """Whether there are more rows than samples: only then is the space of shares a condition."""
        return self.rank < self.rows

    def outside(self, shares: Float64[Tensor, "k n"]) -> Float64[Tensor, " k"]:
        """How much of each vector of shares lies outside the space of those that the answer allows, relative to its size."""
        scaled = shares / self.sizes
        rest = scaled - (scaled @ self.basis) @ self.basis.T
        part: Tensor = rest.norm(dim=1) / scaled.norm(dim=1).clamp_min(1e-300)
        return part


def build_system(
    weight_gradient: Float[Tensor, "n w"],
    bias_gradient: Float[Tensor, " n"],
    weight: Float[Tensor, "k w"],
    bias: Float[Tensor, " k"],
    *,
    rounding: float | None = None,
    most_samples: int | None = None,
) -> System:
    """Multiply the gradients with the weights that were sent, find the rank, and take a basis of the space of shares."""
    if not bool(torch.isfinite(weight_gradient).all() & torch.isfinite(bias_gradient).all()):
        raise CannotRead("update: its gradients have NaN or infinite values; nothing can be read from them.")
    kept = _chosen(bias_gradient, most_samples)
    if len(kept) == 0:
        raise CannotRead("update: all its gradients of this layer are zero; nothing can be read from them.")
    products, inner, sketch = _multiply(weight_gradient, weight, kept)
    g = bias_gradient[kept].double()
    products += g[:, None] * bias[kept].double()
    inner += torch.outer(g, g)
    sizes = inner.diagonal().clamp_min(0).sqrt().clamp_min(1e-300)
    values, vectors = torch.linalg.eigh(inner / torch.outer(sizes, sizes))
    values = values.flip(0).clamp_min(0).sqrt()
    rank, gap = _rank(values, most_samples)
    eps = torch.finfo(weight_gradient.dtype).eps / 2 if rounding is None else rounding
    sketch = torch.cat([sketch, g[:, None]], 1)
    return System(kept, products, g, sketch, sizes, vectors.flip(1)[:, :rank].contiguous(), gap, eps)


def _chosen(bias_gradient: Tensor, most_samples: int | None) -> Tensor:
    alive = (bias_gradient != 0).nonzero()[:, 0]
    most = min(MOST_ROWS, max(ENOUGH_ROWS, ROWS_PER_SAMPLE * (most_samples or 0)))
    if len(alive) <= most:
        return alive
    # Evenly over the layer: rows that were crafted for different quantiles stand in their order.
    return alive[torch.linspace(0, len(alive) - 1, most, dtype=torch.float64).round().long().to(alive.device)]


def _multiply(gradient: Tensor, weight: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GWᵀ, GGᵀ and a sketch of G, over chunks of columns added up in float64."""
    count, width = len(kept), gradient.shape[1]
    wide = gradient.device.type != "cpu" or count * count * width < 2**31
    kind = torch.float64 if wide else torch.float32
    products = gradient.new_zeros((count, count), dtype=torch.float64)
    inner, sketch = torch.zeros_like(products), products.new_zeros(count, SKETCH)
    draws = torch.Generator().manual_seed(0)
    whole = len(kept) == len(gradient)
    for start in range(0, width, CHUNK):
        columns = slice(start, start + CHUNK)
        rows = (gradient[:, columns] if whole else gradient[kept, columns]).to(kind)
        weights = (weight[:, columns] if whole else weight[kept, columns]).to(kind)
        directions = torch.randn(rows.shape[1], SKETCH, generator=draws).to(rows)
        products += (rows @ weights.T).double()
        inner += (rows @ rows.T).double()
        sketch += (rows @ directions).double()
    return products, inner, sketch / math.sqrt(width)


def _rank(values: Float64[Tensor, " n"], most: int | None) -> tuple[int, float]:
    """The largest fall of the singular values; the number of rows where they fall nowhere by much."""
    floored = values.clamp_min(FLOOR * values[0])
    falls = floored[:-1] / floored[1:]
    if most is not None and 0 < most < len(values):
        falls = falls[:most]
    if len(falls) == 0:
        return 1, math.inf
    place = int(falls.argmax())
    fall = float(falls[place])
    return (place + 1, fall) if fall > 20 else (len(values), 1.0)
