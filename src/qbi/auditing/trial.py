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
from qbi.auditing.spaces import in_sample_space, read_in_space, truth_of
from qbi.carrier import flat
from qbi.defences import Defence
from qbi.errors import DataError
from qbi.exposure import Observation, leakage, observe
from qbi.federation.client import Loss
from qbi.federation.exposed import ClientStep
from qbi.federation.local import local_update, without_decay
from qbi.metrics import THRESHOLDS, Guess, Recoveries, match
from qbi.randomness import generator
from qbi.records import Leakage, Update

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
    elsewhere: Tensor | None = None
    """The same of samples that are in no batch: what somebody who read nothing would guess from."""
    up_to_factor: bool = False
    """Whether the layer has no bias, and what is read is known up to one number."""
    centred: bool = False
    """Whether what comes back to each row adds up to nothing, as behind a batch norm."""

    @cached_property
    def guess(self) -> Guess:
        """What a guess would hit."""
        unit = 1.0 if self.unit is None else self.unit
        others = None if self.elsewhere is None else self.elsewhere / unit
        several = len(self.truth) > len(self.chosen)
        return Guess.of(self.truth / unit, self.recoveries, others, self.span, copies=several)


@dataclass(frozen=True)
class SentUpdate:
    """One answer of the client before anything is done to it, and what only the client knows of it."""

    chosen: Tensor
    inputs: tuple[Tensor, ...]
    step: ClientStep
    seen: Observation
    centred: bool = False
    """Whether what comes back to each row adds up to nothing."""


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
) -> SentUpdate:
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
        return SentUpdate(chosen, inputs, ClientStep(update, ()), observe(model, layer, inputs, seed=seed + number))
    shortcuts = shortcuts or Shortcuts()
    step = shortcuts.step(model, layer, inputs, targets, loss=loss, seed=seed + number)
    exposure = step.exposures[0]
    assert exposure.above is not None
    features, above = exposure.inputs, exposure.above
    if len(features) > len(chosen):
        # Positions that send nothing back are not in the answer.
        sends = exposure.active.any(0)
        sends = sends if bool(sends.any()) else torch.ones_like(sends)
        features, above = features[sends], above[:, sends]
    return SentUpdate(chosen, inputs, step, Observation(features, above), centred=_is_centred(exposure.shares))


CENTRED = 1e-4
"""Sums of a row's shares below this part of their sizes are rounding: a norm behind the layer takes their mean away."""


def _is_centred(shares: Tensor) -> bool:
    size = shares.abs().sum(1)
    alive = size > 0
    small = shares.sum(1).abs()[alive] < CENTRED * size[alive]
    return bool(alive.any()) and shares.shape[1] > 1 and float(small.double().mean()) > 0.9


def read_answer(
    mounted: Mounted,
    answer: SentUpdate,
    samples: Samples,
    client: Client,
    loss: Loss,
    *,
    defence: Defence | None = None,
    seed: int = 0,
    elsewhere: SentUpdate | None = None,
) -> Trial:
    """What a server reads of an answer, with a defence of the client's if there is one."""
    step = answer.step if defence is None else defence.apply(answer.step, generator(seed, "defence", defence.name))
    update = _rounded(step.update, client.precision)
    if client.local_steps:
        update = without_decay(update, mounted.model, client.training, client.local_steps * client.training.epochs)
    targets: Literal["classes", "numbers"] = "numbers" if samples.targets.is_floating_point() else "classes"
    how = Reading(loss=loss, targets=targets, rounding=ROUNDINGS[client.precision], seed=seed)
    exact = in_sample_space(mounted, answer.inputs)
    truth, others = (
        None if a is None else truth_of(mounted, a.inputs, a.seen.features, samples, exact=exact)
        for a in (answer, elsewhere)
    )
    assert truth is not None
    candidates = read_in_space(mounted, update, samples, how, exact=exact)
    read = candidates.samples
    unit, span = _units(truth, samples, mounted.carrier.source, exact=exact)
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
        others,
        up_to_factor=mounted.carrier.reference is not None,
        centred=answer.centred and mounted.carrier.norm is None,
    )


SPAN = 4.0
"""The range of values that are counted in spreads: two of them to either side."""

FINEST = 2.0**-17
"""Spreads below this share of a feature's size are rounding: nothing can be read of them, and nothing is asked."""


def _units(truth: Tensor, samples: Samples, source: int, *, exact: bool) -> tuple[Tensor | None, float]:
    """What errors are measured in: pixels for images; for all else each feature's spread in the data, so that scale changes no verdict."""
    if exact and samples.images is not None:
        return None, samples.data_range
    whole = flat(samples.inputs[source]).float().cpu() if exact else truth.float()
    spread = whole.std(0) if len(whole) > 1 else torch.zeros(whole.shape[1])
    return torch.maximum(spread, FINEST * whole.abs().amax(0)).clamp_min(1e-30).to(truth), SPAN


def _rounded(update: Update, precision: Precision) -> Update:
    if precision == "float32":
        return update
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
    return replace(update, gradients={n: g.to(kind).to(g.dtype) for n, g in update.gradients.items()})
