"""Stock filters against servers that read."""

import logging
from pathlib import Path
from typing import Any

from qbi.data.cifar10 import load_cifar10
from qbi.lab.filters import judged, summed_up
from qbi.lab.stock import FILTERS
from qbi.lab.workers import Workers

SEEDS = 3


def filters(data: str) -> dict[str, Any]:
    """Every stock filter at every setting, over seeds: recall, accuracy, ε claimed and true."""
    tasks = [(number, seed) for number in range(len(FILTERS)) for seed in range(SEEDS)]
    runs = {}
    for task, run in Workers().map(_judged, tasks, data):
        runs[task] = run
        print(task, run, flush=True)
    rows = [summed_up([runs[number, seed] for seed in range(SEEDS)]) for number in range(len(FILTERS))]
    return {"seeds": SEEDS, "rows": rows}


def _judged(task: tuple[int, int], data: str) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # frameworks report every round
    number, seed = task
    return judged(load_cifar10(Path(data)), FILTERS[number], seed)
