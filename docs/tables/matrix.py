"""Attacks against defences."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from tables.reading import EXACT, FAITHFUL, RECOGNISABLE, load, table


def _two(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "–"
    return f"{100 * outcome['recall'][FAITHFUL]:.0f}, {100 * outcome['recall'][RECOGNISABLE]:.0f}"


def _matrix(name: str) -> tuple[list[str], list[str], list[int], dict[tuple[str, str, int], dict[str, Any]]]:
    outcomes = load(name)["outcomes"]
    found = {(o["attack"], o["defence"], o["batch_size"]): o for o in outcomes}
    return (
        list(dict.fromkeys(o["attack"] for o in outcomes)),
        list(dict.fromkeys(o["defence"] for o in outcomes)),
        sorted({o["batch_size"] for o in outcomes}),
        found,
    )


def compared(name: str, sizes: Sequence[int] = ()) -> str:
    """R at 60 and 19 dB of every pair."""
    attacks, defences, every, found = _matrix(name)
    rows = [
        [str(size), defence, *(_two(found.get((attack, defence, size))) for attack in attacks)]
        for size in sizes or every
        for defence in defences
    ]
    return table(["B", "defence", *attacks], rows)


def _accuracy(defence: str) -> tuple[float, float]:
    """The mean over batch sizes, and the largest half-width of one."""
    found = [e["accuracies"] for e in load("compare")["accuracy"] if e["defence"] == defence]
    half = [2.776 * statistics.stdev(a) / len(a) ** 0.5 for a in found]  # Student's t, five trainings
    return 100 * statistics.fmean(statistics.fmean(a) for a in found), 100 * max(half)


ROW_BY_ROW = ("qbi", "pairs", "trap-weights", "imprint", "mirrored")

WHOLE = ("passive", "cascade", "scaled", "copies")


def worst_cases() -> str:
    """What each defence leaves at most, of servers that read row by row and of those that read an answer as a whole."""
    _, defences, _, _ = _matrix("compare")
    rows = []
    for defence in defences:
        cells = [defence]
        for attacks in (ROW_BY_ROW, WHOLE):
            for name in ("compare", "rounds"):
                own = [o for o in load(name)["outcomes"] if o["defence"] == defence and o["attack"] in attacks]
                cells.append(
                    f"{max(100 * o['recall'][FAITHFUL] for o in own):.0f}, {max(100 * o['recall'][RECOGNISABLE] for o in own):.0f}"
                )
        exposed = max(o["exposed"] for o in load("rounds")["outcomes"] if o["defence"] == defence)
        mean, half = _accuracy(defence)
        rows.append([*cells, f"{100 * exposed:.1f} %", f"{mean:.1f} (± {half:.1f})"])
    head = ["defence", "row by row, one round", "16 rounds", "as a whole, one round", "16 rounds"]
    return table([*head, "exact values", "accuracy"], rows)


def worst(defence: str, attack: str, size: int, level: str = FAITHFUL) -> str:
    """One R in percent."""
    return f"{100 * _matrix('compare')[3][attack, defence, size]['recall'][level]:.0f} %"


def aggp_imagenet() -> str:
    """AGGP at the paper's twelve settings on ImageNet."""
    rows = []
    for neurons in (200, 500, 1000):
        attacks, _, sizes, found = _matrix(f"aggp-imagenet-{neurons}")
        for size in sizes:
            cells = []
            for attack in attacks:
                before, after = found[attack, "none", size]["recall"], found[attack, "aggp", size]["recall"]
                cells.append(f"{100 * before[EXACT]:.0f} → {100 * after[EXACT]:.0f} ({100 * after[RECOGNISABLE]:.0f})")
            rows.append([f"({neurons}, {size})", *cells])
    return table(["(N, B)", "qbi", "pairs", "trap-weights"], rows)


def epsilons() -> str:
    """What the accountant gives for three epochs on the training images of the comparison."""
    from qbi.defences import DPSGD

    rows = []
    for size in (20, 64, 200):
        steps = 3 * math.ceil(4882 / size)
        rows.append(
            [
                str(size),
                str(steps),
                f"{DPSGD(1.0, 1.0).guarantee(sample_rate=size / 4882, steps=steps, delta=1e-5).epsilon:.2f}",
            ]
        )
    return table(["B", "steps", "ε at δ = 10⁻⁵"], rows)
