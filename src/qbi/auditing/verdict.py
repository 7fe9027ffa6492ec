"""The audit's answer in one or two sentences."""

from typing import TYPE_CHECKING

from qbi.metrics import THRESHOLDS
from qbi.report.wording import threshold_words

if TYPE_CHECKING:
    from qbi.auditing.outcomes import AttackOutcome
    from qbi.auditing.result import AuditResult


def verdict(result: "AuditResult") -> str:
    """What a server reads, or what was tried in vain, or what was not tested."""
    worst = result.worst
    if worst is not None and worst.reads:
        return _reads(worst, result) + _pictures(result) + _sentences(result)
    if result.status == "leaks":
        return (_beside(result) if result.tokens else "") + _sentences(result)
    if result.status == "not tested":
        return _not_tested(result)
    tried = ", ".join(dict.fromkeys(a.attack for a in result.attacks))
    return f"Tested, nothing read: by {tried}. " + (result.doubts[0] if result.doubts else "")


def _reads(worst: "AttackOutcome", result: "AuditResult") -> str:
    samples = result.client.samples
    factor = ", up to one factor each" if worst.up_to_factor else ""
    if worst.recall == 0:
        threshold = next(t for t in THRESHOLDS if worst.reads_at(t))
        return (
            f"A server that {worst.deed} reads {percent(worst.recovered[threshold].mean)} % of {worst.unit} {threshold_words(threshold, result.kind)}{factor} "
            f"(a guess: {100 * worst.guessed.get(threshold, 0.0):.0f} %), none exactly, through “{worst.layer}”."
        )
    count = worst.recall * samples
    if worst.unit != "samples":
        what = f"{percent(worst.recall)} % of the single positions (not whole samples){factor}"
    elif worst.whole_samples:
        what = f"{count:.1f} of {samples} samples, exactly{factor}"
    else:
        what = f"what is left of {count:.1f} of {samples} samples at this layer{factor}"
    return f"A server that {worst.deed} reads {what} (R = {percent(worst.recall)} %), through “{worst.layer}”."


def _pictures(result: "AuditResult") -> str:
    """What a person would see, where pictures were made of features."""
    found = result.decoded
    if found is None or not found.says_more:
        return ""
    share = found.recovered[THRESHOLDS[-1]]
    return f" From the features at “{found.layer}” a decoder makes recognisable pictures of {percent(share)} % of the images."


def _sentences(result: "AuditResult") -> str:
    """What is read of the words themselves, by who only looks on."""
    found = result.sentences
    if found is None or not found.says_more:
        return ""
    return (
        f" A server that only looks on reads sentences: {percent(found.exact)} % of the sequences exactly, {percent(found.words)} % of the tokens in "
        f"their place (ROUGE-1 {found.rouge_1:.2f}, ROUGE-2 {found.rouge_2:.2f}), from the span of “{found.layers[0]}”."
    )


def percent(share: float) -> str:
    """A share in percent, with two digits where it is small."""
    return f"{100 * share:.0f}" if share == 0 or share >= 0.01 else f"{100 * share:.2g}"


def _beside(result: "AuditResult") -> str:
    leaking = max(result.tokens, key=lambda s: s.share)
    return (
        f"A server that only looks on reads {leaking.what}: {100 * leaking.share:.0f} % of those in a batch, through “{leaking.layer}”. "
        "No sample was read whole."
    )


def _not_tested(result: "AuditResult") -> str:
    left = [o for o in result.outcomes if o.status == "not tested"]
    if not left:
        return "Not tested: the model has no trained parameter that an attack could be tried on."
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return f"Not tested: “{left[0].layer}” ({left[0].reason.rstrip('.')}){more}. Nothing was read from what was, which says nothing of the rest."
