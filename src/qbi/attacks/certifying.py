"""Certificates: which of the samples that are about to be reported are proven, tested on those very samples.

A certificate says that a sample stands in the batch, without anybody having seen the batch. It is given after the last step that changes
a sample, and only if all of this holds:

- gradients are as fine as float32's, so that the tests below are strict;
- the server knows what each label sends back (classes, and cross-entropy as a mean or a sum over samples, of a batch whose size it
  knows): where any target is possible, or another loss, several samples that fire the same rows may look like one;
- the model has three outputs or more: with fewer, all samples send back the same up to a factor, and mixtures look like one;
- nothing behind the layer bends but its own rectifier: where something does, a mixture's outputs are not a mixture of outputs, and
  two samples can be tuned so that it sends what both do;
- the rows it fires tell all output gradients apart: else samples of different labels send the same;
- run through the model, it gives the bias gradient of the row it was read from, all others taken off, to within that row's rounding,
  standing there once: what seems to be there twice may be two samples that are alike;
- that row, all others taken off, gives the very sample that is reported, and two rows more agree: what nobody explained differs between them;
- a sample a tenth larger would send something else: where a loss is saturated, or has corners only, all samples of a label send
  the same, and mixtures pass for one;
- what it sends to all rows lies in the space that the update allows, and nothing else that could be sent through the rows it fires does: several
  samples that fire the same rows fill that space, and their mixtures lie in it;
- it is not one that is listed already, and there are no more of them than samples in the batch;
- of a sample as large as inputs can be, what those tests would let pass is a thousandth of it at most.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from qbi.attacks.by_label import ByLabel
from qbi.attacks.explaining import ByNumber
from qbi.extraction.decoding import certified as allowed
from qbi.extraction.decoding import distinct, expected_noise, row_bound
from qbi.extraction.recovered import Recovered
from qbi.extraction.system import System

COARSEST = 2.0**-20
"""Rounding of gradients above which nothing is certified."""

FEWEST_OUTPUTS = 3
"""With one output, or two classes, every sample sends back the same up to a factor, and a mixture may look like one of them."""

SAME_SAMPLE = 1e-3
"""Relative distance, in pre-activations, between the sample that is reported and what its row gives."""


def certify(
    system: System, tail: ByLabel | ByNumber | None, found: Recovered, batch_size: int
) -> Float64[Tensor, " s"]:
    """Which of the found samples are proven, and up to which share of its row another sample would have passed; infinite for the others."""
    none = torch.full((len(found),), math.inf, dtype=torch.float64, device=found.coefficients.device)
    if len(found) == 0 or not isinstance(tail, ByLabel) or system.rounding > COARSEST or not tail.is_sure:
        return none
    heads = tail.behind.affine_map if tail.behind.outputs >= FEWEST_OUTPUTS else None
    if heads is None:
        return none
    tail = replace(tail, as_it_runs=True)
    z = found.coefficients @ system.products
    everyone = torch.arange(len(found), device=z.device)
    biases = found.coefficients @ system.bias
    noise = expected_noise(system, found)
    row, best = _clearest_rows(system, found, noise)
    mine = found.backprops[everyone, row]
    others = found.backprops[:, row].T - torch.diag(mine)
    left = system.bias[row] - others @ biases
    error = noise[row] / left.abs().clamp_min(1e-300)
    single = tail.single(z, found.labels.clamp_min(0))
    given = (system.products[row] - others @ z) / left[:, None]
    apart = (given - z).norm(dim=1) / z.norm(dim=1).clamp_min(1e-300)
    bound = row_bound(system, error)
    backprops = tail.backprops(z, single)
    fine = (
        best
        & (found.labels >= 0)
        & ((backprops[everyone, row] - left).abs() < bound * left.abs())
        & (apart < SAME_SAMPLE)
        & _tells(tail, found, z, row, mine=backprops[everyone, row], bound=bound)
        & allowed(system, backprops, error, torch.full_like(row, 2))
        & z.isfinite().all(1)
        & _determined(heads.to(z)[:, system.kept], system, z, single, backprops)
    )
    if not bool(fine.any()):
        return none
    kept, _ = distinct(z, everyone[fine], z[:0], torch.zeros_like(z[:, 0]))
    out = none.clone()
    out[kept] = bound[kept]
    return out if len(kept) <= (batch_size or system.rank) else none


def hides_nothing(
    passing: Float64[Tensor, " s"], samples: Float[Tensor, "s m"], largest: float | None
) -> Bool[Tensor, " s"]:
    """Whether no part of another sample can stand in each that is proven, that would matter, if no input is larger than this; never where that is not known.

    Two samples of a label can send back the same but for a factor t. The row test lets t pass up to its bound, and then t times the other
    stands in the one that is read: in inputs that no row weighs nobody would see it.
    """
    longest = math.inf if largest is None else largest * math.sqrt(samples.shape[1])
    none: Tensor = passing.to(samples.device) * longest <= SAME_SAMPLE * samples.double().norm(dim=1)
    return none


OTHERS_OUTSIDE = 1e-6
"""The part, squared, of every other output gradient's backprops that must lie outside the space."""

