"""What honest-but-curious servers see."""

from statistics import mean, stdev
from typing import Any

from tables.reading import load, table

SAID = {
    "as initialised": "as initialised",
    "three rounds": "after three rounds of ten clients",
    "two epochs": "after two epochs",
}
DECODERS = {"closed form": "closed form", "learned": "learned", "earlier network": "network †"}
"""The last were a network alone and a fit with total variation, on a GPU, and were not measured again."""


def pictures() -> str:
    """Batches of honest clients: features that were read, and pictures that were made of them."""
    header = ["network", "decoder", "B", "images", "local steps", "features read, %", "recognisable, %", "at 30 dB, %"]
    return table([*header, "mean", "best guess, %"], [_row(r) for r in sorted(load("pictures")["rows"], key=_order)])


def _order(r: dict[str, Any]) -> tuple[Any, ...]:
    made = list(SAID).index(r["training"]), list(DECODERS).index(r["decoder"])
    return r["network"], *made, -(r["bits"] or 1e9), r["local_steps"], r["batch_size"]


def _row(r: dict[str, Any]) -> list[str]:
    return [
        f"{r['network']}, {SAID[r['training']]}",
        DECODERS[r["decoder"]],
        str(r["batch_size"]),
        str(r["batch_size"] * r["local_steps"] * r["batches"]),
        str(r["local_steps"]) if r["bits"] is None else f"private step, {r['bits']:g} bits",
        _percent(r["features"]),
        _percent(r["recognisable"]),
        _percent(r["clear"]),
        "–" if r["psnr"] is None else f"{r['psnr']:.1f} dB",
        _percent(max(r["guess"], r["nearest"])),
    ]


def initialisations(training: str) -> str:
    """Of the quickstart at 16, over draws of its weights: mean, spread and range."""
    shares = [100 * r["recognisable"] for r in load("pictures")["initialisations"] if r["training"] == training]
    spread = f"{mean(shares):.0f} ± {stdev(shares):.0f} %"
    return f"{spread} over {len(shares)} draws, from {min(shares):.0f} to {max(shares):.0f} %"


def pictures_provenance() -> str:
    """Where and on what it was measured."""
    said: str = load("pictures")["provenance"]
    return said


def seen_at_16(network: str, training: str) -> str:
    """The share of recognisable pictures in batches of 16."""
    wanted = (network, training, 16, 1, None)
    keys = ("network", "training", "batch_size", "local_steps", "bits")
    found = next(r for r in load("pictures")["rows"] if tuple(r[key] for key in keys) == wanted)
    return f"{_percent(found['recognisable'])} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
