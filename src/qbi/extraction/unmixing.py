"""Unmixing: an honest model gives whole batches away, because a rectifier silences about half of each sample's backprops.

The space of backprops is known from the update alone, up to a B×B mixing: a sample's backprops are basis·q. Half of them are zero, and
which half the server can foretell as soon as it roughly knows the sample, since it knows the weights it sent. So:

1. *Start*: independent components of what the rows span (for images of their derivatives) resemble the samples; where nothing
   is known of the data, directions with many small backprops are sought by reweighted least squares.
2. *Pattern*: run a rough sample through the layer; the rows that it leaves most clearly silent must be zeros of basis·q,
   and more of them than there are unknowns determine q exactly. Where the layers behind the rectifier are known, so is what they send back to
   the rows that fire, up to one unknown for each output: then all rows determine q, not the silent ones alone.
3. *Complement*: what is left when the found directions are projected out is a mixture of the missing samples only, and a
   smaller problem of the same kind; with one missing it is that sample itself.

See `docs/strongest-server.md`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qbi.extraction.directions import Directions, by_head, by_pattern, by_sparsity, spare_rows, units
from qbi.extraction.independent import contrasts, independent_components, is_image
from qbi.extraction.system import System

RESTARTS = 24
FRUITLESS = 3
"""Restarts in a row without a new direction after which it ends."""

NEW = 1e-2
"""Part of a direction that must lie outside what the found ones span."""

TRUSTED = (0.7, 0.6, 0.8)
"""Parts of the rows that are trusted in a rough sample, restart by restart."""

LARGE = 2**18
"""Weighted entries of the space of backprops from which on the accelerator that holds the update is faster at them."""

MOST_WORK = 3e11
"""Multiplications of one restart up to which it is tried."""

RANDOM_STARTS, FEWEST_STARTS = 6, 200
"""Random directions per unknown one, where nothing is known of the data, and at the least."""

MOST_BY_SPARSITY = 64
"""Samples up to which random starts have a chance."""

Slopes = Callable[[Float64[Tensor, "k n"]], Float64[Tensor, "k o n"] | None]
"""What each output sends to each row of a sample if it fires there; none where the layer's rows are never silent, or outputs too many."""


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
    slopes: Slopes | None = None,
    seed: int = 0,
) -> Unmixed:
    """Find each sample's direction. `known` are backprops that are certain already; `shape` is that of a sample."""
    basis, rank = system.basis, system.rank
    spanned = _spanned(system, gradient)
    to_activations = basis.T @ (system.products / system.sizes[:, None])
    bias = basis.T @ (system.bias / system.sizes)
    exact = basis.new_empty(rank, 0) if known is None else units((known / system.sizes @ basis).T)
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
        z, trusted = samples @ to_activations, TRUSTED[restart % len(TRUSTED)]
        found = _directions(system, z, slopes, trusted, gradient.device)
        if rank <= MOST_BY_SPARSITY and (fruitless or not is_image(shape)):
            found = found.joined(by_sparsity(basis, max(FEWEST_STARTS, RANDOM_STARTS * rank), draws))
        before = exact.shape[1]
        exact, rough = _sort_out(exact, found)
        if missing == 1 and exact.shape[1] == before:
            # The last one is what is left, however weak its backprops are; the model has the last word on it.
            exact = torch.cat([exact, found.units[:, :1]], 1)
        fruitless = 0 if exact.shape[1] > before else fruitless + 1
    return Unmixed(exact, rough[:, : rank - exact.shape[1]], estimates[estimates.isfinite().all(1)])


def _directions(system: System, z: Tensor, slopes: Slopes | None, trusted: float, device: torch.device) -> Directions:
    """By the head where it is known what it sends back, with rows to spare; by silent rows where those are."""
    sent = None if slopes is None else slopes(z)
    enough = sent is not None and system.rank + sent.shape[1] + spare_rows(system.rows) <= system.rows
    if sent is None or not enough:
        return by_pattern(system.basis, z)
    where = device if len(z) * system.basis.numel() >= LARGE else z.device
    sent = sent.to(where) / system.sizes.to(where)
    found = by_head(system.basis.to(where), sent, z.to(where), trusted=trusted).to(z.device)
    return found if bool(found.proven.any()) else found.joined(by_pattern(system.basis, z))


def coefficients_of(system: System, directions: Float64[Tensor, "r r"]) -> tuple[Tensor, Tensor] | None:
    """Samples as combinations of rows, and their backprops, from a full set of directions; None where it is singular."""
    inverse, failed = torch.linalg.inv_ex(directions)
    if bool(failed) or not bool(inverse.isfinite().all()):
        return None
    coefficients = inverse @ system.basis.T / system.sizes
    scale = coefficients @ system.bias
    backprops = (system.basis @ directions).T * system.sizes * scale[:, None]
    return coefficients / scale[:, None], backprops


def _sort_out(exact: Tensor, found: Directions) -> tuple[Tensor, Tensor]:
    """Add what is proven and new to the exact directions; the rest is rough, those that most rows agree on first."""
    rough = []
    for index in found.rows.argsort(descending=True, stable=True).tolist():
        q = found.units[:, index : index + 1]
        rest = q - exact @ torch.linalg.lstsq(exact, q).solution if exact.shape[1] else q
        if float(rest.norm()) < NEW:
            continue
        if bool(found.proven[index]):
            exact = torch.cat([exact, q], 1)
        else:
            rough.append(q)
    return exact, torch.cat(rough, 1) if rough else exact[:, :0]


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
