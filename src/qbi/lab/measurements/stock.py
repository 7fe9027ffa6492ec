"""Stock filters against servers that read."""

import logging
from pathlib import Path
from typing import Any

from qbi.data.cifar10 import load_cifar10
from qbi.lab.filters import judged, spread_of, summed_up
from qbi.lab.learned_filters import learned
from qbi.lab.stock import FILTERS
from qbi.lab.workers import Workers

SEEDS = 3
LEARNING_SEEDS = 2


def filters(data: str) -> dict[str, Any]:
    """Every stock filter at every setting, over seeds: recall, accuracy, ε claimed and true."""
    tasks = [(number, seed) for number in range(len(FILTERS)) for seed in range(SEEDS)]
    runs = {}
    for task, run in Workers().map(_judged, tasks, data):
        runs[task] = run
        print(task, run, flush=True)
    rows = [summed_up([runs[number, seed] for seed in range(SEEDS)]) for number in range(len(FILTERS))]
    return {"seeds": SEEDS, "rows": rows}


def learned_filters(data: str) -> dict[str, Any]:
    """The learned server against every stock filter, over seeds."""
    seeds = range(LEARNING_SEEDS)
    runs = dict(Workers().map(_learned, seeds, data))
    return {"seeds": len(seeds), "rows": [_over_seeds([runs[s][n] for s in seeds]) for n in range(len(FILTERS))]}


def _over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    said = {k: runs[0][k] for k in ("filter", "settings")}
    chosen = {k: [r[k] for r in runs] for k in ("scale", "silent")}
    read = {who: {key: spread_of([r[who][key] for r in runs]) for key in runs[0][who]} for who in ("read", "control")}
    return {**said, **chosen, **read}


def _learned(seed: int, data: str) -> list[dict[str, Any]]:
    logging.disable(logging.WARNING)
    rows = []
    for row in learned(load_cifar10(Path(data)), seed):
        rows.append(row)
        print(seed, row, flush=True)
    return rows


def _judged(task: tuple[int, int], data: str) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # frameworks report every round
    number, seed = task
    return judged(load_cifar10(Path(data)), FILTERS[number], seed)
