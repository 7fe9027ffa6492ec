"""What the site shows beside measurements of the other pages."""

from typing import Any

from qbi.private.goal import Budget
from qbi.theory import guarantees, leakage
from tables.pictures import at_16
from tables.reading import RECOGNISABLE, load, table

CLEAR = "psnr>30"
EXACT = 100.0
"""dB from which on the mean squared error is below 1e-10."""


def expected() -> str:
    """A, P and R by closed form."""
    sizes = (100, 200, 500, 1000)
    rows = [
        [
            str(batch),
            _share(leakage.expected_active(batch)),
            _share(leakage.expected_precision(batch)),
            *(_share(leakage.expected_recall(neurons, batch)) for neurons in sizes),
        ]
        for batch in (2, 8, 20, 50, 100, 200, 500)
    ]
    return table(["B", "A", "P", *(f"R, N = {n:,}" for n in sizes)], rows)


def levels() -> str:
    """What is read of photos at each level of the private step."""
    rows = []
    for row in load("levels")["rows"]:
        bits = row["bits"]
        name = "no guard" if bits is None else f"{bits:,.0f} bits"
        epsilon = "none" if bits is None else f"{guarantees.epsilon(1e-5, guarantees.noise_for_bits(bits)):,.3g}"
        linear = "–" if row["linear"] is None else _seen(row["linear"])
        rows.append([name, epsilon, f"{row['crafted']['attack']}, {_seen(row['crafted'])}", linear])
    return table(["Level", "ε at δ = 10⁻⁵", "Crafted layer, a batch", "Best linear server, one photo alone"], rows)


def levels_data() -> str:
    """How many photos."""
    data = load("levels")
    return (
        f"a batch of {data['shown']} photos for the crafted layers, {data['held out']:,} photos for the linear server"
    )


def levels_guess() -> str:
    """What a guess hits."""
    guess = load("levels")["guess"]
    return f"{guess['psnr']:.1f} dB on average, {_share(guess[RECOGNISABLE])} recognisable"


def quickstart_seen() -> str:
    """Of the picture of the start page."""
    data = at_16("quickstart", "as initialised")[0]
    return (
        f"{_share(data['features'])} of the features are read, {_share(data['recognisable'])} of the photos are recognisable, "
        f"{data['psnr']:.1f} dB on average; by a guess, {_share(max(data['guess'], data['nearest']))}"
    )


def epsilon_8() -> str:
    """What ε = 8 means in one participation."""
    budget = Budget.for_goal(epsilon=8)
    return (
        f"σ = {budget.noise:.2f} of the clip and {budget.bits():.1f} bits; a guess of 1 % becomes "
        f"{100 * guarantees.reconstruction(0.01, budget.noise):.0f} % at most"
    )


def epsilon_of_72() -> str:
    """What the default means as ε, in one participation."""
    return f"ε = {guarantees.epsilon(1e-5, guarantees.noise_for_bits(72)):.0f} at δ = 10⁻⁵"


def near_epsilon_8() -> str:
    """What the best linear server reads at the noise of the table that is nearest to ε = 8, on the side of less noise."""
    noise = Budget.for_goal(epsilon=8).noise
    row = max((r for r in load("best-case")["rows"] if r["noise"] <= noise), key=lambda r: r["noise"])
    data = load("best-case")
    guessed = _share(data["guessed"] / data["held out"])
    shares = (
        f"{_share(row['19 dB 1'])} recognisable (by the mean image alone {guessed}), {_share(row['30 dB 1'])} at 30 dB"
    )
    return f"{row['read 1']:.1f} dB on average at σ = {row['noise']:g}, {shares}"


def in_federation(label: str) -> str:
    """R at 30 dB of one row of the table of federations."""
    found = next(t for t in load("reproduction")["tables"] if t["name"] == "federation")
    entry = next(r for r in found["rows"] if r["label"] == label)["entries"][1]
    return f"{entry['ours']:.0f} %"


def through_filter(name: str, settings: str, server: str) -> str:
    """What a server reads at 30 dB through a stock filter."""
    return _share(_filter(name, settings)["read"][server][CLEAR]["mean"])


def accuracy_with(name: str, settings: str = "") -> str:
    """Of a training through a stock filter."""
    return _share(_filter(name, settings)["accuracy"]["mean"])


def _filter(name: str, settings: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in load("filters")["rows"] if (r["filter"], r["settings"]) == (name, settings))
    return found


def _seen(read: dict[str, Any]) -> str:
    if read["psnr"] >= EXACT:
        return "all exact"
    return f"{read['psnr']:.1f} dB on average, {_share(read[RECOGNISABLE])} recognisable"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %" if value in (0, 1) or value >= 0.1 else f"{100 * value:.1f} %"
