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

COARSEST_SILENCE = 1e-4
"""Rounding of gradients above which silent rows prove nothing."""


def _silent_where_it_must_be(system: System, backprops: Tensor, z: Tensor) -> Tensor:
    """Whether each sample sends nothing through just the rows that it leaves silent: the proof where nothing can be said of labels."""
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
    varied: bool = False,
    batch_size: int | None = None,
) -> Candidates:
    """Read a rectified layer from its gradients and the weights that were sent, nothing being known of the rest of the model.

    A batch that unmixing takes apart proves itself: each sample sends nothing through just the rows that it leaves silent. That holds
    where samples send back `varied` things, and where there are as many independent ones as samples in the batch; else samples that fire
    the same rows look like one.
    """
    single = read_rows(weight_gradient, bias_gradient, rounding=rounding)
    single = replace(single, **unproven(len(single.rows), single.samples))
    try:
        system = build_system(weight_gradient, bias_gradient, weight, bias, rounding=rounding)
    except CannotRead:
        return single
    if not system.tells_samples_apart:
        return single
    unmixed = unmix(system, weight_gradient, shape)
    solved = coefficients_of(system, unmixed.exact) if unmixed.complete else None
    if solved is None:
        return single
    coefficients, backprops = solved
    silent = _silent_where_it_must_be(system, backprops, coefficients @ system.products)
    if not bool(silent.any()):
        return single
    proven = silent & (varied and system.rank == batch_size and system.rounding < COARSEST_SILENCE)
    samples = formed(system, coefficients, weight_gradient).to(single.samples.dtype)
    rows = system.kept[(backprops.abs() / system.sizes).argmax(1)]
    order = proven.to(torch.uint8).argsort(descending=True, stable=True)
    samples, rows, proven = samples[order], rows[order], proven[order]
    first = Candidates(samples, rows, torch.ones_like(rows), **unproven(len(rows), samples))
    return joined(replace(first, certified=proven), single)
