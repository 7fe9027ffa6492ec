"""Stock filters, and what settings are worth."""

from typing import Any

from tables.reading import RECOGNISABLE, load, table

CLEAR = "psnr>30"


def filters() -> str:
    """What servers read through every stock filter, over seeds."""
    rows = [
        [_name(r), *(_both(r["read"][s]) for s in ("passive", "cascade", "qbi")), _percent(r["accuracy"], 1)]
        for r in load("filters")["rows"]
    ]
    return table(["filter", "passive", "cascade", "QBI", "accuracy, %"], rows)


def filters_learned() -> str:
    """The same filters against the learned server."""
    rows = []
    for r in load("learned-filters")["rows"]:
        scales = ", ".join(f"{s:g}" for s in dict.fromkeys(r["scale"]))
        rows.append([_name(r), _both(r["read"]), _both(r["control"]), scales])
    return table(["filter", "learned", "control", "scale"], rows)


def filters_worth() -> str:
    """What every stock filter claims, and what it holds."""
    rows = [
        [_name(r), _said(r["claimed"]), _said(r["epsilon"]), _said(r["in all"])]
        for r in load("filters")["rows"]
        if r["about"] is not None
    ]
    return table(["filter", "ε claimed", "ε of a round", "ε of 20 rounds"], rows)


def filters_seeds(name: str = "filters") -> str:
    """How many seeds."""
    return f"{load(name)['seeds']} seeds"


def learned_through(name: str, settings: str) -> str:
    """What the learned server reads through one filter, at 30 and at 19 dB."""
    rows = load("learned-filters")["rows"]
    found = next(r for r in rows if (r["filter"], r["settings"]) == (name, settings))["read"]
    return f"{100 * found[CLEAR]['mean']:.0f} % at 30 dB and {100 * found[RECOGNISABLE]['mean']:.0f} % at 19 dB"


def learned_guess() -> str:
    """The most that the control reaches."""
    return _most([r["control"] for r in load("learned-filters")["rows"]])


def learned_least() -> str:
    """The most that the learned server reads through filters that add much noise."""
    rows = load("learned-filters")["rows"]
    held = ("SVTPrivacy", "Opacus")
    return _most([r["read"] for r in rows if r["filter"] in held or r["settings"] == "clip 1, sensitivity 1, ε 1"])


def _most(found: list[dict[str, Any]]) -> str:
    clear, seen = (max(100 * f[key]["mean"] for f in found) for key in (CLEAR, RECOGNISABLE))
    return f"{clear:.0f} % at 30 dB and at most {seen:.1f} % at 19 dB"


def _name(row: dict[str, str]) -> str:
    return row["filter"] + (f" ({row['settings']})" if row["settings"] else "")


def _both(found: dict[str, Any]) -> str:
    return f"{_percent(found[CLEAR])}, {_percent(found[RECOGNISABLE])}"


def _percent(value: dict[str, Any], digits: int = 0) -> str:
    """Mean and spread over seeds; a spread that would be written as zero is left out."""
    mean, spread = (f"{100 * value[k]:.{digits}f}" for k in ("mean", "spread"))
    return mean if float(spread) == 0 else f"{mean} ± {spread}"


def _said(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
