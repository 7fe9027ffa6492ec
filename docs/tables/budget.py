"""What the budget promises and costs."""

from typing import Any

from tables.reading import load, table


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    spread = "" if entry["half_width"] is None else f" ± {entry['half_width']:.1f}"
    return f"{entry['accuracy']:.1f}{spread}"


def frontier() -> str:
    """Accuracy by noise, for each network, optimiser and batch size."""
    cells = [c for c in load("frontier")["cells"] if not c["remedy"]]
    noises = sorted({c["noise"] for c in cells})
    rows = []
    for network, optimiser, size in sorted({(c["network"], c["optimiser"], c["batch_size"]) for c in cells}):
        own = {
            c["noise"]: c
            for c in cells
            if (c["network"], c["optimiser"], c["batch_size"]) == (network, optimiser, size)
        }
        rows.append([f"{network}, {optimiser}, B = {size}", *(_cell(own.get(n)) for n in noises)])
    names = ["plain" if n < 0 else "clipped only" if n == 0 else f"σ = {n:g}" for n in noises]
    return table(["", *names], rows)


def remedies() -> str:
    """What lowers the price."""
    cells = [c for c in load("frontier")["cells"] if c["remedy"]]
    rows = []
    noises = (-1.0, 0.1, 0.15, 0.2, 0.3)
    for network, remedy, optimiser, size in sorted(
        {(c["network"], c["remedy"], c["optimiser"], c["batch_size"]) for c in cells}
    ):
        key = (network, remedy, optimiser, size)
        own = {c["noise"]: c for c in cells if (c["network"], c["remedy"], c["optimiser"], c["batch_size"]) == key}
        rows.append([f"{network}, {remedy}, {optimiser}, B = {size}", *(_cell(own.get(n)) for n in noises)])
    return table(["", "plain", *(f"σ = {n:g}" for n in noises[1:])], rows)


def best_case() -> str:
    """The best-case server beside the bounds."""
    head = [
        "σ",
        "bits",
        "read, dB",
        "linear bound",
        "bound",
        "at 19 dB",
        "bound",
        "at 30 dB",
        "read after 16 rounds, dB",
        "at 19 dB",
        "at 30 dB",
    ]
    rows = [
        [
            f"{r['noise']:g}",
            f"{r['bits']:,.1f}",
            f"{r['read 1']:.1f}",
            f"{r['linear 1']:.1f}",
            f"{r['most 1']:.1f}",
            f"{100 * r['19 dB 1']:.1f} %",
            f"{100 * r['chance 1']:.1f} %",
            f"{100 * r['30 dB 1']:.1f} %",
            f"{r['read 16']:.1f}",
            f"{100 * r['19 dB 16']:.1f} %",
            f"{100 * r['30 dB 16']:.1f} %",
        ]
        for r in load("best-case")["rows"]
    ]
    return table(head, rows)


def policies() -> str:
    """The quickstart under every policy."""
    rows = [[name, *(str(v) for v in found)] for name, found in load("policies")["policies"].items()]
    return table(["policy", "seed 0", "seed 1", "seed 2"], rows)


def overhead() -> str:
    """Time and memory of a step."""
    rows = [
        [
            f"{r['model']}, B = {r['batch']}",
            f"{1000 * r['plain']:.1f}",
            f"{1000 * r['budget']:.1f}",
            f"{r['budget'] / r['plain']:.1f}",
            f"{r['budget MiB'] - r['plain MiB']}",
        ]
        for r in load("overhead")["rows"]
    ]
    return table(["model", "plain, ms", "budget, ms", "ratio", "more memory, MiB"], rows)


def at_72() -> dict[str, Any]:
    """The best case at the default budget."""
    found: dict[str, Any] = next(r for r in load("best-case")["rows"] if r["noise"] == 0.1)
    return found


def readat_72() -> str:
    """What the best case reads at the default budget."""
    found = at_72()
    return f"{found['read 1']:.1f} dB, {100 * found['30 dB 1']:.1f} % of images at 30 dB, and {100 * found['19 dB 1']:.0f} % recognisably"


def cost(network: str) -> str:
    """Points between the best plain training and the best one at the default budget."""
    cells = [c for c in load("frontier")["cells"] if c["network"] == network and not c["remedy"]]
    best = {noise: max(c["accuracy"] for c in cells if c["noise"] == noise) for noise in (-1.0, 0.1)}
    return f"{best[-1.0] - best[0.1]:.1f}"
