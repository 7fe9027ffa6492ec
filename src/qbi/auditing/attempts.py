"""Which attacks are tried on which layers: all layers briefly, the one that gives most away in full."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from qbi.attacks import Attack
from qbi.auditing.campaign import Attempt, Campaign
from qbi.auditing.finding import Finding, Untested
from qbi.auditing.survey import left_alone, probe_of
from qbi.errors import BadValue

Progress = Callable[[str], None]

BRIEFLY, MOST_WORK = 12, 1.5e11
"""Layers that are tried briefly in any case, those that look most exposed first; and operations up to which more are."""


def all_attempts(
    campaign: Campaign,
    attacks: Sequence[type[Attack]],
    findings: Sequence[Finding],
    layers: str,
    say: Progress,
) -> tuple[list[Attempt], list[Untested]]:
    """Every attack: those that craft nothing on all layers, the others on the chosen ones."""
    attempts: list[Attempt] = []
    untested: list[Untested] = []
    chosen = _chosen(findings, layers)
    heads = [f for f in chosen if f.is_head]
    crafting = [a for a in attacks if a.crafts and not a.heads]
    brief: list[Attempt] = []
    if layers == "most exposed" and len(chosen) > 1 and crafting:
        chosen, brief, untested = _briefly(campaign, crafting, chosen, say)
    most = _most(campaign) if layers == "most exposed" else len(findings)
    ranked = sorted(findings, key=lambda f: (f.is_head, f.rank), reverse=True)
    kept = {id(f) for f in ranked[:most]}
    for attack in (a for a in attacks if not a.crafts):
        say(attack.name)
        untested += [Untested(attack.name, f.name, _too_many(most)) for f in ranked[most:]]
        for tried in campaign.on_the_model_as_it_is(attack, [f for f in findings if id(f) in kept]):
            (untested if isinstance(tried, Untested) else attempts).append(tried)  # type: ignore[arg-type]
    pairs = [(attack, finding) for finding in chosen for attack in crafting]
    pairs += [(attack, finding) for finding in heads for attack in attacks if attack.heads]
    for attack, finding in pairs:
        say(f"{attack.name} on {finding.name}")
        found = campaign.crafted(attack, finding)
        if isinstance(found, Untested):
            untested.append(found)
        else:
            attempts.append(found)
    return [*attempts, *brief], untested


def _briefly(
    campaign: Campaign, attacks: Sequence[type[Attack]], able: Sequence[Finding], say: Progress
) -> tuple[list[Finding], list[Attempt], list[Untested]]:
    """One attack on one batch of every layer; the one that gives most away, and those of which nothing was read and which could be
    called tested, get the full treatment."""
    brief = replace(campaign, batches=1, brief=True)
    attack = next((a for a in attacks if a.quick), attacks[0])
    tried: list[Attempt] = []
    untested: list[Untested] = []
    most = _most(campaign)
    for finding in able[:most]:
        say(f"{attack.name}, briefly, on {finding.name}")
        found = brief.crafted(attack, finding)
        if finding.reach == "lossy" and (isinstance(found, Untested) or not found.outcome.reads):
            probe = probe_of(tuple(part.to(campaign.device) for part in campaign.samples.inputs))
            other = left_alone(finding, campaign.model, probe)
            again = brief.crafted(attack, other) if other.attackable and other is not finding else found
            found = found if isinstance(again, Untested) else again
        (untested if isinstance(found, Untested) else tried).append(found)  # type: ignore[arg-type]
    untested += [Untested("crafted models", f.name, _too_many(most)) for f in able[most:]]
    if not tried:
        return list(able[:1]), [], untested
    worst = max(
        tried, key=lambda a: (a.outcome.reads, *(i.mean for i in a.outcome.recovered.values()), *a.finding.rank)
    )
    unread = [a for a in tried if a is not worst and not a.outcome.reads and a.finding.is_provable]
    unread = unread[: max(1, most // len(attacks))]
    chosen = [worst.finding, *(a.finding for a in unread)]
    # What was read briefly counts, whatever other rows read in full.
    return chosen, [a for a in tried if a.outcome.reads or (a is not worst and a not in unread)], untested


def _most(campaign: Campaign) -> int:
    """How many layers of a model of this size are tried, by the operations that a step takes."""
    each = 3 * max(1.0, campaign.operations) * campaign.client.samples
    return max(BRIEFLY, int(MOST_WORK / each))


def _too_many(most: int) -> str:
    return f"only the {most} layers that look most exposed are tried in a model of this size; --layers all tries every one."


def _chosen(findings: Sequence[Finding], wanted: str) -> list[Finding]:
    able = sorted((f for f in findings if f.attackable), key=lambda f: f.rank, reverse=True)
    if wanted in ("all", "most exposed"):
        return able
    named = [f for f in findings if f.name == wanted]
    if not named:
        known = ", ".join(f.name for f in findings) or "none"
        raise BadValue(f"--layers: the model has no linear layer {wanted!r}; it has {known}.")
    if not named[0].attackable:
        raise BadValue(f"--layers: {wanted} cannot be attacked: {named[0].reason}")
    return named
