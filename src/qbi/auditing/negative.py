"""Why a layer of which nothing was read is not tested.

An attack that reads nothing shows that this attack reads nothing. Reviews read by hand, one after the other, everything that had ever been called
tested: behind gates that stood at nothing, position by position, where samples repeat, where rounding hides what differs, where few rows
were drawn. So no layer is called safe for having been attacked in vain; only a bound speaks for one. What can be said is what stood in
the way of the attacks, and that is said here, the most telling first.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qbi.auditing.finding import Finding, Untested
from qbi.metrics import EXACT

if TYPE_CHECKING:
    from qbi.auditing.outcomes import AttackOutcome
    from qbi.auditing.result import AuditResult

ENOUGH = 2
"""Crafting attacks, each on every batch: with fewer, that is the reason."""

IN_VAIN = (
    "the attacks that were tried read nothing of it; other rows, and servers that nobody has written, were not tried."
)


def why_not_tested(
    result: "AuditResult", tried: Sequence["AttackOutcome"], missing: Sequence[Untested], finding: Finding | None
) -> str:
    """The reason; it is never empty."""
    whole = [u for u in missing if u.attack == "every attack"]
    if whole:
        return whole[0].reason
    crafted = [a for a in tried if a.crafted]
    if not crafted or finding is None:
        if missing:
            return missing[0].reason
        return "no crafted model was tried on it." if finding is None or finding.attackable else finding.reason
    return _by_client(result) or _by_layer(result, crafted, finding) or _by_effort(result, crafted) or IN_VAIN


def _by_client(result: "AuditResult") -> str:
    client = result.client
    if client.local_steps and client.training.optimiser == "adam":
        return "Adam sends no gradient but a function of it; servers that undo it were not tried."
    if client.local_steps > 1 or client.training.epochs > 1:
        return "rows mix over several local steps; servers that undo this were not tried."
    return ""


def _by_layer(result: "AuditResult", crafted: Sequence["AttackOutcome"], finding: Finding) -> str:
    if all(a.centred for a in crafted):
        return (
            "what comes back to each of its rows adds up to nothing, as behind a norm or a softmax: rows hold differences of "
            "samples only, and attacks that undo this were not tried."
        )
    if any(name in result.elsewhere for name in finding.parameters):
        return "its weights are used in other ways too; servers that tell the uses apart were not tried."
    if finding.reach != "exact":
        return "not every value of a sample was brought to it; servers that set what stands before it otherwise were not tried."
    if any(a.unit != "samples" for a in crafted):
        return "it sees positions one by one; servers that let one of them speak at a time, by what stands behind it, were not tried."
    if not finding.followed:
        return "what stands behind it could not be followed; servers that set it were not tried."
    if not finding.target.has_bias:
        return "it has no bias; rows were silenced by the data's mean alone, and other ways to do so were not tried."
    if any(a.measured.recall > 0 for a in crafted):
        return "samples stood alone in its rows, but too little came back for them; servers that set what stands behind it were not tried."
    if any(a.repeats for a in crafted):
        return "samples of a batch are the same, so none stands alone; servers that count on that were not tried."
    if not finding.target.rectified:
        return "no rectifier stands right behind it; servers that set what stands behind it were not tried."
    return ""


def _by_effort(result: "AuditResult", crafted: Sequence["AttackOutcome"]) -> str:
    full = {a.attack for a in crafted if a.recovered[EXACT].count >= result.batches}
    if len(full) >= ENOUGH:
        return ""
    names = ", ".join(dict.fromkeys(a.attack for a in crafted))
    return f"only {names} was tried, or on one batch only; --layers all tries every attack on every batch."
