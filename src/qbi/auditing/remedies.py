"""The strongest attacks again, with defences in place; and what would help, with the number that says how much."""

from collections.abc import Mapping, Sequence

from qbi.auditing.campaign import Attempt, Campaign
from qbi.auditing.client import Client
from qbi.auditing.result import AttackOutcome, Curve, DefenceOutcome
from qbi.auditing.survey import Finding
from qbi.auditing.trial import Trial, read_answer
from qbi.defences import Defence
from qbi.defences.registry import NO_DEFENCE, named
from qbi.metrics import CLEAR, EXACT, RECOGNISABLE, THRESHOLDS, Threshold

TRIED = (NO_DEFENCE, "row-noise-3", "top-10", "auto", "aggp-no-bias", "aggp", "drop-sparse")
"""In the order of what they withstand over all servers of the registry (docs/defences.md)."""

MOST_BATCHES = 3
ALIKE = 0.15
"""Defences that leave as much as the best one within this do alike here; of them the one that withstands most elsewhere is advised."""

WORTH_IT = 0.1
"""A change of R below this is no advice."""


def defended(campaign: Campaign, attempts: Sequence[Attempt]) -> tuple[DefenceOutcome, ...]:
    """Attacks again, on the same batches, with each defence: what the one that reads most leaves with it."""
    defences = {key: named(key) for key in TRIED}
    each = [_shares(campaign, attempt, defences) for attempt in attempts]
    return tuple(
        DefenceOutcome(
            defence.name,
            defence.kind,
            {t: max(shares[key][t] for shares in each) for t in THRESHOLDS},
            is_baseline=key == NO_DEFENCE,
        )
        for key, defence in defences.items()
    )


def _shares(campaign: Campaign, attempt: Attempt, defences: Mapping[str, Defence]) -> dict[str, dict[Threshold, float]]:
    """What one attack reads through each defence, as means over the batches."""
    mounted = attempt.mounted
    found: dict[str, list[Trial]] = {key: [] for key in defences}
    for number in range(min(campaign.batches, MOST_BATCHES)):
        if mounted.attack.crafts:
            campaign.write(mounted, number, attempt.outcome.gain)
        answer = campaign.answer(mounted, number)
        for key, defence in defences.items():
            seed = campaign.seed + number
            found[key].append(
                read_answer(
                    mounted, answer, campaign.samples, campaign.client, campaign.loss, defence=defence, seed=seed
                )
            )
    return {key: {t: _mean(trials, t) for t in THRESHOLDS} for key, trials in found.items()}


def _mean(trials: Sequence[Trial], threshold: Threshold) -> float:
    """A mean over batches. Features are not looked at: a guess may come within 19 dB of their range, so 30 dB is asked of them."""
    seen = [t.recoveries[threshold if t.in_sample_space or threshold is not RECOGNISABLE else CLEAR] for t in trials]
    return sum(recovery.recall for recovery in seen) / len(seen)


def advise(
    worst: AttackOutcome | None,
    defences: Sequence[DefenceOutcome],
    curve: Curve | None,
    client: Client,
    findings: Sequence[Finding],
) -> tuple[str, ...]:
    """What would help on this model and data, with the number that says how much."""
    if worst is None or worst.recall == 0:
        return ()
    out = []
    without = next((d for d in defences if d.is_baseline), None)
    tried = [d for d in defences if d is not without]
    if without is not None and tried and without.recall[RECOGNISABLE] > 0:
        least = min(d.recall[RECOGNISABLE] for d in tried)
        best = next(d for d in tried if d.recall[RECOGNISABLE] <= least + ALIKE)
        out.append(
            f"Switch on “{best.name}” on the clients ({best.kind}: against the servers tried here, not against every one): what "
            f"the strongest of them reads falls from {100 * without.recall[EXACT]:.0f} % to "
            f"{100 * best.recall[EXACT]:.0f} % exact, {100 * best.recall[RECOGNISABLE]:.0f} % recognisable (measured here)."
        )
    if curve is not None and worst.attack == curve.attack:
        out += _other_sizes(worst, curve, client, findings)
    return tuple(out)


def _other_sizes(worst: AttackOutcome, curve: Curve, client: Client, findings: Sequence[Finding]) -> list[str]:
    out = []
    neurons = next(f.target.neurons for f in findings if f.name == worst.layer)
    now = curve.at(client.batch_size, neurons)
    larger = [b for b in curve.batch_sizes if b >= 4 * client.batch_size and curve.at(b, neurons) <= now - WORTH_IT]
    if larger:
        out.append(
            f"Train with batches of {larger[0]} instead of {client.batch_size}: R falls from {100 * now:.0f} % to "
            f"{100 * curve.at(larger[0], neurons):.0f} % (predicted for this data and this attack)."
        )
    narrower = [n for n in curve.neurons if n <= neurons / 4 and curve.at(client.batch_size, n) <= now - WORTH_IT]
    if narrower:
        out.append(
            f"Make {worst.layer} narrower, {narrower[-1]} neurons instead of {neurons}: "
            f"{100 * curve.at(client.batch_size, narrower[-1]):.0f} % (predicted for this data and this attack)."
        )
    return out
