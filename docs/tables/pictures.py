"""What honest-but-curious servers see."""

from statistics import mean, stdev
from typing import Any

from tables.reading import load, table

SAID = {
    "as initialised": "as initialised",
    "rate 0.001": "after three rounds, rate 0.001",
    "rate 0.01": "after three rounds, rate 0.01",
    "rate 0.1": "after three rounds, rate 0.1",
    "two epochs": "after two epochs in one place",
}
DECODERS = ("closed form", "stages")


def pictures() -> str:
    """Batches of honest clients: features that were read, and pictures that were made of them."""
    header = ["network", "draw", "decoder", "B", "images", "local steps", "features read, %", "recognisable, %"]
    rows = [_row(r) for r in sorted(load("pictures")["rows"], key=_order)]
    return table([*header, "at 30 dB, %", "mean", "best guess, %"], rows)


def _order(r: dict[str, Any]) -> tuple[Any, ...]:
    made = list(SAID).index(r["training"]), r["seed"]
    return r["network"], *made, -(r["bits"] or 1e9), r["local_steps"], r["batch_size"], DECODERS.index(r["decoder"])


def _row(r: dict[str, Any]) -> list[str]:
    return [
        f"{r['network']}, {SAID[r['training']]}",
        str(r["seed"]),
        r["decoder"],
        str(r["batch_size"]),
        str(r["images"]),
        str(r["local_steps"]) if r["bits"] is None else f"private step, {r['bits']:g} bits",
        _percent(r["features"]),
        _percent(r["recognisable"]),
        _percent(r["clear"]),
        "–" if r["psnr"] is None else f"{r['psnr']:.1f} dB",
        _percent(max(r["guess"], r["nearest"])),
    ]


def at_16(network: str, training: str, decoder: str = "stages") -> list[dict[str, Any]]:
    """Rows of plain batches of 16, one for each draw."""
    wanted = (network, training, 16, 1, None, decoder)
    keys = ("network", "training", "batch_size", "local_steps", "bits", "decoder")
    return [r for r in load("pictures")["rows"] if tuple(r[key] for key in keys) == wanted]


def draws(training: str, decoder: str = "stages") -> str:
    """Of the quickstart at 16, over draws of its weights: the mean, and each."""
    shares = [100 * r["recognisable"] for r in at_16("quickstart", training, decoder)]
    each = ", ".join(f"{share:.0f}" for share in shares)
    return f"{mean(shares):.0f} ± {stdev(shares):.0f} % over {len(shares)} draws ({each})"


def trained_accuracy(training: str) -> str:
    """How well the network then classifies."""
    shares = [100 * r["accuracy"] for r in at_16("quickstart", training)]
    return f"{min(shares):.0f} to {max(shares):.0f} %" if len(shares) > 1 else f"{shares[0]:.0f} %"


def pictures_provenance() -> str:
    """Where and on what it was measured."""
    said: str = load("pictures")["provenance"]
    return said


def seen_at_16(network: str, training: str) -> str:
    """The share of recognisable pictures in batches of 16, of the first draw."""
    return f"{_percent(at_16(network, training)[0]['recognisable'])} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
