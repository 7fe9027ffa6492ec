"""Detectors."""

import re
from collections import Counter

from tables.reading import load, table


def answers() -> str:
    """Servers that know the detectors."""
    rows = [
        [a["server"], "found" if a["reported"] else "**missed**", f"{a['strength']:.2f}", f"{100 * a['recall']:.0f} %"]
        for a in load("detection")["evasions"]
    ]
    return table(["server", "by `inspect`", "suspicion, in bounds", "read of a batch of 20"], rows)


def held_out() -> str:
    """Benign models that no bound was set on."""
    found = load("detection")
    said = f"{len(found['held-out reported'])} of {found['held-out']}"
    return said + (f": {'; '.join(found['held-out reported'])}" if found["held-out reported"] else "")


def detectors() -> str:
    """Each detector on the models that bounds were set on."""
    found = load("calibration")
    rows = []
    for name, bound in found["bounds"].items():
        extreme = found["most suspicious benign"][name]
        alone = found["found at 1 % false positives"][name]
        rows.append(
            [
                name,
                f"{extreme['most suspicious'] / bound:.2f}",
                f"{extreme['99 %'] / bound:.2f}",
                f"{100 * alone:.0f} %",
            ]
        )
    together = found["found at 1 % false positives"]["all together"]
    rows.append(["all together", "", "", f"{100 * together:.0f} %"])
    head = [
        "detector",
        "most suspicious benign model, in bounds",
        "99 % lie below",
        "crafted models found at 1 % false positives",
    ]
    return table(head, rows)


def in_sample() -> str:
    """Benign models of the kinds that bounds were set on."""
    found = load("calibration")
    said = f"{len(found['benign reported'])} of {found['benign']}"
    return said + (f" ({'; '.join(found['benign reported'])})" if found["benign reported"] else "")


def longer() -> str:
    """MLPs that were trained longer: how many are reported, and which."""
    found = load("longer")
    kinds = Counter(re.sub(r", seed \d+$", "", name) for name in found["benign reported"])
    said = "; ".join(f"{kind}: {count}" for kind, count in kinds.items())
    return f"{len(found['benign reported'])} of {found['benign']} on {found['images']:,} images" + (
        f" ({said})" if said else ""
    )


def crafted_found() -> str:
    """Crafted models."""
    found = load("calibration")
    return f"{found['crafted reported']:,} of {found['crafted']:,}"


def by_attack() -> str:
    """Crafted models, attack by attack."""
    rows = [
        [a["attack"], f"{a['found']} of {a['of']}", f"{a['least strength']:.2f}"]
        for a in load("calibration")["by attack"]
    ]
    return table(["attack", "found", "least suspicious model, in bounds"], rows)


def calibration_data() -> str:
    """What the benign models were trained on."""
    found = load("calibration")
    return f"{found['images']:,} images ({' and '.join(found['slow kinds'])}: {found['images of slow kinds']})"
