"""The verdict in one or two sentences."""

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
        return (
            _reads(worst, result)
            + _exactly(worst, result)
            + _pictures(result)
            + _sentences(result)
            + _patches(result)
            + _matching(result)
        )
    if result.status == "leaks":
        beside = (_side_information(result) if result.tokens else "") + _sentences(result)
        return (beside + _patches(result) + _matching(result)).strip()
    return _not_tested(result) + _matching(result)


NOUNS = {"images": "images", "text": "texts"}
"""What a sample is called, by its kind; all else are records."""


def _reads(worst: "AttackOutcome", result: "AuditResult") -> str:
    server = "A malicious server" if worst.crafted else "An honest-but-curious server"
    factor = ", each up to one factor" if worst.up_to_factor else ""
    place = f"(attack: {worst.attack}, layer {worst.layer})"
    noun = NOUNS.get(result.kind, "records") if worst.whole_samples else "feature vectors"
    noun = noun if worst.unit == "samples" else "single positions"
    if worst.recall == 0:
        threshold = next(t for t in THRESHOLDS if worst.reads_at(t))
        return (
            f"{server} can recover {percent(worst.recovered[threshold].mean)} % of the {noun} of a batch "
            f"{threshold_words(threshold, result.kind)}{factor}, none of them exactly {place}; a guess hits "
            f"{100 * worst.guessed.get(threshold, 0.0):.0f} %."
        )
    samples = result.client.samples
    if worst.unit != "samples":
        what = f"{percent(worst.recall)} % of the {noun} of a batch, not whole samples,"
    elif worst.recall == 1:
        what = f"all {samples} {noun} of a batch"
    else:
        what = f"{worst.recall * samples:.1f} of {samples} {noun} of a batch, on average,"
    return f"{server} can recover {what} exactly{factor} {place}."


def _exactly(worst: "AttackOutcome", result: "AuditResult") -> str:
    """What is read exactly, where the attack that reads most reads nothing so."""
    others = [a for a in result.attacks if a.reads and a.recall > 0] if worst.recall == 0 else []
    return " " + _reads(max(others, key=lambda a: a.recall), result) if others else ""


def _pictures(result: "AuditResult") -> str:
    """What a person would see, where pictures were made of features."""
    found = result.decoded
    if found is None or not found.says_more:
        return ""
    share = found.recovered[THRESHOLDS[-1]]
    return f" From the features at layer {found.layer} a decoder makes recognisable pictures of {percent(share)} % of the images."


def _sentences(result: "AuditResult") -> str:
    """What is read of the words themselves, by who only looks on."""
    found = result.sentences
    if found is None or not found.says_more:
        return ""
    return (
        f" An honest-but-curious server can recover {percent(found.exact)} % of the sequences exactly and "
        f"{percent(found.words)} % of the tokens in their place (ROUGE-1 {found.rouge_1:.2f}, ROUGE-2 {found.rouge_2:.2f}; "
        f"span test, layer {found.layers[0]})."
    )


def _patches(result: "AuditResult") -> str:
    """Images put together of the patches of a vision transformer."""
    found = result.patches
    if found is None or not found.says_more:
        return ""
    server = "An honest-but-curious server" if any(found.honest.values()) else "A malicious server"
    threshold = next(t for t in THRESHOLDS if found.share_at(t) > 0)
    return (
        f" {server} can put {percent(found.share_at(threshold))} % of the images of a batch together from one update "
        f"({threshold_words(threshold, result.kind)}; {found.patches} patches of layer {found.layer}, each in its place by "
        f"{found.positions}), and {percent(found.all_updates[threshold])} % from {found.updates} updates in which one class speaks at a time."
    )


def _matching(result: "AuditResult") -> str:
    """What gradient matching made of a small batch; in vain, how long it was tried."""
    found = result.matched
    if found is None or not found.tried:
        return ""
    starts = f"{found.effort.restarts} start{'s' if found.effort.restarts > 1 else ''}"
    long = f"{found.effort.steps:,} steps from {starts}, B = {result.client.batch_size}"
    if not found.says_more:
        return f" Gradient matching ({long}) saw no more than a guess; longer or better descents were not tried."
    threshold = next(t for t in THRESHOLDS if found.share_at(t) > 0)
    return (
        f" An honest-but-curious server can recover {percent(found.recovered[threshold])} % of the images of a batch by gradient matching "
        f"({threshold_words(threshold, result.kind)}; {long}); a guess hits {100 * found.guessed[threshold]:.0f} %."
    )


def percent(share: float) -> str:
    """A share in percent, with two digits where it is small."""
    return f"{100 * share:.0f}" if share == 0 or share >= 0.01 else f"{100 * share:.2g}"


def _side_information(result: "AuditResult") -> str:
    leaking = max(result.tokens, key=lambda s: s.share)
    return (
        f"An honest-but-curious server can recover {100 * leaking.share:.0f} % of the {leaking.what} in a batch "
        f"(layer {leaking.layer}). No whole sample was recovered."
    )


def _not_tested(result: "AuditResult") -> str:
    left = [o for o in result.outcomes if o.status == "not tested"]
    if not left:
        return "Not tested: the model has no trained parameter that an attack could be tried on."
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    tried = ", ".join(dict.fromkeys(a.attack for a in result.attacks))
    said = (
        f"What was tried recovered nothing ({tried}); that says nothing about the rest."
        if tried
        else "Nothing was tried."
    )
    return f"Not tested: “{left[0].layer}” ({left[0].reason.rstrip('.')}){more}. {said}"
