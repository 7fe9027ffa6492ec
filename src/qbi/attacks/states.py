"""Reads a layer from its gradients and the weights that were sent, nothing being known of the rest of the model."""

from dataclasses import replace

import torch
from torch import Tensor

from qbi.attacks.joint import formed, joined, unproven
from qbi.errors import CannotRead
from qbi.extraction.quotients import read_rows
from qbi.extraction.system import System, build_system
from qbi.extraction.unmixing import coefficients_of, unmix
from qbi.records import Candidates


def _silent_where_it_must_be(system: System, backprops: Tensor, z: Tensor) -> Tensor:
    """Whether each sample sends nothing through just the rows that it leaves silent.

    A true one does. It is no proof: a sample is a combination of all directions, so one wrong direction spoils others that pass this, and of
    two samples of which one fires all rows of the other, mixtures pass too.
    """
    size = backprops.abs() / system.sizes
    fires = size > 1e-4 * size.amax(1, keepdim=True)
    clear = z.abs() > 1e-3 * z.abs().mean(1, keepdim=True)
    return ((fires == (z > 0)) | ~clear).all(1)


def read_states(
    weight_gradient: Tensor,
    bias_gradient: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    rounding: float | None = None,
    shape: tuple[int, ...] = (),
) -> tuple[Candidates, int]:
    """Read a rectified layer from its gradients and the weights that were sent, nothing being known of the rest of the model.

    Candidates, and how many of them, the first ones, came apart by unmixing and are silent where they must be. Nothing is proven.
    """
    single = read_rows(weight_gradient, bias_gradient, rounding=rounding)
    single = replace(single, **unproven(len(single.rows), single.samples))
    try:
        system = build_system(weight_gradient, bias_gradient, weight, bias, rounding=rounding)
    except CannotRead:
        return single, 0
    if not system.tells_samples_apart:
        return single, 0
    unmixed = unmix(system, weight_gradient, shape)
    solved = coefficients_of(system, unmixed.exact) if unmixed.complete else None
    if solved is None:
        return single, 0
    coefficients, backprops = solved
    silent = _silent_where_it_must_be(system, backprops, coefficients @ system.products)
    if not bool(silent.any()):
        return single, 0
    samples = formed(system, coefficients, weight_gradient).to(single.samples.dtype)
    rows = system.kept[(backprops.abs() / system.sizes).argmax(1)]
    order = silent.to(torch.uint8).argsort(descending=True, stable=True)
    samples, rows = samples[order], rows[order]
    first = Candidates(samples, rows, torch.ones_like(rows), **unproven(len(rows), samples))
    return joined(first, single), int(silent.sum())
