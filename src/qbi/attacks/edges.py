"""Samples that a layer's inputs give away by their zeros, each put to the model that was sent: with which label does it explain itself?"""

import torch
from torch import Tensor

from qbi.attacks.by_label import ByLabel
from qbi.attacks.explaining import ByNumber
from qbi.extraction.cone import corners
from qbi.extraction.decoding import cascade, refit
from qbi.extraction.recovered import Recovered
from qbi.extraction.system import System

MOST_COLUMNS = 4096
"""Values of a sample that are looked at; more change nothing."""

LOOSE = 1e-3
"""Part of a sample's backprops that may lie outside the space before it is fitted; the tests behind the fit are stricter."""


def by_zeros(
    system: System, tail: ByLabel | ByNumber | None, found: Recovered, gradient: Tensor, seed: int
) -> tuple[Recovered, Tensor]:
    """Samples by the zeros of the layer's inputs, as the model explains them, with all that can be read once they are taken out.

    Also combinations of rows that nobody can put to the model.
    """
    columns = torch.randperm(gradient.shape[1], generator=torch.Generator().manual_seed(seed))[:MOST_COLUMNS]
    rows = gradient[system.kept.to(gradient.device)][:, columns.to(gradient.device)].double()
    spanned = ((system.basis / system.sizes[:, None]).T.to(rows) @ rows).cpu()
    known = found.coefficients * system.sizes @ system.basis if len(found) else None
    asks = isinstance(tail, ByLabel) and system.tells_samples_apart

    def accept(combination: Tensor) -> bool:
        return not asks or _explained(system, tail, _over_rows(system, combination[None])) is not None  # type: ignore[arg-type]

    combined = corners(spanned, rounding=system.rounding, known=known, accept=accept, seed=seed)
    coefficients = _over_rows(system, combined)
    if not asks or len(coefficients) == 0:
        return found, coefficients
    assert isinstance(tail, ByLabel)
    more = _explained(system, tail, coefficients)
    if more is None:  # asked together they may be answered otherwise, by layers in which samples meet
        return found, coefficients
    together = refit(system, tail, found.joined(more))
    return cascade(system, tail, found.output_grads.shape[1], found=together), coefficients[:0]


def _over_rows(system: System, combined: Tensor) -> Tensor:
    """Combinations of the space's directions as combinations of rows. The bias of a sample is one: that fixes its scale."""
    coefficients = combined @ system.basis.T / system.sizes
    return (coefficients / (coefficients @ system.bias)[:, None]).nan_to_num(0.0, 0.0, 0.0)


def _explained(system: System, tail: ByLabel, coefficients: Tensor) -> Recovered | None:
    """Those that the model explains with some label: it says what each adds to every row, and that lies in the space of backprops."""
    z = coefficients @ system.products
    least = z.new_full((len(z),), torch.inf)
    labels = torch.full((len(z),), -1)
    for candidate, grads in tail.each_label(z):
        miss = system.outside(tail.backprops(z, grads)).nan_to_num(torch.inf)
        labels = torch.where(miss < least, candidate, labels)
        least = torch.minimum(least, miss)
    fine = least < LOOSE
    if not bool(fine.any()):
        return None
    z, coefficients, labels = z[fine], coefficients[fine], labels[fine]
    output_grads = tail.single(z, labels)
    backprops = tail.backprops(z, output_grads)
    return Recovered(coefficients, backprops, labels, output_grads, (backprops / system.sizes).abs().argmax(1))
