"""What an honest two-layer network gives away of large batches, to a server that only looks on; resumed where it was stopped."""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbi import client_step, mount
from qbi.attacks import Passive, Reading
from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.data.open import open_images
from qbi.lab.kept import Kept
from qbi.lab.workers import Workers
from qbi.metrics import EXACT, FAITHFUL, match
from qbi.models import two_layer
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData

GRID = {
    32: (
        *((200, size) for size in (20, 50, 100, 120, 150, 180)),
        *((500, size) for size in (100, 200, 300)),
        *((1000, size) for size in (200, 300)),
    ),
    224: ((200, 100), (200, 150), (500, 200), (1000, 200)),
}
"""Neurons and images of a batch, by the side of the images."""
BATCHES, LARGE, FEW = 10, 200, 3
"""Batches of each, and so many beyond a size, and at the larger side."""
SEED, CLASSES = 1, 10
"""The batches of seed 0 were looked at while the reading was written."""


@dataclass(frozen=True)
class UnmixingTask:
    """One batch."""

    side: int
    neurons: int
    size: int
    batch: int = 0

    @property
    def key(self) -> str:
        """A name for a file."""
        return f"{self.side}-{self.neurons}-{self.size}-{self.batch}"


def unmixing(data: str, only: str = "") -> dict[str, Any]:
    """Batches of CIFAR-10 at 32×32, or of photos at 224×224; what was kept of the other stays in the table.

    Args:
        data: the images; of archives with `imagenet` in their name all that is measured at 224×224.
        only: part of the names of entries (side-neurons-images-batch).
    """
    side = 224 if "imagenet" in Path(data).name.lower() else 32
    kept = Kept("unmixing", "cpu")
    images = open_images(data, size=side, count=6000, seed=0)
    left = [t for t in _tasks() if t.side == side and only in t.key and kept.get(t.key) is None]
    jobs = max(1, os.cpu_count() or 1) if side == 32 else 1
    for task, row in Workers(jobs).map(_one, left, images):
        kept.put(task.key, row)
        print(task.key, row, flush=True)
    rows = []
    for first in dict.fromkeys(replace(t, batch=0) for t in _tasks()):
        done = [row for t in _tasks() if replace(t, batch=0) == first and (row := kept.get(t.key)) is not None]
        if done:
            means = {key: sum(row[key] for row in done) / len(done) for key in done[0]}
            spread = float(torch.tensor([row["exact"] for row in done]).std()) if len(done) > 1 else None
            named = {"side": first.side, "neurons": first.neurons, "size": first.size, "batches": len(done)}
            rows.append(named | means | {"deviation": spread})
    return {"rows": rows}


def _tasks() -> list[UnmixingTask]:
    return [
        UnmixingTask(side, neurons, size, number)
        for side, cells in GRID.items()
        for neurons, size in cells
        for number in range(FEW if size > LARGE or side > 32 else BATCHES)
    ]


def _one(task: UnmixingTask, images: ImageData) -> dict[str, float]:
    order = torch.randperm(len(images), generator=generator(SEED, "batch", task.side, task.batch))
    chosen, other = order[: task.size], order[task.size : 2 * task.size]
    x, y = normalised(images, chosen), images.labels[chosen] % CLASSES
    torch.manual_seed(derive_seed(SEED, "weights", task.key) % 2**31)
    model = nn.Sequential(nn.Flatten(), *two_layer(x[0].numel(), task.neurons, CLASSES))
    update = client_step(model, x, y)
    started = time.perf_counter()
    how = Reading(largest=float(x.abs().max()))
    found = mount(model, Passive(), x[:2], generator(SEED, "rows"), layer="1").read(update, how)
    seconds = time.perf_counter() - started
    levels = match(found.samples, flat(x), data_range=4.0)
    control = match(found.samples, flat(normalised(images, other)), data_range=4.0)
    proven = torch.zeros(0) if found.certified is None else found.certified
    return {
        "exact": float(levels[EXACT].recall),
        "faithful": float(levels[FAITHFUL].recall),
        "certified": float(proven.sum()) / task.size,
        "control": float(control[FAITHFUL].recall),
        "seconds": seconds,
    }
