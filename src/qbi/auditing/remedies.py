"""The strongest attacks again, with defences in place; and what would help, with the number that says how much."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qbi.auditing.bounds import BoundPoint
from qbi.auditing.campaign import Attempt, Campaign
from qbi.auditing.client import Client
from qbi.auditing.finding import Finding
from qbi.auditing.outcomes import AttackOutcome, Curve, DefenceOutcome
from qbi.auditing.trial import Trial, read_update
from qbi.defences import Defence, StepDefence
from qbi.defences.registry import DEFENCES, NO_DEFENCE
from qbi.errors import BadValue
from qbi.metrics import CLEAR, EXACT, RECOGNISABLE, THRESHOLDS, Threshold
from qbi.private.goal import DEFAULT_BITS

PRIVATE = "private"
TRIED = (NO_DEFENCE, PRIVATE, "row-noise-3", "top-10", "auto", "aggp-no-bias", "aggp", "drop-sparse")
"""The one that holds against every server first; the others in the order of what they withstand here (docs/defences.md)."""

MOST_BATCHES = 3
ALIKE = 0.15
"""Defences that leave as much as the best one within this do alike here; of them the one that withstands most elsewhere is advised."""

WORTH_IT = 0.1
"""A change of R below this is no advice."""


def defended(campaign: Campaign, attempts: Sequence[Attempt]) -> tuple[DefenceOutcome, ...]:
    """Attacks again, on the same batches, with each defence: what the one that reads most leaves with it.

    Where the model is heavy, on one batch; defences that need every sample's own gradient then meet the strongest attack only.
    """
    defences: dict[str, Defence | StepDefence] = {key: DEFENCES[key] for key in TRIED}
    heavy = campaign.heavy
    campaign = replace(campaign, batches=1 if heavy else min(campaign.batches, MOST_BATCHES))
    outer = {key: defence for key, defence in defences.items() if isinstance(defence, Defence)}
    try:
        each = [
            _shares(campaign, attempt, outer if heavy and attempt is not attempts[0] else defences)
            for attempt in attempts
        ]
    except BadValue:
        # Samples that mix in the model cannot be told apart; the advice says what to change.
        del defences[PRIVATE]
        each = [_shares(campaign, attempt, defences) for attempt in attempts]
    return tuple(
        DefenceOutcome(
            defence.name + (", one batch" if heavy and key != NO_DEFENCE else ""),
            defence.kind,
            {t: max(shares[key][t] for shares in each if key in shares) for t in THRESHOLDS},
            is_baseline=key == NO_DEFENCE,
        )
        for key, defence in defences.items()
    )


def _shares(
    campaign: Campaign, attempt: Attempt, defences: Mapping[str, Defence | StepDefence]
) -> dict[str, dict[Threshold, float]]:
    """What one attack reads through each defence, as means over the batches."""
    mounted = attempt.mounted
    found: dict[str, list[Trial]] = {key: [] for key in defences}
    for number in range(campaign.batches):
        if mounted.attack.crafts:
            campaign.write(mounted, number, attempt.outcome.gain)
        own = campaign.update(mounted, number)
        for key, defence in defences.items():
            seed = campaign.seed + number
            sent, after = (
                (own, defence)
                if isinstance(defence, Defence)
                else (campaign.bounded(mounted, own, defence, seed), None)
            )
            found[key].append(
                read_update(mounted, sent, campaign.samples, campaign.client, campaign.loss, defence=after, seed=seed)
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
    points: Sequence[BoundPoint] = (),
) -> tuple[str, ...]:
    """What would help on this model and data, with the number that says how much."""
    if worst is None or worst.recall == 0:
        return ()
    out = []
    without = next((d for d in defences if d.is_baseline), None)
    formal = next((d for d in defences if d.kind == "formal"), None)
    if without is not None and formal is not None:
        out.append(_budget_line(without, formal, points))
    elif without is not None:
        out.append(
            "Replace BatchNorm by GroupNorm (`qbi.with_group_norm(model)`), which keeps samples apart, and then train with "
            "`qbi.Private`: with samples mixed, what leaves about one of them cannot be bounded."
        )
    out += _heuristics(without, [d for d in defences if d.kind != "formal" and not d.is_baseline])
    if curve is not None and worst.attack == curve.attack:
        out += _other_sizes(worst, curve, client, findings)
    return tuple(out)


def _budget_line(without: DefenceOutcome, formal: DefenceOutcome, points: Sequence[BoundPoint]) -> str:
    point = next((p for p in points if p.bits == DEFAULT_BITS), None)
    best = ""
    if point is not None and point.read_psnr is not None:
        best = (
            f" On this data a server that knows its principal components and spends a whole gradient on one sample measured "
            f"{point.read_psnr:.1f} dB; one with a better model of the data may see more."
        )
    return (
        f"Train the clients with the private step: qbi.Private(model, loss, bits={DEFAULT_BITS:g}). At most {DEFAULT_BITS:g} bits about one "
        f"sample leave in a step, whatever a server sends; what the strongest attack here reads falls from "
        f"{100 * without.recall[EXACT]:.0f} % to {100 * formal.recall[EXACT]:.0f} % exact, "
        f"{100 * formal.recall[RECOGNISABLE]:.0f} % recognisable (measured).{best}"
    )


def _heuristics(without: DefenceOutcome | None, tried: Sequence[DefenceOutcome]) -> list[str]:
    if without is None or not tried or without.recall[RECOGNISABLE] == 0:
        return []
    least = min(d.recall[RECOGNISABLE] for d in tried)
    best = next(d for d in tried if d.recall[RECOGNISABLE] <= least + ALIKE)
    return [
        f"Where clipping is out of the question: “{best.name}” (heuristic, known servers only) left {100 * best.recall[EXACT]:.0f} % "
        f"exact, {100 * best.recall[RECOGNISABLE]:.0f} % recognisable here."
    ]


def _other_sizes(worst: AttackOutcome, curve: Curve, client: Client, findings: Sequence[Finding]) -> list[str]:
    out: list[str] = []
    if client.batch_size not in curve.batch_sizes:
        return out  # larger than was predicted for
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
