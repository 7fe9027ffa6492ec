"""Settings, best rates and curves of the trainings that a frontier is made of."""

import math
from collections.abc import Sequence
from typing import Any

from qbi.lab.frontier import NETWORKS
from qbi.metrics import mean_interval

KEYS = ("network", "images", "remedy", "optimiser", "batch_size", "noise", "epochs")


def settings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every setting and rate that was trained, with mean and spread over seeds."""
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        found.setdefault((*(row[k] for k in KEYS), row["rate"]), {})[row["seed"]] = 100 * row["accuracy"]
    out = []
    for key, seeds in found.items():
        mean = mean_interval(list(seeds.values()))
        spread = None if math.isnan(mean.half_width) else round(mean.half_width, 2)
        out.append(
            dict(zip((*KEYS, "rate"), key, strict=True))
            | {"accuracy": round(mean.mean, 2), "half_width": spread, "seeds": len(seeds)}
        )
    return sorted(out, key=lambda e: tuple(str(e[k]) if k != "noise" else f"{e[k] + 2:08.4f}" for k in (*KEYS, "rate")))


def best_rates(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each setting, the rate that did best."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in settings(rows):
        key = tuple(entry[k] for k in KEYS)
        if key not in best or entry["accuracy"] > best[key]["accuracy"]:
            best[key] = entry
    return list(best.values())


def curves(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy by noise for each network without a remedy: the best optimiser and batch size at each level."""
    out = []
    for network in NETWORKS:
        own = [c for c in cells if c["network"] == network and not c["remedy"]]
        plain = max((c["accuracy"] for c in own if c["noise"] < 0), default=None)
        noises = sorted({c["noise"] for c in own if c["noise"] > 0})
        if plain is None or not noises:
            continue
        points = [{"noise": n, "accuracy": max(c["accuracy"] for c in own if c["noise"] == n)} for n in noises]
        out.append({"name": network, "plain": plain, "points": points})
    return out
