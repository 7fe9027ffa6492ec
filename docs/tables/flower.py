"""The example's federation."""

import statistics

from scipy import stats

from tables.reading import load, table


def flower() -> str:
    """The example's federation with and without the guard."""
    rows = [
        [
            "private" if r["guard"] else "none",
            str(r["seed"]),
            f"{100 * r['accuracy']:.1f}",
            f"{sum(r['read in the attack'])} of {r['in the batch']}",
            "–" if r["bits by client"] is None else f"{max(r['bits by client'].values()):.0f}",
        ]
        for r in load("flower")["runs"]
    ]
    for guard in (False, True):
        found = [100 * r["accuracy"] for r in load("flower")["runs"] if r["guard"] is guard]
        half = stats.t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / len(found) ** 0.5
        rows.append(["private" if guard else "none", "mean", f"{statistics.fmean(found):.1f} ± {half:.1f}", "", ""])
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
    """Time of the example's federation."""
    found = load("federations")

    def row(name: str, words: str, key: str) -> list[str]:
        plain, private = (next(r for r in found[name] if r["guard"] is guard) for guard in (False, True))
        return [words, _seconds(plain[key]), f"{_seconds(private[key])}, {private[key] / plain[key]:.2f} times"]

    rows = []
    for name, words in (("small CNN", "the example's small CNN"), ("two layers", "two layers")):
        rows.append(row(name, f"a round of 10 clients, {words}, median of 10", "seconds per round"))
        rows.append(row(name, f"a client in it, from message to reply, {words}", "seconds per client"))
    rows.append(row("100 clients", "100 clients, first round with the start of Ray", "seconds per round"))
    return table(["", "without guard", "private step and mod"], rows)


def many() -> str:
    """Up to a thousand clients in one round."""
    rows = []
    for r in load("clients")["runs"]:
        largest = max(r["workers"], key=lambda w: w["peak"])
        rows.append(
            [
                f"{r['clients']:,}",
                "all" if r["wave"] == 0 else str(r["wave"]),
                f"{min(r['answered'], r['in the ledger']):,}",
                _seconds(r["seconds per round"]),
                _seconds(r["seconds of the engine's CPU"]),
                f"{largest['after a tenth']:.0f} MiB",
                f"{largest['peak']:.0f} MiB",
            ]
        )
    return table(
        [
            "clients",
            "under way at once",
            "answered and paid for",
            "the round",
            "CPU time of the engine",
            "largest worker after a tenth of its clients",
            "after all",
        ],
        rows,
    )


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
