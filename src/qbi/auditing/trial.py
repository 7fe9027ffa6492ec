"""One update of the client, a real step on a real batch, and what a server reads of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from qbi.attacks import Mounted, Reading
from qbi.auditing.client import Client, Precision
from qbi.auditing.samples import Samples
from qbi.auditing.sent_updates import SentUpdate, rounded
from qbi.auditing.spaces import in_sample_space, read_in_space, truth_of
from qbi.carrier import flat
from qbi.defences import Defence
from qbi.exposure import leakage
from qbi.federation.client import Loss
from qbi.federation.local import without_decay
from qbi.metrics import Guess, Recoveries, match, nearest_shown
from qbi.randomness import generator
from qbi.records import Leakage

ROUNDINGS: Mapping[Precision, float | None] = {"float32": None, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""The relative error of what is sent, where it is not that of its type."""


@dataclass(frozen=True)
class Trial:
    """One update of the client: who fired, who was read, and what it looked like."""

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
    repeats: bool = False
    """Whether the same stands in the batch more than once."""
    control: Recoveries | None = None
    """What the same candidates match of a batch that the update says nothing of."""
    centred: bool = False
    """Whether what comes back to each row adds up to nothing, as behind a batch norm."""

    @cached_property
    def guess(self) -> Guess:
        """What a guess would hit."""
        unit = 1.0 if self.unit is None else self.unit
        others = None if self.elsewhere is None else self.elsewhere / unit
        several = len(self.truth) > len(self.chosen)
        return Guess.of(self.truth / unit, self.recoveries, others, self.span, copies=several, control=self.control)


def read_update(
    mounted: Mounted,
    sent: SentUpdate,
    samples: Samples,
    client: Client,
    loss: Loss,
    *,
    defence: Defence | None = None,
    seed: int = 0,
    elsewhere: SentUpdate | None = None,
) -> Trial:
    """What a server reads of an update, with a defence of the client's if there is one."""
    step = sent.step if defence is None else defence.apply(sent.step, generator(seed, "defence", defence.name))
    update = rounded(step.update, client.precision)
    if client.local_steps:
        update = without_decay(update, mounted.model, client.training, client.local_steps * client.training.epochs)
    targets: Literal["classes", "numbers"] = "numbers" if samples.targets.is_floating_point() else "classes"
    # The server knows the range of what clients have: that of all samples that were looked at.
    largest = max(float(a.seen.features.abs().max()) for a in (sent, elsewhere) if a is not None)
    how = Reading(loss=loss, targets=targets, rounding=ROUNDINGS[client.precision], seed=seed, largest=largest)
    exact = in_sample_space(mounted, sent.inputs)
    truth, others = (
        None if a is None else truth_of(mounted, a.inputs, a.seen.features, samples, exact=exact)
        for a in (sent, elsewhere)
    )
    assert truth is not None
    candidates = read_in_space(mounted, update, samples, how, exact=exact)
    read = candidates.samples
    unit, span = _units(truth, samples, mounted.carrier.source, exact=exact)
    compared = (read, truth) if unit is None else (read / unit, truth / unit)
    recoveries = match(*compared, data_range=span)
    control = None
    if others is not None and len(others) >= len(truth) and any(r.recovered.any() for r in recoveries.values()):
        control = match(compared[0], others[: len(truth)] / (1.0 if unit is None else unit), data_range=span)
    shown = nearest_shown(recoveries, read, torch.zeros_like(truth))
    arrived = mounted.carrier.arrived(sent.seen.features).cpu()
    proven = None if candidates.certified is None else int(candidates.certified.sum())
    return Trial(
        leakage(sent.seen.fired.cpu()),
        recoveries,
        truth,
        shown,
        arrived,
        sent.chosen,
        exact,
        proven,
        unit,
        span,
        others,
        repeats=len(truth.unique(dim=0)) < len(truth),
        up_to_factor=mounted.carrier.reference is not None,
        control=control,
        centred=sent.centred and mounted.carrier.norm is None,
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
