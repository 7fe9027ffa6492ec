"""One answer of the client, a real step on a real batch, and what a server reads of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from qbi.attacks import Mounted, Reading
from qbi.auditing.client import Client, Precision
from qbi.auditing.samples import Samples
from qbi.auditing.shortcut import Shortcuts
from qbi.carrier import Normalised, flat
from qbi.defences import Defence
from qbi.errors import DataError
from qbi.exposure import Observation, leakage, observe
from qbi.federation.client import Loss
from qbi.federation.exposed import ClientStep
from qbi.federation.local import local_update
from qbi.metrics import THRESHOLDS, Recoveries, Threshold, match
from qbi.randomness import generator
from qbi.records import Candidates, Leakage, Update

ROUNDINGS: Mapping[Precision, float | None] = {"float32": None, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""The relative error of what is sent, where it is not that of its type."""


@dataclass(frozen=True)
class Trial:
    """One answer of the client: who fired, who was read, and what it looked like."""

    measured: Leakage
    recoveries: Recoveries
    truth: Tensor
    read: Tensor
    """For each sample (or position) what was read of it at the strictest threshold that has something; zeros else."""
    arrived: Tensor
    chosen: Tensor
    in_sample_space: bool
    certified: int | None = None
    """How many candidates the reader proved without the truth; None where its attack proves none."""
    unit: Tensor | None = None
    """What errors are measured in; pixels, if nothing is said."""
    span: float = 1.0
    """The range of the data in these units."""

    @cached_property
    def guessed(self) -> dict[Threshold, float]:
        """The share that a guess would hit, at each threshold."""
        return guessed(self.truth if self.unit is None else self.truth / self.unit, self.span)


@dataclass(frozen=True)
class Answer:
    """One answer of the client before anything is done to it, and what only the client knows of it."""

    chosen: Tensor
    inputs: tuple[Tensor, ...]
    step: ClientStep
    seen: Observation


def chosen_batch(samples: Samples, client: Client, seed: int, number: int) -> Tensor:
    """Which samples the client trains on in one trial."""
    chosen = torch.randperm(len(samples), generator=generator(seed, "batch", number))[: client.samples]
    if len(chosen) < client.samples:
        raise DataError(f"data: a batch of {client.samples} is larger than the data; there are {len(samples)} samples.")
    return chosen


def take_answer(
    model: nn.Module,
    layer: str,
    samples: Samples,
    client: Client,
    loss: Loss,
    *,
    seed: int,
    number: int,
    device: str = "cpu",
    shortcuts: Shortcuts | None = None,
) -> Answer:
    """The client's answer on a random batch, and what one layer saw of it."""
    chosen = chosen_batch(samples, client, seed, number)
    inputs, targets = samples.batch(chosen, device)
    if client.local_steps:
        size = client.batch_size
        batches = [
            (tuple(part[start : start + size] for part in inputs), targets[start : start + size])
            for start in range(0, client.samples, size)
        ]
        update = local_update(model, batches, client.training, loss=loss, seed=seed + number)
        return Answer(chosen, inputs, ClientStep(update, ()), observe(model, layer, inputs, seed=seed + number))
    shortcuts = shortcuts or Shortcuts()
    step = shortcuts.step(model, layer, inputs, targets, loss=loss, seed=seed + number)
    exposure = step.exposures[0]
    assert exposure.above is not None
    return Answer(chosen, inputs, step, Observation(exposure.inputs, exposure.above))


