"""A sample's direction in the space of backprops, from a rough sample, from the model's head, or from nothing.

All three look for a q such that basis·q has what a sample's backprops must have: zeros where a rectifier is silent, and elsewhere what the
layers behind it can send back.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

ZERO = 1e-5
"""Shares below this part of a sample's largest count as zero."""

SURE_PART = 0.7
"""The part of the silent rows, the clearest of them, that is trusted to be silent."""

ALONE, ALONE_BY_HEAD = 1e-11, 1e-9
"""Eigenvalue above which a second direction does not vanish with the first, and is not explained with it."""

MOST_PAIRS = 2**24
"""Products of columns, or weighted columns, that are held at a time."""

INVERSE_STEPS = 4

SPARE_ROWS = 50
"""One row in so many, and four at least, must agree beyond the number of unknowns: as many as there are unknowns always do."""


@dataclass(frozen=True)
class Directions:
    """Candidates for the directions of samples."""

    units: Float64[Tensor, "r k"]
    rows: Int[Tensor, " k"]
    """In how many rows what is asked for holds."""
    proven: Bool[Tensor, " k"]
    """Whether that determines the direction, with rows to spare."""

    def to(self, device: torch.device) -> "Directions":
        """The same elsewhere."""
        return Directions(self.units.to(device), self.rows.to(device), self.proven.to(device))

    def joined(self, other: "Directions") -> "Directions":
        """Both lists."""
        parts = zip((self.units, self.rows, self.proven), (other.units, other.rows, other.proven), strict=True)
        return Directions(*(torch.cat(pair, -1) for pair in parts))


