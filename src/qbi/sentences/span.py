"""What the gradient of a linear map spans, and whether a vector lies in it, by the rounding that the gradient itself shows."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.errors import CannotRead

EDGE = 4.0
"""How far singular values of rounding may lie above the edge of even noise: it is not spread evenly over the entries."""

TIMES = 6.0
"""Distances up to this many times what rounding explains are no distance."""

ROUNDING = 2.0**-24
"""The relative error of a float32 number."""

SUMMED = 32.0
"""By how much sums over positions may enlarge rounding: with more left than this, what is left is no rounding."""


@dataclass(frozen=True)
class Span:
    """The space of a gradient's rows, in units in which all its rows and columns have one size.

    G = Σ_t δ_t x_tᵀ + E: its rows span the vectors x_t that arrived, but for the rounding E. A vector x of the span is Gᵀc for some c, so
    it is known up to Eᵀc: about `noise`·√(d − r)·‖Σ⁻¹Vᵀx‖ stands outside the span. That, and no fixed tolerance, is what a distance is
    compared with.
    """

    rank: int
    width: int
    noise: float
    scale: Float[Tensor, " d"] = field(repr=False)
    basis: Float[Tensor, "d r"] = field(repr=False)
    weights: Float[Tensor, " r"] = field(repr=False)
    """One over the singular values."""
    times: float = TIMES
    """Up to how many times what rounding explains a distance is none."""

    def misses(self, vectors: Float[Tensor, "*k d"]) -> Float[Tensor, "*k"]:
        """How far each lies outside the span, in units of what rounding explains: about 1 inside, thousands outside."""
        scaled = vectors.to(self.basis.dtype) * self.scale
        within = scaled @ self.basis
        far = (scaled - within @ self.basis.T).norm(dim=-1)
        explained = (within * self.weights).norm(dim=-1)
        least = SUMMED * ROUNDING * scaled.norm(dim=-1)  # the vectors are sums of rounded numbers themselves
        misses: Tensor = far / (self.noise * math.sqrt(self.width - self.rank) * explained + least)
        return misses

    def rest(self, vectors: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """The part of each that stands outside, for a vector of length one."""
        scaled = vectors.to(self.basis.dtype) * self.scale
        unit = scaled / scaled.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        outside: Tensor = unit - (unit @ self.basis) @ self.basis.T
        return outside

    def distances(self, vectors: Float[Tensor, "*k d"]) -> Float[Tensor, "*k"]:
        """The share of each vector's length that stands outside the span."""
        far: Tensor = self.rest(vectors).norm(dim=-1)
        return far

    def looks(self, count: int, draws: torch.Generator) -> Float[Tensor, "d c"]:
        """Random directions outside, in which what stands outside has its own length on average."""
        random = torch.randn(self.width, count, generator=draws).to(self.basis) / math.sqrt(count)
        return random - self.basis @ (self.basis.T @ random)

    def screen(self, vectors: Float[Tensor, "*k d"], directions: Float[Tensor, "d c"]) -> Float[Tensor, "*k"]:
        """The share of each that stands in some directions of the outside: a cheap look at many vectors."""
        scaled = vectors.to(self.basis.dtype) * self.scale
        far: Tensor = (scaled @ directions).norm(dim=-1) / scaled.norm(dim=-1).clamp_min(1e-30)
        return far

    def screened(self, vectors: Float[Tensor, "*k d"], directions: Float[Tensor, "d c"]) -> Float[Tensor, "*k"]:
        """As `misses`, of the few that some directions outside do not rule out; infinite for the others.

        What lies in the span has no part outside but for rounding, and the bound on that part is rounding over the smallest singular value.
        """
        most = 2 * TIMES * (self.noise * math.sqrt(self.width) * float(self.weights.max()) + SUMMED * ROUNDING)
        inside = self.screen(vectors, directions) <= most * math.sqrt(self.width - self.rank)
        misses = torch.full(inside.shape, torch.inf, device=inside.device)
        misses[inside] = self.misses(vectors[inside])
        return misses


def span_of(gradient: Float[Tensor, "n d"], rounding: float = ROUNDING) -> Span:
    """The span, with its rank decided by the rounding that the gradient shows.

    Rows are brought to one size, and so are columns: rounding is relative, so the error of every entry then is about the same, and the
    singular values of such noise end at an edge that is known, ν(√n + √d). The rank is the least at which what is left ends there and is no
    larger than sums of rounded numbers can be.
    """
    exact = gradient.double()
    rows = exact.square().mean(1).sqrt()
    exact = exact[rows > 0] / rows[rows > 0, None]
    columns = exact.square().mean(0).sqrt()
    if len(exact) == 0 or bool((columns == 0).all()):
        raise CannotRead("nothing came back to this layer.")
    scale = torch.where(columns > 0, 1 / columns.clamp_min(1e-300), torch.zeros_like(columns))
    count, width = exact.shape
    values, right = right_vectors(exact * scale)
    rank, noise = _rank(values, count, width, rounding)
    if rank == 0:
        raise CannotRead("the gradient is no more than its rounding.")
    if rank >= width:
        raise CannotRead(f"the gradient spans all {width} dimensions; nothing can be told by it.")
    if rank >= count:
        raise CannotRead(f"the gradient has {count} rows and all are independent; they do not span what arrived.")
    kind = torch.float32
    return Span(
        rank,
        width,
        noise,
        scale.to(kind),
        right[:rank].T.contiguous().to(kind),
        (1 / values[:rank]).to(kind),
    )


def right_vectors(matrix: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " m"], Float[Tensor, "m d"]]:
    """Singular values and right singular vectors, by way of a triangle: several times faster where one side is longer."""
    count, width = matrix.shape
    if count >= width:
        _, values, right = torch.linalg.svd(torch.linalg.qr(matrix, mode="r").R)
        return values, right
    turned, triangle = torch.linalg.qr(matrix.T)
    _, values, right = torch.linalg.svd(triangle.T)
    return values, right @ turned.T


def _rank(values: Tensor, count: int, width: int, rounding: float) -> tuple[int, float]:
    """The least rank whose rest looks like noise, and that noise's size for each entry."""
    size = len(values)
    ranks = torch.arange(size, device=values.device)
    rest = values.square().flip(0).cumsum(0).flip(0)
    entries = (count - ranks).double() * (width - ranks).double()
    noise = (rest / entries).sqrt().clamp_min(rounding)
    edge = EDGE * noise * ((count - ranks).double().sqrt() + (width - ranks).double().sqrt())
    fits = ((values <= edge) & (noise <= SUMMED * rounding)).nonzero()
    rank = int(fits[0]) if len(fits) else size
    return rank, float(noise[rank]) if rank < size else rounding
