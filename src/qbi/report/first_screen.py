"""What a report says before anything else: how bad it is, in one word and a few numbers."""

from collections.abc import Mapping
from typing import Any

from qbi.metrics import EXACT, RECOGNISABLE
from qbi.report.wording import threshold_words

MUCH = 0.1
"""The share read above which a finding is called high."""


def severity(document: Mapping[str, Any]) -> dict[str, str]:
    """One word for a ticket, and what it rests on."""
    share, status = document["verdict"]["share"], document["verdict"]["status"]
    if status == "not tested":
        return {"name": "unknown", "chip": "soft", "words": "No attack that was tried read anything; others may."}
    if share > MUCH:
        return {"name": "high", "chip": "exact", "words": "Training samples leave with every update of a client."}
    return {"name": "medium", "chip": "lossy", "words": "Some samples, or parts of them, leave with an update."}


def key_figures(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """The numbers behind the verdict, each with the key of its meaning: of the attack that the verdict names, and of the layers."""
    named = document["verdict"]["attack"], document["verdict"]["layer"]
    worst = next((a for a in document["attacks"] if (a["attack"], a["layer"]) == named), None)
    found = []
    if worst is not None:
        loosest = threshold_words(RECOGNISABLE, document["data"]["kind"])
        read = worst["recovered_from_gradients"]
        found = [
            _figure(EXACT.key, "recovered exactly", read.get(EXACT.key, {}).get("mean")),
            _figure(RECOGNISABLE.key, f"recovered, {loosest}", read.get(RECOGNISABLE.key, {}).get("mean")),
            _figure("guess", "by a guess", worst["guessed"].get(RECOGNISABLE.key)),
        ]
    states = [o["status"] for o in document["outcomes"]]
    for status, term, label in (
        ("leaks", "recall", "layers that leak"),
        ("not tested", "untested", "layers not tested"),
    ):
        found.append({"term": term, "label": label, "value": f"{states.count(status)} of {len(states)}"})
    return found


def _figure(term: str, label: str, share: float | None) -> dict[str, str]:
    return {"term": term, "label": label, "value": "–" if share is None else f"{100 * share:.1f} %"}
