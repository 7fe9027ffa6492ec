"""An update as a linear system, seen from the server: what it knows of the client's backprops without knowing a single sample.

A layer's gradients are G = δX and g = δ1, with δ the N×B matrix of backprops and X the batch. Whatever the server reads is a
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
from qbi.finite import is_finite

SKETCH = 32
"""Random projections in which residuals are judged."""

MOST_ROWS = 4096
ENOUGH_ROWS = 1024
ROWS_PER_SAMPLE = 8
"""Rows that are decoded: at most the first, and of wider layers eight for each sample or the second, whichever is more.

Memory grows with their square.
"""

FEWEST_CONDITIONS = 4
"""Rows beyond the number of samples below which the space of backprops proves nothing."""

SPARE = 48
"""Random projections beyond the number of samples, in which the fall of the singular values is seen."""

ABOVE_ROUNDING, CLEAR_FALL = 4.0, 20.0
"""Singular values above the first times rounding count; without a bound on the samples, the last fall by more than the second."""

FLOOR = 1e-8
"""Singular values below this share of the largest are taken for rounding."""

CHUNK = 8192
"""Columns multiplied at a time."""


@dataclass(frozen=True)
class System:
    """What the server holds of one layer in one update, on the processor."""

    kept: Tensor
    """Which rows of the layer stand here."""
    products: Float64[Tensor, "n n"]
    """Entry (n, k): what row n adds to the pre-activation of neuron k."""
    bias: Float64[Tensor, " n"]
    """g."""
    sketch: Float64[Tensor, "n s"]
    """Random projections of the rows, the bias gradient among them."""
    sizes: Float64[Tensor, " n"]
    """Sizes of the rows, as random projections give them."""
    basis: Float64[Tensor, "n r"]
    """An orthonormal basis of the space of backprops, each row in units of its size."""
    gap: float
    """How far the singular values fall behind the rank."""
    rounding: float
    """The relative error of the gradients."""

    @property
    def rank(self) -> int:
        """How many samples the update holds, as far as they are independent."""
        return self.basis.shape[1]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.bias)

    @property
    def tells_samples_apart(self) -> bool:
        """Whether there are enough more rows than samples: only then is the space of backprops a condition to be met."""
        return self.rank + FEWEST_CONDITIONS <= self.rows

    def outside(self, backprops: Float64[Tensor, "k n"]) -> Float64[Tensor, " k"]:
        """How much of each vector of backprops lies outside the space of those that the update allows, relative to its size."""
        scaled = backprops / self.sizes
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
    """Multiply the gradients with the weights that were sent, find the rank, and take a basis of the space of backprops."""
    if not (is_finite(weight_gradient) and is_finite(bias_gradient)):
        raise CannotRead("update: its gradients have NaN or infinite values; nothing can be read from them.")
    kept = _chosen(bias_gradient, most_samples)
    if len(kept) == 0:
        raise CannotRead("update: all its gradients of this layer are zero; nothing can be read from them.")
    enough = len(kept) if not most_samples else min(len(kept), most_samples + SPARE)
    products, projected = _multiply(weight_gradient, weight, kept, max(enough, SKETCH))
    g = bias_gradient[kept].double()
    products += g[:, None] * bias[kept].double()
    # From here on matrices are small and steps many: a processor is faster at that than an accelerator.
    kept, products, g = kept.cpu(), products.cpu(), g.cpu()
    projected = torch.cat([projected.cpu(), g[:, None]], 1)
    sizes = projected.norm(dim=1).clamp_min(1e-300)
    vectors, values, _ = torch.linalg.svd(projected / sizes[:, None], full_matrices=False)
    rank, gap = _rank(values, most_samples)
    eps = torch.finfo(weight_gradient.dtype).eps / 2 if rounding is None else rounding
    sketch = torch.cat([projected[:, :SKETCH], g[:, None]], 1)
    basis = vectors[:, :rank].contiguous()
    return System(kept, products, g, sketch, sizes, basis, gap, eps)


def _chosen(bias_gradient: Tensor, most_samples: int | None) -> Tensor:
    alive = (bias_gradient != 0).nonzero()[:, 0]
    most = min(MOST_ROWS, max(ENOUGH_ROWS, ROWS_PER_SAMPLE * (most_samples or 0)))
    if len(alive) <= most:
        return alive
    # Evenly over the layer: rows that were crafted for different quantiles stand in their order.
    return alive[torch.linspace(0, len(alive) - 1, most, dtype=torch.float64).round().long().to(alive.device)]


def _multiply(gradient: Tensor, weight: Tensor, kept: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """GWᵀ and random projections of G, over chunks of columns added up in float64.

    The space of backprops is taken from projections of the rows rather than from their inner products, whose rounding would be
    that of the squares.
    """
    count, width = len(kept), gradient.shape[1]
    wide = gradient.device.type != "cpu" or count * count * width < 2**30
    kind = torch.float64 if wide else torch.float32
    products = gradient.new_zeros((count, count), dtype=torch.float64)
    projected = products.new_zeros(count, directions)
    draws = torch.Generator(gradient.device).manual_seed(0)
    whole = count == len(gradient)
    for start in range(0, width, CHUNK):
        columns = slice(start, start + CHUNK)
        rows = (gradient[:, columns] if whole else gradient[kept, columns]).to(kind)
        weights = (weight[:, columns] if whole else weight[kept, columns]).to(kind)
        onto = torch.randn(rows.shape[1], directions, generator=draws, device=rows.device).to(kind)
        products += (rows @ weights.T).double()
        projected += (rows @ onto).double()
    return products, projected / math.sqrt(width)


def _rank(values: Float64[Tensor, " n"], most: int | None) -> tuple[int, float]:
    """How many singular values are more than rounding, and how far they fall there; all of them where they fall nowhere.

    What stands behind as many values as there can be samples is rounding, and measures it.
    """
    floored = values.clamp_min(FLOOR * values[0])
    if most and most < len(values):
        signal = floored[:most] > ABOVE_ROUNDING * floored[most]
        rank = max(1, int(signal.sum()))
        return rank, float(floored[rank - 1] / floored[most])
    falls = floored[:-1] / floored[1:]
    large = (falls > CLEAR_FALL).nonzero()[:, 0]
    if len(large) == 0:
        return len(values), 1.0
    return int(large[-1]) + 1, float(falls[large[-1]])