def read_answer(
    mounted: Mounted,
    answer: Answer,
    samples: Samples,
    client: Client,
    loss: Loss,
    *,
    defence: Defence | None = None,
    seed: int = 0,
) -> Trial:
    """What a server reads of an answer, with a defence of the client's if there is one."""
    step = answer.step if defence is None else defence.apply(answer.step, generator(seed, "defence", defence.name))
    update = _rounded(step.update, client.precision)
    targets: Literal["classes", "numbers"] = "numbers" if samples.targets.is_floating_point() else "classes"
    how = Reading(loss=loss, targets=targets, rounding=ROUNDINGS[client.precision], seed=seed)
    truth, candidates, exact = _read(mounted, update, answer, samples, how)
    read = candidates.samples
    unit, span = _units(truth, samples, exact=exact)
    compared = (read, truth) if unit is None else (read / unit, truth / unit)
    recoveries = match(*compared, data_range=span)
    shown = torch.zeros_like(truth)
    for threshold in reversed(THRESHOLDS):
        recovery = recoveries[threshold]
        shown[recovery.recovered] = read[recovery.candidate[recovery.recovered]].to(shown)
    arrived = mounted.carrier.arrived(answer.seen.features).cpu()
    proven = None if candidates.certified is None else int(candidates.certified.sum())
    return Trial(
        leakage(answer.seen.fired.cpu()),
        recoveries,
        truth,
        shown,
        arrived,
        answer.chosen,
        exact,
        proven,
        unit,
        span,
    )


SPAN = 4.0
"""The range of values that are counted in spreads: two of them to either side."""

FINEST = 2.0**-17
"""Spreads below this share of a feature's size are rounding: nothing can be read of them, and nothing is asked."""


def _units(truth: Tensor, samples: Samples, *, exact: bool) -> tuple[Tensor | None, float]:
    """What errors are measured in: pixels for images; for all else each feature's spread in the data, so that scale changes no verdict."""
    if exact and samples.images is not None:
        return None, samples.data_range
    whole = flat(samples.inputs[0]).float().cpu() if exact else truth.float()
    spread = whole.std(0) if len(whole) > 1 else torch.zeros(whole.shape[1])
    return torch.maximum(spread, FINEST * whole.abs().amax(0)).clamp_min(1e-30).to(truth), SPAN


def guessed(truth: Tensor, span: float) -> dict[Threshold, float]:
    """The share of samples that somebody who read nothing would hit: with the mean of the others, or the nearest other one."""
    count = len(truth)
    if count < 2:
        return dict.fromkeys(THRESHOLDS, 0.0)
    some = truth[:MOST_GUESSED].double()
    others = (truth.double().sum(0) - some) / (count - 1)
    apart = torch.cdist(some, truth.double())
    apart[torch.arange(len(some)), torch.arange(len(some))] = torch.inf
    nearest = torch.minimum((others - some).square().mean(1), apart.amin(1).square() / truth.shape[1])
    return {t: float((nearest < t.largest_error(span)).double().mean()) for t in THRESHOLDS}


MOST_GUESSED = 256


def _rounded(update: Update, precision: Precision) -> Update:
    if precision == "float32":
        return update
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
    return replace(update, gradients={n: g.to(kind).to(g.dtype) for n, g in update.gradients.items()})


def _read(
    mounted: Mounted, update: Update, answer: Answer, samples: Samples, how: Reading
) -> tuple[Tensor, Candidates, bool]:
    """Truth and candidates in one space: the client's own data where the way there is known, the layer's input else."""
    carrier = mounted.carrier
    approximate = any(
        isinstance(step, Normalised) and isinstance(mounted.model.get_submodule(step.layer), nn.LayerNorm)
        for step in carrier.steps
    )
    if carrier.places is None or approximate:
        found = mounted.read_at_layer(update, how)
        known = carrier.standing
        values = (found.samples - known.offset.to(found.samples)) / known.scale.to(found.samples)
        return carrier.arrived(answer.seen.features).cpu(), replace(found, samples=values.cpu()), False
    source = answer.inputs[carrier.source]
    if carrier.embedding is not None:
        with torch.no_grad():
            source = mounted.model.get_submodule(carrier.embedding)(source)
    whole = flat(source.float())
    places = carrier.places.to(whole.device)
    truth = whole[:, places].reshape(-1, places.shape[-1])
    found = mounted.read(update, how)
    # Judged in pixels only where every pixel came along.
    if carrier.tokens == 1 and carrier.features == whole.shape[1] and carrier.embedding is None:
        return samples.pixels(truth).cpu(), replace(found, samples=samples.pixels(found.samples).cpu()), True
    return truth.cpu(), replace(found, samples=found.samples.cpu()), False
