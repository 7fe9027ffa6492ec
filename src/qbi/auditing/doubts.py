"""Reasons to distrust a verdict, checked one by one; and where nothing was read, why."""

from collections.abc import Sequence

import torch

from qbi.auditing.campaign import GAINS
from qbi.auditing.client import Client
from qbi.auditing.finding import Finding, Untested
from qbi.auditing.outcomes import AttackOutcome
from qbi.auditing.samples import Samples
from qbi.auditing.trial import Trial
from qbi.metrics import EXACT, FAITHFUL
from qbi.report.wording import threshold_words
from qbi.routing.graph import Traced

FEWEST_BATCHES = 3
WIDE = 0.1
"""Half-width of the interval of R above which more batches are asked for."""


def find_doubts(
    findings: Sequence[Finding],
    outcomes: Sequence[AttackOutcome],
    untested: Sequence[Untested],
    trials: Sequence[Trial],
    traced: Traced,
    samples: Samples,
    client: Client,
    batches: int,
) -> tuple[str, ...]:
    """Every reason that applies, the weightiest first."""
    active = [o for o in outcomes if o.crafted]
    out: list[str] = []
    out += [f"{attempt}." for attempt in untested if attempt.attack != "every attack"]
    if traced.how != "fx":
        out.append(
            f"The model was followed by {traced.how} ({traced.note}); what happens outside modules may be missed."
        )
    for outcome in active:
        if outcome.measured.active == 0:
            out.append(f"{outcome.attack} on {outcome.layer}: no neuron fired on any batch; the layer is dead there.")
        rough = outcome.recovered[FAITHFUL].mean
        if rough > outcome.recall + 0.05:
            out.append(
                f"{outcome.attack} on {outcome.layer}: {100 * rough:.0f} % are read {threshold_words(FAITHFUL, samples.kind)} but only "
                f"{100 * outcome.recall:.0f} % exactly; the precision of what is sent ({client.precision}) sets a floor."
            )
        if outcome.gains and outcome.gains[outcome.gain] > outcome.gains.get(GAINS[0], 0.0) + 0.05:
            out.append(
                f"{outcome.attack} on {outcome.layer}: at the usual scale of its rows only "
                f"{100 * outcome.gains[GAINS[0]]:.0f} % would have been read; scale {outcome.gain:g} was used."
            )
        width = outcome.recovered[EXACT].half_width
        if width > WIDE:
            out.append(
                f"{outcome.attack} on {outcome.layer}: R is known to ± {100 * width:.0f} points only; more --batches help."
            )
    if batches < FEWEST_BATCHES:
        out.append(
            f"Only {f'{batches} batches were' if batches > 1 else '1 batch was'} tried; three or more give an interval."
        )
    tokens = max((f.carrier.tokens for f in findings if f.carrier is not None), default=1)
    out += _about_data(trials, samples, tokens)
    if client.local_steps > 1 and any("BatchNorm" in type(m).__name__ for m in traced.model.modules()):
        out.append(
            "With several local steps the batch's BatchNorm statistics are not known; samples behind it stay scaled."
        )
    return tuple(out)


def _about_data(trials: Sequence[Trial], samples: Samples, tokens: int) -> list[str]:
    out = []
    if trials:
        arrived = torch.cat([t.arrived for t in trials[:3]]).double()
        mean, spread = float(arrived.mean()), float(arrived.std())
        if abs(mean) > 0.5 * max(spread, 1e-12) or not 0.3 < spread < 3:
            out.append(
                f"The data reach the rows with mean {mean:.2g} and spread {spread:.2g}, though QBI is made for 0 and 1."
            )
        first = trials[0].arrived
        if tokens == 1 and len(torch.unique(first, dim=0)) < len(first):
            out.append("Some samples of a batch are the same; a repeated sample never stands alone.")
    if len(samples) < 2 * len(trials[0].chosen if trials else samples.targets[:1]):
        out.append(f"There are only {len(samples)} samples; batches overlap, and the interval is too narrow.")
    return out


def why_nothing(findings: Sequence[Finding], outcomes: Sequence[AttackOutcome], trials: Sequence[Trial]) -> list[str]:
    """Where nothing was read by whatever was tried, what may be the reason."""
    if any(o.reads for o in outcomes):
        return []
    if not findings:
        return ["The model has no linear layer; these attacks have nowhere to stand."]
    reachable = [f for f in findings if f.attackable]
    if not reachable:
        reasons = "; ".join(f"{f.name}: {f.reason}" for f in findings[:3])
        return [f"No linear layer can be reached: {reasons}"]
    attacked = [f for f in reachable if f.name in {o.layer for o in outcomes if o.crafted}]
    if not attacked:
        return ["Only the passive server was tried; it reads nothing here. An active one was not asked for."]
    if all(f.target.slope_below == 1 for f in attacked):
        what = ", ".join(f"{f.name} ({f.target.activation})" for f in attacked)
        return [f"No activation that silences rows stands behind {what}: every sample reaches every row."]
    soft = [f for f in attacked if 0 < abs(f.target.slope_below) < 1]
    if soft:
        return [
            f"Behind {f.name} stands {f.target.activation}, which lets {100 * f.target.slope_below:.2g} % of a gradient through "
            "below zero: rows are never quite silent."
            for f in soft
        ]
    if trials and all(t.measured.recall == 0 for t in trials):
        return [
            "No neuron fired for exactly one sample: the batch is too large for this layer, or its samples too alike."
        ]
    return [
        "Samples stood alone in the layer, but the loss sent no gradient for them, or too small a one for the precision."
    ]
