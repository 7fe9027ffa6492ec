"""The example's federation."""

import statistics
from typing import Any

from tables.reading import load, table


def flower() -> str:
    """The example's federation with and without the guard."""
    rows = [
        [
            "budget" if r["guard"] else "none",
            str(r["seed"]),
            f"{100 * r['accuracy']:.1f}",
            f"{sum(r['read in the attack'])} of {r['in the batch']}",
            "–" if r["bits by client"] is None else f"{max(r['bits by client'].values()):.0f}",
        ]
        for r in load("flower")["runs"]
    ]
    for guard in (False, True):
        found = [100 * r["accuracy"] for r in load("flower")["runs"] if r["guard"] is guard]
        half = 2.776 * statistics.stdev(found) / len(found) ** 0.5  # Student's t, five seeds
        rows.append(["budget" if guard else "none", "mean", f"{statistics.fmean(found):.1f} ± {half:.1f}", "", ""])
    return table(
        [
            "guard",
            "seed",
            "accuracy, %",
            "read by the cascade in round 5 (30 dB)",
            "bits of the client that spent most",
        ],
        rows,
    )


def example() -> str:
    """Accuracy, time and memory of the example's federation."""
    found = load("federations")

    def pair(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        runs = found[name]
        return next(r for r in runs if not r["guard"]), next(r for r in runs if r["guard"])

    def share(guard: bool) -> str:
        values = [100 * r["accuracy"] for r in found["accuracy, auto"] if r["guard"] is guard]
        half = 2.776 * statistics.stdev(values) / len(values) ** 0.5  # Student's t, five seeds
        return f"{statistics.fmean(values):.1f} ± {half:.1f} %"

    def timed(name: str, key: str) -> list[str]:
        (plain, auto), (other, budget) = pair(f"{name}, auto"), pair(f"{name}, budget")
        return [
            f"{_seconds((plain[key] + other[key]) / 2)}",
            f"{_seconds(auto[key])}, {auto[key] / plain[key]:.2f} times",
            f"{_seconds(budget[key])}, {budget[key] / other[key]:.2f} times",
        ]

    rows = [["accuracy after 20 rounds, CIFAR-10, 10 clients, two layers, 5 seeds", share(False), share(True), "below"]]
    for name, words in (("small CNN", "the example's small CNN"), ("two layers", "two layers")):
        rows.append([f"a round of 10 clients, {words}, median of 10", *timed(name, "seconds per round")])
        rows.append([f"a client in it, from message to reply, {words}", *timed(name, "seconds per client")])
    for name in ("100 clients", "1,000 clients"):
        plain, auto = pair(f"{name}, auto")
        answered = "" if auto["answered"] == int(name.split()[0].replace(",", "")) else f", {auto['answered']} answered"
        times = [_seconds(r["seconds per round"]) for r in (plain, auto)]
        rows.append([f"{name}, first round with the start of Ray", times[0], times[1] + answered, "–"])
    return table(["", "without guard", "`auto`", "`budget`"], rows)


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
