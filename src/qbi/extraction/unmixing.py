"""Unmixing: an honest model gives whole batches away, because a rectifier silences about half of each sample's backprops.

The space of backprops is known from the update alone, up to a B×B mixing: a sample's backprops are basis·q. Half of them are zero, and
which half the server can foretell as soon as it roughly knows the sample, since it knows the weights it sent. So:

1. *Start*: independent components of what the rows span (for images of their derivatives) resemble the samples; where nothing
   is known of the data, directions with many small backprops are sought by reweighted least squares.
2. *Pattern*: run a rough sample through the layer; the rows that it leaves most clearly silent must be zeros of basis·q,
   and more of them than there are unknowns determine q exactly.
3. *Complement*: what is left when the found directions are projected out is a mixture of the missing samples only, and a
   smaller problem of the same kind; with one missing it is that sample itself.

See `docs/strongest-server.md`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from qbi.extraction.independent import contrasts, independent_components, is_image
from qbi.extraction.system import System

RESTARTS = 12
FRUITLESS = 2
"""Restarts in a row without a new direction after which it ends."""

ZERO = 1e-5
"""Shares below this part of a sample's largest count as zero."""

NEW = 1e-2
"""Part of a direction that must lie outside what the found ones span."""

ALONE = 1e-11
"""Eigenvalue above which a second direction does not vanish with the first."""

SURE_PART = 0.7
"""The part of the silent rows, the clearest of them, that is trusted to be silent."""

MOST_WORK = 3e11
"""Multiplications of one restart up to which it is tried."""

RANDOM_STARTS, FEWEST_STARTS = 6, 200
"""Random directions per unknown one, where nothing is known of the data, and at the least."""

MOST_PAIRS = 2**24
"""Products of columns, or weighted columns, that are held at a time."""

MOST_BY_SPARSITY = 64
"""Samples up to which random starts have a chance."""


@dataclass(frozen=True)
class Unmixed:
    """Directions of the space of backprops that were found, and the rough ones in the place of the others."""

    exact: Float64[Tensor, "r f"]
    rough: Float64[Tensor, "r u"]
    estimates: Float64[Tensor, "e r"]
    """Rough samples as combinations of what the basis spans: the independent components themselves."""

    @property
    def complete(self) -> bool:
        """Whether every sample's direction is known."""
        return self.exact.shape[1] == self.exact.shape[0]


def unmix(
    system: System,
    gradient: Float[Tensor, "rows w"],
    shape: tuple[int, ...],
    *,
    known: Float64[Tensor, "s n"] | None = None,
    seed: int = 0,
) -> Unmixed:
    """Find each sample's direction. `known` are backprops that are certain already; `shape` is that of a sample."""
    basis, rank = system.basis, system.rank
    spanned = _spanned(system, gradient)
    to_activations = basis.T @ (system.products / system.sizes[:, None])
    bias = basis.T @ (system.bias / system.sizes)
    exact = basis.new_empty(rank, 0) if known is None else _units((known / system.sizes @ basis).T)
    rough, estimates = basis.new_empty(rank, 0), basis.new_empty(0, rank)
    fruitless = 0
    for restart in range(RESTARTS):
        missing = rank - exact.shape[1]
        if missing == 0 or fruitless >= FRUITLESS or missing * system.rows * rank**2 > MOST_WORK:
            break
        draws = torch.Generator().manual_seed(seed * RESTARTS + restart)
        complement = _complement(exact)
        components = independent_components(contrasts(complement.T.float() @ spanned, shape, restart), draws)
        samples = components @ complement.T
        samples = (samples / (samples @ bias)[:, None]).nan_to_num(0.0, 0.0, 0.0)
        estimates = samples
        found, zeros = by_pattern(basis, samples @ to_activations)
        if rank <= MOST_BY_SPARSITY and (fruitless or not is_image(shape)):
            more, counts = by_sparsity(basis, max(FEWEST_STARTS, RANDOM_STARTS * rank), draws)
            found, zeros = torch.cat([found, more], 1), torch.cat([zeros, counts])
        before = exact.shape[1]
        exact, rough = _sort_out(exact, found, zeros, system)
        if missing == 1 and exact.shape[1] == before:
            # The last one is what is left, however weak its backprops are; the model has the last word on it.
            exact = torch.cat([exact, found[:, :1]], 1)
        fruitless = 0 if exact.shape[1] > before else fruitless + 1
    return Unmixed(exact, rough[:, : rank - exact.shape[1]], estimates[estimates.isfinite().all(1)])


def coefficients_of(system: System, directions: Float64[Tensor, "r r"]) -> tuple[Tensor, Tensor] | None:
    """Samples as combinations of rows, and their backprops, from a full set of directions; None where it is singular."""
    inverse, failed = torch.linalg.inv_ex(directions)
    if bool(failed) or not bool(inverse.isfinite().all()):
        return None
    coefficients = inverse @ system.basis.T / system.sizes
    scale = coefficients @ system.bias
    backprops = (system.basis @ directions).T * system.sizes * scale[:, None]
    return coefficients / scale[:, None], backprops


