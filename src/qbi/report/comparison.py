"""Two audits beside each other, before and after a change: what a server reads now that it did not, layer by layer and attack by attack."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from qbi.errors import BadValue
from qbi.metrics import EXACT, THRESHOLDS
from qbi.report.wording import threshold_words

Direction = Literal["worse", "better", "same", "unknown"]

GONE = "not there"
"""A layer, or an attack on it, that one of the audits does not have."""


@dataclass(frozen=True)
class Changed:
    """One layer, or one attack on a layer, in both audits; None where an audit has no number for it."""

    what: str
    layer: str
    before: float | None
    after: float | None
    status_before: str
    status_after: str
    change: Direction
    exact_before: float | None = None
    exact_after: float | None = None


@dataclass(frozen=True)
class AuditDiff:
    """What changed between two audits."""

    verdict: str
    change: Literal["worse", "better", "same", "mixed", "unknown"]
    level: str
    model: Changed
    layers: tuple[Changed, ...]
    attacks: tuple[Changed, ...]
    settings: tuple[str, ...]
    """Settings that differ: what changed may be theirs."""

    @property
    def got_worse(self) -> bool:
        """Whether the model or a layer got worse; a layer's gain does not make up for another's loss."""
        return self.change in ("worse", "mixed")

    def document(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"schema": "qbi-diff/1", **asdict(self)}


def compare_audits(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float = 0.0) -> AuditDiff:
    """Both as `load_audit` reads them. Shares that differ by no more than the tolerance are the same."""
    _refuse_other_measures(before, after)
    level = next(t for t in THRESHOLDS if t.key == before["verdict"]["threshold"])
    model = _changed("model", "", before["verdict"], after["verdict"], tolerance)
    layers = _pairs(_by_layer(before), _by_layer(after), tolerance)
    attacks = _pairs(_by_attack(before), _by_attack(after), tolerance)
    model, *rest = _doubted((model, *layers), attacks)
    layers = tuple(rest)
    change = _overall({c.change for c in (model, *layers)})
    verdict = _verdict(change, model, layers, threshold_words(level, before["data"]["kind"]))
    return AuditDiff(verdict, change, level.key, model, layers, attacks, tuple(_settings(before, after)))


def _doubted(found: Sequence[Changed], attacks: Iterable[Changed]) -> list[Changed]:
    """Nothing is better by an attack that was not tried again, where it read more than is read now."""
    left_out = [a for a in attacks if a.status_after == GONE and a.change == "unknown"]

    def after_all(one: Changed) -> Changed:
        more = [a for a in left_out if one.layer in ("", a.layer) and (a.before or 0.0) > (one.after or 0.0)]
        return replace(one, change="unknown") if one.change == "better" and more else one

    return [after_all(one) for one in found]


def _overall(found: set[Direction]) -> Literal["worse", "better", "same", "mixed", "unknown"]:
    """
    >>> _overall({"worse", "better", "same"}), _overall({"better", "unknown"}), _overall({"same"})
    ('mixed', 'unknown', 'same')
    """
    if "worse" in found:
        return "mixed" if "better" in found else "worse"
    return "unknown" if "unknown" in found else "better" if "better" in found else "same"


def _refuse_other_measures(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for place, name, remedy in (
        ("verdict", "threshold", "audit both with the same --fail-at"),
        ("data", "kind", "audit both on the same data"),
    ):
        first, second = before[place][name], after[place][name]
        if first != second:
            raise BadValue(f"diff: the {name} is {first} in one audit and {second} in the other; {remedy}.")


def _by_layer(document: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {("layer", o["layer"]): o for o in document["outcomes"]}


def _by_attack(document: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Attacks; of those tried twice on a layer, the one that read more. And what is read beside samples."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for attack in document["attacks"]:
        place, exact = (attack["attack"], attack["layer"]), attack["recovered_from_gradients"].get(EXACT.key, {})
        entry = {"share": attack["share"], "status": "tried", "exact": exact.get("mean")}
        if place not in found or found[place]["share"] < entry["share"]:
            found[place] = entry
    for side in document["side_information"]:
        found[side["what"], side["layer"]] = {"share": side["share"], "status": "tried"}
    if document["sentences"] is not None:
        found["sentences", "the model"] = {"share": document["sentences"]["words"], "status": "tried"}
    return found


def _pairs(
    before: Mapping[tuple[str, str], Mapping[str, Any]],
    after: Mapping[tuple[str, str], Mapping[str, Any]],
    tolerance: float,
) -> tuple[Changed, ...]:
    places = dict.fromkeys([*before, *after])
    return tuple(_changed(*place, before.get(place), after.get(place), tolerance) for place in places)


def _changed(
    what: str, layer: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, tolerance: float
) -> Changed:
    """What is not there reads nothing: a new layer that leaks is worse, one that is gone is no longer read through."""
    shares = [None if entry is None or entry["status"] == "not tested" else entry["share"] for entry in (before, after)]
    states = [GONE if entry is None else entry["status"] for entry in (before, after)]
    exact = [None if entry is None else entry.get("exact") for entry in (before, after)]
    moved = (shares[1] or 0.0) - (shares[0] or 0.0)
    change: Direction = "same"
    if GONE in states and "tried" in states:
        change = "unknown"
    elif moved > tolerance or _known_less(states[0], states[1], strict=tolerance == 0):
        change = "worse"
    elif states == ["leaks", "not tested"]:
        change = "unknown"
    elif -moved > tolerance or _known_less(states[1], states[0], strict=tolerance == 0):
        change = "better"
    return Changed(what, layer, shares[0], shares[1], states[0], states[1], change, exact[0], exact[1])


def _known_less(first: str, second: str, *, strict: bool) -> bool:
    """Whether the second state is worse whatever the shares are: it leaks and did not, or is no longer tested, or is new and untested.

    >>> _known_less("nothing read", "not tested", strict=False), _known_less("leaks", "not tested", strict=True)
    (True, False)
    """
    if second == "leaks":
        return strict and first != "leaks"
    return second == "not tested" and first in ("nothing read", GONE)


def _verdict(change: str, model: Changed, layers: tuple[Changed, ...], level: str) -> str:
    read = f"a server reads {_said(model.before)} of a batch before and {_said(model.after)} after ({level})"
    named = _names("worse in", [c.layer for c in layers if c.change == "worse"])
    named += _names("not tried again as before:", [c.layer for c in layers if c.change == "unknown"])
    heads = {
        "same": "No change",
        "worse": "Worse",
        "better": "Better",
        "mixed": "Worse in part, better in part",
        "unknown": "Not known to be better",
    }
    return f"{heads[change]}: {read}{named}."


def _names(head: str, layers: list[str]) -> str:
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return f"; {head} {', '.join(layers[:3])}{more}" if layers else ""


def _said(share: float | None) -> str:
    return "an unknown share" if share is None else f"{100 * share:.1f} %"


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs beside the model: each may be the reason for a change."""
    sides = [
        {
            "data": d["data"]["name"],
            "batches": d["batches"],
            "seed": d["seed"],
            **{f"client's {key.replace('_', ' ')}": value for key, value in d["client"].items()},
            "attacks": ", ".join(sorted({a["attack"] for a in d["attacks"]})),
        }
        for d in (before, after)
    ]
    names = dict.fromkeys([*sides[0], *sides[1]])
    return [f"{n}: {sides[0].get(n)} → {sides[1].get(n)}" for n in names if sides[0].get(n) != sides[1].get(n)]