SENDS = 1e-6
"""Of what the output gradient that sends most sends, squared, the part that every other one must send: less is not seen in float32."""

THIRD = 1e-2
"""Of an output gradient, the part that its third largest entry must have."""

MOST_HELD = 2**24
"""Slopes that are held at a time."""


def _determined(
    heads: Float64[Tensor, "o n"], system: System, z: Tensor, output_grads: Tensor, backprops: Tensor
) -> Bool[Tensor, " s"]:
    """Whether the space allows one output gradient alone, through the rows that a sample fires, and these tell all of them apart."""
    outputs = len(heads)
    foretold = (output_grads @ heads) * (z > 0)
    as_mapped = (foretold - backprops).norm(dim=1) <= 1e-9 * backprops.norm(dim=1)
    # Of cross-entropy they sum to zero.
    heads = torch.linalg.qr(torch.eye(outputs).to(z) - 1 / outputs).Q[:, : outputs - 1].T @ (heads / system.sizes)
    parts = []
    for part in z.nan_to_num().split(max(1, MOST_HELD // heads.numel())):
        sent = heads * (part > 0)[:, None]
        values, vectors = torch.linalg.eigh(sent @ sent.mT)
        sends = values > SENDS * values[:, -1:]
        # In units of what is sent.
        sent = (vectors / values.clamp_min(1e-300).sqrt()[:, None]).mT @ sent
        rest = sent - (sent @ system.basis) @ system.basis.T
        outside = torch.linalg.eigvalsh((rest @ rest.mT).nan_to_num(0.0, 0.0, 0.0))
        parts.append((outside[:, 1] > OTHERS_OUTSIDE) & sends.all(1))
    # Where only two outputs are pulled at, all samples send the same up to a factor, as with two classes.
    third = output_grads.abs().sort(1, descending=True).values[:, FEWEST_OUTPUTS - 1]
    fine: Tensor = torch.cat(parts) & as_mapped & (third > THIRD * output_grads.norm(dim=1))
    return fine


CLEAR_ROWS, CLEARLY = 3, 1e4
"""Rows that a sample must fill clearly, and how many times what is left there it must be."""

LARGER, SHARPLY = 1.1, 10.0
"""By how much a sample is made larger, and how many times its tolerance the row test must then miss by."""


def _tells(
    tail: ByLabel, found: Recovered, z: Tensor, row: Tensor, *, mine: Tensor, bound: Tensor
) -> Bool[Tensor, " s"]:
    """Whether the row test tells a sample from one that fires the same rows."""
    other = LARGER * z
    backprops = tail.backprops(other, tail.single(other, found.labels.clamp_min(0)))
    moved = (backprops[torch.arange(len(z), device=z.device), row] - mine).abs()
    return moved > SHARPLY * bound * mine.abs()


def _clearest_rows(system: System, found: Recovered, noise: Tensor) -> tuple[Tensor, Tensor]:
    """For each sample the row that it fills most, of those that the found samples explain; and whether there are several."""
    sketches = found.coefficients @ system.sketch
    residual = (system.sketch - found.backprops.T @ sketches).norm(dim=1) / system.sketch.shape[1] ** 0.5
    size = sketches.norm(dim=1) / system.sketch.shape[1] ** 0.5
    part = found.backprops.abs() * size[:, None]
    clear = part / (residual + noise).clamp_min(1e-300)
    row = clear.argmax(1)
    return row, (clear > CLEARLY).sum(1) >= CLEAR_ROWS
