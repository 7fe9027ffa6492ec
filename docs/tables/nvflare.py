"""NVFlare's example, with and without the guard."""

import statistics

from scipy import stats

from tables.reading import load, table

AIM = 1.0
"""Points that the guard may cost."""


def _found() -> dict[tuple[bool, float], list[float]]:
    """Accuracies in percent by guard and rate, in the order of seeds."""
    out: dict[tuple[bool, float], list[float]] = {}
    for run in load("nvflare")["runs"]:
        out.setdefault((run["guard"], run["rate"]), []).append(100 * run["accuracy"])
    return out


def nvflare() -> str:
    """Accuracy by seed."""
    rows = []
    for (guard, rate), own in sorted(_found().items()):
        half = stats.t.ppf(0.975, len(own) - 1) * statistics.stdev(own) / len(own) ** 0.5
        each = ", ".join(f"{value:.1f}" for value in own)
        rows.append(["private" if guard else "none", f"{rate:g}", each, f"{statistics.fmean(own):.1f} ± {half:.1f}"])
    return table(["guard", "rate", "accuracy by seed, %", "mean"], rows)


def nvflare_difference() -> str:
    """Private against plain, seed by seed."""
    plain, private = (own for _, own in sorted(_found().items()))
    each = [ours - theirs for theirs, ours in zip(plain, private, strict=True)]
    mean = statistics.fmean(each)
    half = stats.t.ppf(0.975, len(each) - 1) * statistics.stdev(each) / len(each) ** 0.5
    word = "more" if mean > 0 else "less"
    met = "met" if mean - half >= -AIM else "met on average" if mean >= -AIM else "missed on average"
    return f"{abs(mean):.1f} ± {half:.1f} points {word} than plain training; the aim of at most one point less is {met}"
