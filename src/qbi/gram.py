"""The law of a random layer's activations on given data, through the Gram matrix alone.

For samples X (B×M) and a row w ~ N(0, I_M), the pre-activations Xw are N(0, G) with G = XXᵀ. Whatever is asked
of the *signs* of Xw + b can be answered with B numbers per row instead of M: exactly in law, not approximately.
`docs/gram.md` derives what stands here.

Memory: O(B²) beyond the data for a Gram matrix, whatever M; O(draws·B) for draws; N×M only in `lift`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qbi.errors import BadValue

CHUNK = 16_384
"""Columns of X that are widened to float64 at a time."""

CHUNK_ON_GPU = 65_536
"""The same on an accelerator, where launching work takes as long as doing it."""

RANK_TOLERANCE = 1e-10
"""Eigenvalues below this share of the largest belong to repeated or dependent samples."""


def gram(
    x: Float[Tensor, "a m"], y: Float[Tensor, "b m"] | None = None, *, chunk: int | None = None
) -> Float64[Tensor, "a b"]:
    """XYᵀ (XXᵀ without `y`), summed in float64 over chunks of columns."""
    total = x.new_zeros((x.shape[0], (x if y is None else y).shape[0]), dtype=torch.float64)
    for columns in _chunks(x, chunk):
        left = x[:, columns].double()
        right = left if y is None else y[:, columns].double()
        total.addmm_(left, right.T)
    return total


def _chunks(x: Tensor, chunk: int | None) -> list[slice]:
    size = chunk or (CHUNK if x.device.type == "cpu" else CHUNK_ON_GPU)
    return [slice(start, start + size) for start in range(0, x.shape[1], size)]


@dataclass(frozen=True)
class Law:
    """N(0, G) for a batch, as a factor with `factor @ factor.T == G`.

    The factor is triangular where G is regular; otherwise it has as many columns as G has rank, orthogonal to one
    another.
    """

    factor: Float64[Tensor, "b r"]
    triangular: bool

    @property
    def batch_size(self) -> int:
        """The number of samples the law is about."""
        return self.factor.shape[0]

    def sample(self, rows: int, generator: torch.Generator) -> Float[Tensor, "n b"]:
        """Draw pre-activations without bias of `rows` fresh random neurons, in float32."""
        noise = torch.randn(
            rows, self.factor.shape[1], generator=generator, device=self.factor.device, dtype=torch.float32
        )
        return noise @ self.factor.T.float()

    def solve(self, rows: Float64[Tensor, "n b"]) -> Float64[Tensor, "n b"]:
        """Rows times G⁻¹, or times the pseudo-inverse where G is singular."""
        if self.triangular:
            return torch.cholesky_solve(rows.T, self.factor).T
        eigenvalues = self.factor.square().sum(0)
        return (rows @ self.factor / eigenvalues**2) @ self.factor.T


def law(matrix: Float64[Tensor, "b b"]) -> Law:
    """Factor a Gram matrix: Cholesky where it is regular, an eigendecomposition where it is not.

    Repeated samples, or more samples than features, make G singular. Then the factor has the rank of G; no jitter is
    added, which would change the law.
    """
    return laws([matrix])[0]


def laws(matrices: Sequence[Float64[Tensor, "b b"]]) -> list[Law]:
    """Factor several Gram matrices of the same size; an accelerator is asked only once whether all are regular."""
    stacked = torch.stack(list(matrices))
    factors, failed = torch.linalg.cholesky_ex(stacked)
    pivots = factors.diagonal(dim1=1, dim2=2).square().amin(1)
    # A value that is no number makes a pivot that is none, and that is greater than nothing.
    regular = (failed == 0) & (pivots > RANK_TOLERANCE * stacked.diagonal(dim1=1, dim2=2).amax(1))
    return [
        Law(factor, triangular=True) if fine else _singular(matrix)
        for factor, fine, matrix in zip(factors, regular.tolist(), matrices, strict=True)
    ]


def _singular(matrix: Float64[Tensor, "b b"]) -> Law:
    if not bool(torch.isfinite(matrix).all()):
        raise BadValue("Gram matrix: it has non-finite entries; the data contain NaN or infinite values.")
    values, vectors = torch.linalg.eigh(matrix)
    keep = values > RANK_TOLERANCE * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    return Law(factor=vectors[:, keep] * values[keep].sqrt(), triangular=False)


@dataclass(frozen=True)
class Conditional:
    """The law of activations on unseen samples, given those on the samples that rows were tuned on."""

    mean_map: Float64[Tensor, "t a"]
    residual: Law

    def sample(self, given: Float[Tensor, "n a"], generator: torch.Generator) -> Float[Tensor, "n t"]:
        """Draw the unseen pre-activations of the rows whose tuned pre-activations are `given`."""
        mean = (given.double() @ self.mean_map.T).float()
        return mean + self.residual.sample(given.shape[0], generator)


def condition(unseen: Float64[Tensor, "t t"], cross: Float64[Tensor, "t a"], known: Law) -> Conditional:
    """z on unseen samples given z on known ones: mean G_ta·G_aa⁻¹·z, covariance the Schur complement."""
    mean_map = known.solve(cross)
    residual = unseen - mean_map @ cross.T
    return Conditional(mean_map=mean_map, residual=law((residual + residual.T) / 2))


def lift(
    x: Float[Tensor, "b m"],
    z: Float[Tensor, "n b"],
    known: Law,
    generator: torch.Generator,
    *,
    out: Float[Tensor, "n m"] | None = None,
    chunk: int | None = None,
) -> Float[Tensor, "n m"]:
    """Draw rows w with exactly the law of N(0, I_M) given Xw = z: w = v + XᵀG⁻¹(z − Xv), v ~ N(0, I_M).

    Written into `out` when given. Beyond that and x it needs one chunk of columns.
    """
    rows = x.new_empty((z.shape[0], x.shape[1])) if out is None else out
    rows.normal_(generator=generator)
    achieved = z.new_zeros(z.shape, dtype=torch.float64)
    for columns in _chunks(x, chunk):
        achieved += (rows[:, columns] @ x[:, columns].T).double()
    coefficients = known.solve(z.double() - achieved).to(x.dtype)
    for columns in _chunks(x, chunk):
        rows[:, columns].addmm_(coefficients, x[:, columns])
    return rows


def fire_probability(norms: Float64[Tensor, " b"], bias: float) -> Float64[Tensor, " b"]:
    """P(wᵀx + b > 0) = Φ(b/‖x‖), exactly, for each sample of any data."""
    probability: Tensor = torch.special.ndtr(bias / norms)
    return probability