def by_pattern(
    basis: Float64[Tensor, "n r"], z: Float64[Tensor, "k n"], *, rounds: int = 6
) -> tuple[Float64[Tensor, "r k"], Int[Tensor, " k"]]:
    """The direction that vanishes on the rows which a rough sample leaves most clearly silent, and its number of zeros."""
    rows, rank = basis.shape
    place = z.argsort(1).argsort(1)
    silent = (z < 0).sum(1)
    fewest = min(rows, rank + 2)
    trusted = (place < (SURE_PART * silent).long().clamp(fewest, rows)[:, None]).double()
    weights = trusted
    q = basis.new_zeros(rank, len(z))
    pairs, zeros = _pairs(basis), silent
    for _ in range(rounds):
        q = _smallest(basis, weights, pairs)
        size = (basis @ q).abs().T
        zero = size < ZERO * size.amax(1, keepdim=True)
        zeros = zero.sum(1)
        usual = size.masked_fill(trusted == 0, torch.inf).kthvalue(fewest, dim=1).values[:, None].clamp_min(1e-14)
        # Where enough vanish, all that vanish decide; elsewhere rows that stand out count less.
        enough = (zeros >= rank + 5)[:, None]
        weights = torch.where(enough, zero.double(), trusted / (1 + (size / usual).square()))
    return q, zeros


def by_sparsity(
    basis: Float64[Tensor, "n r"], starts: int, draws: torch.Generator, *, rounds: int = 30
) -> tuple[Float64[Tensor, "r k"], Int[Tensor, " k"]]:
    """Directions with many small backprops, from random starts: least absolute sums by reweighted least squares."""
    rows, rank = basis.shape
    pairs = _pairs(basis)
    q = _units(torch.randn(rank, starts, generator=draws, dtype=torch.float64).to(basis))
    for step in range(rounds):
        size = (basis @ q).abs().T
        usual = size.kthvalue(max(1, rows // 4), dim=1).values[:, None].clamp_min(1e-12)
        softened = size.square() + (usual * (0.5 if step < rounds // 3 else 0.1)).square()
        q = _smallest(basis, 1 / (softened.sqrt() if step < rounds // 2 else softened), pairs)
    size = (basis @ q).abs()
    return q, (size < ZERO * size.amax(0)).sum(0)


def fewest_zeros(system: System) -> int:
    """How many zeros prove a direction: any one can be made to vanish on one row less than there are unknowns."""
    return system.rank + max(4, system.rows // 50)


def _sort_out(exact: Tensor, found: Tensor, zeros: Tensor, system: System) -> tuple[Tensor, Tensor]:
    """Add what is proven and new to the exact directions; the rest is rough, the most zeros first."""
    proven = zeros >= fewest_zeros(system)
    rough = []
    for index in zeros.argsort(descending=True, stable=True).tolist():
        q = found[:, index : index + 1]
        rest = q - exact @ torch.linalg.lstsq(exact, q).solution if exact.shape[1] else q
        if float(rest.norm()) < NEW:
            continue
        if bool(proven[index]) and _alone(system.basis, q[:, 0]):
            exact = torch.cat([exact, q], 1)
        else:
            rough.append(q)
    return exact, torch.cat(rough, 1) if rough else exact[:, :0]


def _alone(basis: Tensor, q: Tensor) -> bool:
    """Whether no other direction vanishes on the same rows: a mixture of two samples vanishes where both are silent."""
    size = (basis @ q).abs()
    silent = basis[size < ZERO * size.max()]
    values = torch.linalg.eigvalsh(silent.T @ silent)
    return len(values) < 2 or float(values[1]) > ALONE


def _pairs(basis: Tensor) -> Tensor | None:
    """Products of every two columns, by which weighted sums of squares are one multiplication; None where they are too many."""
    rows, rank = basis.shape
    return (basis[:, :, None] * basis[:, None, :]).flatten(1) if rows * rank**2 <= MOST_PAIRS else None


def _smallest(basis: Tensor, weights: Tensor, pairs: Tensor | None) -> Tensor:
    """For each row of weights the unit vector on which the weighted basis is smallest."""
    rows, rank = basis.shape
    if len(weights) == 0:
        return basis.new_zeros(rank, 0)
    if pairs is not None:
        matrices = (weights @ pairs).unflatten(1, (rank, rank))
    else:
        blocks = weights.split(max(1, MOST_PAIRS // (rows * rank)))
        matrices = torch.cat([(basis.T * block[:, None]) @ basis for block in blocks])
    smallest: Tensor = torch.linalg.eigh(matrices).eigenvectors[:, :, 0].T
    return smallest


def _complement(exact: Float64[Tensor, "r f"]) -> Float64[Tensor, "r u"]:
    """An orthonormal basis of what is orthogonal to the found directions."""
    rank, count = exact.shape
    if count == 0:
        return torch.eye(rank).to(exact)
    full: Tensor = torch.linalg.qr(exact, mode="complete").Q
    return full[:, count:]


def _spanned(system: System, gradient: Tensor) -> Tensor:
    """What the rows span, one vector for each direction of the basis, in float32: only starts are made of it."""
    rows = gradient if len(system.kept) == len(gradient) else gradient[system.kept.to(gradient.device)]
    return ((system.basis / system.sizes[:, None]).T.to(rows) @ rows).float().cpu()


def _units(columns: Tensor) -> Tensor:
    norms: Tensor = columns.norm(dim=0)
    return columns / norms.clamp_min(1e-300)
