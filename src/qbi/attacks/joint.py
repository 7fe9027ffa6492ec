"""Read an update as a whole: cascade, unmixing, and single rows for what is left, each candidate proven or not."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qbi.attacks.base import Carried, Reading
from qbi.attacks.behind import SeesPositions
from qbi.attacks.by_label import ByLabel
from qbi.attacks.certifying import certify, hides_nothing
from qbi.attacks.edges import by_zeros
from qbi.attacks.explaining import ByNumber, tail_for
from qbi.attacks.on_device import cascaded
from qbi.errors import CannotRead
from qbi.extraction.decoding import distinct, expected_noise, explains_everything, refit
from qbi.extraction.independent import is_image
from qbi.extraction.quotients import read_rows
from qbi.extraction.recovered import Recovered, nothing
from qbi.extraction.system import System, build_system
from qbi.extraction.unmixing import coefficients_of, unmix
from qbi.records import Candidates, Update

COLUMNS = 16_384
"""Values of the samples that are formed at a time."""

GUESSED = 0.05
"""Relative miss of the row test up to which the label of a sample found by unmixing is taken, to be fitted and tested."""


@dataclass(frozen=True)
class _Read:
    """Samples as combinations of rows, best first, and what is known of each."""

    coefficients: Tensor
    passing: Tensor
    """Of those that are proven, up to which share another sample would have passed; infinite for the others."""
    labels: Tensor
    rows: Tensor
    error: Tensor


def read_whole(sent: Carried, update: Update, how: Reading, *, unmixing: bool = True) -> Candidates:
    """Every sample that the update as a whole gives away at a layer, and after them what its single rows give."""
    weight_gradient, bias_gradient = sent.gradients(update)
    single = read_rows(weight_gradient, bias_gradient, carrier=sent.carrier, rounding=how.rounding)
    single = replace(single, **unproven(len(single.rows), single.samples))
    try:
        system = build_system(
            weight_gradient,
            bias_gradient,
            sent.target.weight.detach(),
            _bias_of(sent),
            rounding=how.rounding,
            most_samples=update.samples,
        )
    except CannotRead:
        return single
    found = _decode(system, sent, update, how, weight_gradient, unmixing=unmixing)
    if len(found.coefficients) == 0:
        return single
    samples = formed(system, found.coefficients, weight_gradient).to(single.samples.dtype)
    device = samples.device
    first = Candidates(
        samples=sent.carrier.read(samples),
        rows=system.kept[found.rows].to(device),
        support=torch.ones_like(found.rows).to(device),
        certified=hides_nothing(found.passing, samples, how.largest),
        labels=found.labels.to(device),
        error=found.error.float().to(device),
    )
    return joined(first, single)


def _bias_of(sent: Carried) -> Tensor:
    """Of the layer that was sent; zeros where it has none."""
    target = sent.target
    return target.weight.new_zeros(target.out_features) if target.bias is None else target.bias.detach()


def formed(system: System, coefficients: Tensor, gradient: Tensor) -> Tensor:
    """Samples from their combinations of rows, in float64 over chunks of columns."""
    device = gradient.device
    kept, factors = system.kept.to(device), coefficients.to(device)
    out = torch.empty(len(factors), gradient.shape[1], dtype=gradient.dtype, device=device)
    for start in range(0, gradient.shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        out[:, columns] = (factors @ gradient[kept, columns].double()).to(gradient.dtype)
    return out


def _decode(system: System, sent: Carried, update: Update, how: Reading, gradient: Tensor, *, unmixing: bool) -> _Read:
    tail: ByLabel | ByNumber | None = None
    # Backprops of later steps are those of weights that the server does not have: nothing is proven of them.
    outputs, size = 1, update.batch_size if update.steps == 1 else None
    try:
        tail, outputs = tail_for(sent, update, how, system)
        found = cascaded(system, tail, outputs, gradient.device)
    except SeesPositions:
        return _read_of(system, tail, nothing(system, outputs), size)
    except CannotRead:
        found = nothing(system, outputs)
    # As many independent rows as there are values in a sample: more samples than can be told apart.
    full = system.rank >= gradient.shape[1]
    if not unmixing or full:
        return _read_of(system, tail, found, size)
    shape = sent.carrier.shape if sent.carrier.columns is None else ()
    if is_image(shape):
        # Pixels have few zeros, and programs that find none take long: first what images resemble.
        read, complete = _unmixed(system, tail, found, shape, gradient, size, how.seed)
        if complete:
            return read
    before = len(found)
    found, loose = by_zeros(system, tail, found, gradient, how.seed)
    if len(found) > before or not is_image(shape):
        read, _ = _unmixed(system, tail, found, shape, gradient, size, how.seed)
    return _with_unproven(system, read, loose)


def _unmixed(
    system: System,
    tail: ByLabel | ByNumber | None,
    found: Recovered,
    shape: tuple[int, ...],
    gradient: Tensor,
    size: int | None,
    seed: int,
) -> tuple[_Read, bool]:
    """What the layer's own rectifier gives beside what is known, and whether that is everything."""
    if len(found) >= system.rank or not system.tells_samples_apart:
        return _read_of(system, tail, found, size), len(found) >= system.rank
    try:
        known = found.backprops if len(found) else None
        slopes = None if tail is None else tail.behind.slopes_if_firing(system.kept)
        unmixed = unmix(system, gradient, shape, known=known, slopes=slopes, seed=seed)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return _read_of(system, tail, found, size), False
    directions = torch.cat([unmixed.exact, unmixed.rough], 1)
    solved = coefficients_of(system, directions) if directions.shape[1] == system.rank else None
    read = _read_of(system, tail, found, size)
    if solved is not None:
        read = _together(system, tail, found, *solved, size, complete=unmixed.complete)
    if unmixed.complete:
        return read, True
    return _with_unproven(system, read, unmixed.estimates @ system.basis.T / system.sizes), False