def spare_rows(rows: int) -> int:
    """How many rows must agree beyond the number of unknowns."""
    return max(4, rows // SPARE_ROWS)


def by_pattern(basis: Float64[Tensor, "n r"], z: Float64[Tensor, "k n"], *, rounds: int = 6) -> Directions:
    """The direction that vanishes on the rows which a rough sample leaves most clearly silent."""
    rows, rank = basis.shape
    place = z.argsort(1).argsort(1)
    silent = (z < 0).sum(1)
    fewest = min(rows, rank + 2)
    trusted = (place < (SURE_PART * silent).long().clamp(fewest, rows)[:, None]).double()
    weights = trusted
    q = basis.new_zeros(rank, len(z))
    pairs = _pairs(basis)
    for _ in range(rounds):
        q = _smallest(basis, weights, pairs)
        size = (basis @ q).abs().T
        zero = size < ZERO * size.amax(1, keepdim=True)
        usual = size.masked_fill(trusted == 0, torch.inf).kthvalue(fewest, dim=1).values[:, None].clamp_min(1e-14)
        # Where enough vanish, all that vanish decide; elsewhere rows that stand out count less.
        enough = (zero.sum(1) >= rank + 5)[:, None]
        weights = torch.where(enough, zero.double(), trusted / (1 + (size / usual).square()))
    return _vanishing(basis, q)


def by_sparsity(basis: Float64[Tensor, "n r"], starts: int, draws: torch.Generator, *, rounds: int = 30) -> Directions:
    """Directions with many small backprops, from random starts: least absolute sums by reweighted least squares."""
    rows, rank = basis.shape
    pairs = _pairs(basis)
    q = units(torch.randn(rank, starts, generator=draws, dtype=torch.float64).to(basis))
    for step in range(rounds):
        size = (basis @ q).abs().T
        usual = size.kthvalue(max(1, rows // 4), dim=1).values[:, None].clamp_min(1e-12)
        softened = size.square() + (usual * (0.5 if step < rounds // 3 else 0.1)).square()
        q = _smaller(basis, 1 / (softened.sqrt() if step < rounds // 2 else softened), pairs, q)
    return _vanishing(basis, q)


def by_head(
    basis: Float64[Tensor, "n r"],
    slopes: Float64[Tensor, "k o n"],
    z: Float64[Tensor, "k n"],
    *,
    trusted: float,
    rounds: int = 10,
) -> Directions:
    """The direction that some output gradient explains, through a rectifier that is silent where a rough sample leaves it silent.

    A sample sends back e·slopes in the rows where it fires, with one unknown e for each output. That and the space of backprops leave
    few unknowns, so rows beyond them test each other: those that fit neither as firing nor as silent count less, and each row is taken for
    what it fits better. Silent rows alone determine a direction while they are more than samples; with the head, all rows do.

    Args:
        basis: of the space of backprops.
        slopes: what each output sends to each row if it fires, in the units of the basis; of two outputs or more.
        z: pre-activations of rough samples.
        trusted: the part of the rows, the clearest ones, that decides at first.
        rounds: of reweighted least squares.
    """
    at_once = max(1, MOST_PAIRS // basis.numel())
    parts = [
        _by_head(basis, s, own, trusted, rounds) for s, own in zip(slopes.split(at_once), z.split(at_once), strict=True)
    ]
    found = parts[0]
    for part in parts[1:]:
        found = found.joined(part)
    return found


def _by_head(basis: Tensor, slopes: Tensor, z: Tensor, trusted: float, rounds: int) -> Directions:
    (rows, rank), outputs = basis.shape, slopes.shape[1]
    fewest = rank + outputs + spare_rows(rows)
    unit = torch.eye(rank).to(basis), torch.eye(outputs).to(basis)
    place = z.abs().argsort(1, descending=True).argsort(1)
    weights = (place < max(fewest, int(trusted * rows))).double()
    fires = (z > 0).double()
    q, off, values = basis.new_zeros(len(z), rank), weights, basis.new_zeros(len(z), outputs)
    for _ in range(rounds):
        sent = slopes * fires[:, None]
        # For each output gradient e the best q in closed form; then the e that is explained best, in units of what it sends.
        weighed = basis * weights[:, :, None]
        onto = sent @ weighed
        solved = torch.cholesky_solve(onto.mT, _root(basis.T @ weighed, unit[0]))
        size = (sent * weights[:, None]) @ sent.mT
        back = torch.linalg.inv(_root(size, unit[1]))
        values, vectors = torch.linalg.eigh((back @ (size - onto @ solved) @ back.mT).nan_to_num(1.0, 1.0, 1.0))
        e = (back.mT @ vectors[:, :, :1])[:, :, 0]
        q = (solved @ e[:, :, None])[:, :, 0]
        shares = q @ basis.T
        silent, firing = shares.abs(), (shares - (e[:, None] @ slopes)[:, 0]).abs()
        fires = (firing < silent).double()
        # Nothing sent to no row agrees with everything.
        size = silent.amax(1, keepdim=True)
        off = torch.where(size > 0, torch.minimum(firing, silent) / size.clamp_min(1e-300), 1.0)
        usual = off.kthvalue(min(rows, fewest), dim=1).values[:, None].clamp_min(1e-13)
        weights = 1 / (1 + (off / usual).square()).nan_to_num(torch.inf)
    met = (off < ZERO).sum(1)
    alone = values[:, 1] > ALONE_BY_HEAD
    return Directions(units(q.T), met, (met >= fewest) & alone)


def _root(matrices: Tensor, unit: Tensor) -> Tensor:
    """Cholesky's, of matrices that may be singular to rounding."""
    size = matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-300)
    root: Tensor = torch.linalg.cholesky_ex(matrices / size + 1e-13 * unit).L * size.sqrt()
    return root


def _vanishing(basis: Tensor, q: Tensor) -> Directions:
    """Directions with their zeros, proven where these are enough and no other direction vanishes there."""
    rows, rank = basis.shape
    size = (basis @ q).abs()
    zero = size < ZERO * size.amax(0)
    proven = zero.sum(0) >= rank + spare_rows(rows)
    for index in proven.nonzero()[:, 0].tolist():
        # A mixture of two samples vanishes where both are silent.
        silent = basis[zero[:, index]]
        values = torch.linalg.eigvalsh(silent.T @ silent)
        proven[index] = len(values) < 2 or float(values[1]) > ALONE
    return Directions(q, zero.sum(0), proven)


def _pairs(basis: Tensor) -> Tensor | None:
    """Products of every two columns, by which weighted sums of squares are one multiplication; None where they are too many."""
    rows, rank = basis.shape
    return (basis[:, :, None] * basis[:, None, :]).flatten(1) if rows * rank**2 <= MOST_PAIRS else None


def _smallest(basis: Tensor, weights: Tensor, pairs: Tensor | None) -> Tensor:
    """For each row of weights the unit vector on which the weighted basis is smallest."""
    if len(weights) == 0:
        return basis.new_zeros(basis.shape[1], 0)
    smallest: Tensor = torch.linalg.eigh(_weighted(basis, weights, pairs)).eigenvectors[:, :, 0].T
    return smallest


def _smaller(basis: Tensor, weights: Tensor, pairs: Tensor | None, q: Tensor) -> Tensor:
    """A few inverse iterations from q towards that vector: weights change from round to round, and eigenvectors take three times as long."""
    roots = _root(_weighted(basis, weights, pairs), torch.eye(len(q)).to(q))
    vectors = q.T[:, :, None]
    for _ in range(INVERSE_STEPS):
        vectors = torch.cholesky_solve(vectors, roots)
        vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-300)
    smaller: Tensor = vectors[:, :, 0].T.nan_to_num(0.0, 0.0, 0.0)
    return smaller


def _weighted(basis: Tensor, weights: Tensor, pairs: Tensor | None) -> Tensor:
    """Sums of squares over the rows of a basis, a matrix for each row of weights."""
    rows, rank = basis.shape
    if pairs is not None:
        summed: Tensor = (weights @ pairs).unflatten(1, (rank, rank))
        return summed
    blocks = weights.split(max(1, MOST_PAIRS // (rows * rank)))
    return torch.cat([(basis.T * block[:, None]) @ basis for block in blocks])


def units(columns: Tensor) -> Tensor:
    """Columns of length one."""
    norms: Tensor = columns.norm(dim=0)
    return columns / norms.clamp_min(1e-300)
