"""What honest-but-curious servers see."""

from statistics import mean, stdev

from tables.reading import load, table

SAID = {
    "as initialised": "as initialised",
    "three rounds": "after three rounds of ten clients",
    "two epochs": "after two epochs",
}


def pictures() -> str:
    """Batches of honest clients: features that were read, and pictures that were made of them."""
    rows = [
        [
            f"{r['network']}, {SAID[r['training']]}",
            str(r["batch_size"]),
            str(r["local_steps"]) if r["bits"] is None else f"private step, {r['bits']:g} bits",
            _percent(r["features"]),
            _percent(r["recognisable"]),
            _percent(r["clear"]),
            "–" if r["psnr"] is None else f"{r['psnr']:.1f} dB",
            _percent(max(r["guess"], r["nearest"])),
        ]
        for r in sorted(
            load("pictures")["rows"],
            key=lambda r: (
                r["network"],
                list(SAID).index(r["training"]),
                -(r["bits"] or 1e9),
                r["local_steps"],
                r["batch_size"],
            ),
        )
    ]
    return table(
        ["network", "B", "local steps", "features read, %", "recognisable, %", "at 30 dB, %", "mean", "best guess, %"],
        rows,
    )


def initialisations(training: str) -> str:
    """Of the quickstart at 16, over draws of its weights: mean, spread and range."""
    shares = [100 * r["recognisable"] for r in load("pictures")["initialisations"] if r["training"] == training]
    return f"{mean(shares):.0f} ± {stdev(shares):.0f} % over {len(shares)} draws, from {min(shares):.0f} to {max(shares):.0f} %"


def pictures_provenance() -> str:
    """Where and on what it was measured."""
    said: str = load("pictures")["provenance"]
    return said


def seen_at_16(network: str, training: str) -> str:
    """The share of recognisable pictures in batches of 16."""
    found = next(
        r
        for r in load("pictures")["rows"]
        if (r["network"], r["training"], r["batch_size"], r["local_steps"], r["bits"])
        == (network, training, 16, 1, None)
    )
    return f"{_percent(found['recognisable'])} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