def _read_of(system: System, tail: ByLabel | ByNumber | None, found: Recovered, size: int | None) -> _Read:
    """Samples as they are reported, each with its error and whether it is proven."""
    noise = expected_noise(system, found)
    error = (found.coefficients.square() @ noise.square()).sqrt()
    proven = certify(system, tail if size is not None else None, found, size or 0)
    return _Read(found.coefficients, proven, found.labels, found.rows, error)


def _together(
    system: System,
    tail: ByLabel | ByNumber | None,
    found: Recovered,
    coefficients: Tensor,
    backprops: Tensor,
    size: int | None,
    *,
    complete: bool,
) -> _Read:
    """A whole batch that unmixing gave: fitted through the model where that explains every sample, rough where it does not."""
    rows = (backprops / system.sizes).abs().argmax(1)
    z = coefficients @ system.products
    if complete and tail is not None:
        labels, output_grads, miss = tail.explain_whole(z, backprops, system)
        held = miss >= GUESSED
        if not bool(held.all()):
            holding = _Holding(tail, held, backprops)
            start = Recovered(
                coefficients, holding.backprops(z, output_grads), labels.masked_fill(held, -1), output_grads, rows
            )
            fitted = refit(system, holding, start)
            # A sample too weak to be counted spoils a fit of all rows; then what the cascade found is the better update.
            if explains_everything(system, fitted):
                return _read_of(system, tail, fitted, size)
    first = _read_of(system, tail, found, size)
    everyone = torch.arange(len(z), device=z.device)
    new, _ = distinct(z, everyone, found.coefficients @ system.products, torch.zeros_like(z[:, 0]))
    return _Read(
        torch.cat([first.coefficients, coefficients[new]]),
        torch.cat([first.passing, torch.full_like(z[new, 0], torch.inf)]),
        torch.cat([first.labels, torch.full_like(new, -1)]),
        torch.cat([first.rows, rows[new]]),
        torch.cat([first.error, torch.full_like(z[new, 0], torch.inf)]),
    )


def _with_unproven(system: System, read: _Read, others: Tensor) -> _Read:
    """Combinations of rows that nothing proves, after everything that is known better."""
    if len(others) == 0:
        return read
    z, known = others @ system.products, read.coefficients @ system.products
    new, _ = distinct(z, torch.arange(len(z), device=z.device), known, torch.zeros_like(z[:, 0]))
    others, count = others[new], len(new)
    return _Read(
        torch.cat([read.coefficients, others]),
        torch.cat([read.passing, torch.full((count,), torch.inf, dtype=torch.float64, device=others.device)]),
        torch.cat([read.labels, torch.full((count,), -1, device=others.device)]),
        torch.cat([read.rows, torch.zeros(count, dtype=torch.long, device=others.device)]),
        torch.cat([read.error, torch.full((count,), torch.inf, device=others.device)]),
    )


@dataclass(frozen=True)
class _Holding:
    """The model's word for samples that it explains; for the others, the backprops that unmixing gave."""

    tail: ByLabel | ByNumber
    held: Tensor
    given: Tensor

    @property
    def pins_values(self) -> bool:
        """As the model's."""
        return self.tail.pins_values

    def explain(self, z: Tensor, rows: Tensor, wanted: Tensor, system: System) -> tuple[Tensor, Tensor, Tensor]:
        """As the model says."""
        return self.tail.explain(z, rows, wanted, system)

    def output_grads(self, z: Tensor, labels: Tensor, before: Tensor, system: System) -> Tensor:
        """As the model says; of no matter for the others."""
        return self.tail.output_grads(z, labels.clamp_min(0), before, system)

    def backprops(self, z: Tensor, output_grads: Tensor) -> Tensor:
        """Each from its source."""
        return torch.where(self.held[:, None], self.given, self.tail.backprops(z, output_grads))


def unproven(count: int, like: Tensor) -> dict[str, Tensor]:
    """What is known of candidates that nothing proves."""
    return {
        "certified": torch.zeros(count, dtype=torch.bool, device=like.device),
        "labels": torch.full((count,), -1, device=like.device),
        "error": torch.full((count,), torch.inf, device=like.device),
    }


def joined(first: Candidates, second: Candidates) -> Candidates:
    """Two lists of candidates, one after the other."""
    parts = ("samples", "rows", "support", "certified", "labels", "error")
    return Candidates(**{part: torch.cat([getattr(first, part), getattr(second, part)]) for part in parts})
