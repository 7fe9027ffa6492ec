"""What gradient matching sees; resumed where it was stopped."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qbi.data.open import open_images
from qbi.files import to_json, write_atomically
from qbi.lab.matching import PUBLISHED, MatchTask, one_batch, rows_from, tasks
from qbi.lab.workers import Workers

KEPT = Path("out/matching")
"""Where each batch is written as it is done, below the folder the command is run in; those that lie there are not done again."""

ON_CPU, BATCHES_ON_CPU = "LeNet (Zhu)", 4
"""All that a CPU is asked for: batches of one image of this network, so many of them, and one for each private step; the others take minutes each."""


def matching(data: str) -> dict[str, Any]:
    """CIFAR-10 in batches of 1 to 8; all rows on a GPU, the smallest on a CPU."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    images = open_images(data, size=32, count=6000, seed=0)
    wanted = [t for t in tasks() if on_gpu or _small(t)]
    done = {task: found for task in wanted if (found := _kept(task, device)) is not None}
    left = [task for task in wanted if task not in done]
    jobs = max(1, (os.cpu_count() or 1) - 1) if on_gpu else 1
    for task, found in Workers(min(jobs, max(1, len(left)))).map(_one, left, images.pixels, images.labels, device):
        done[task] = found
        write_atomically(_place(task, device), to_json(found))
        print(f"{len(done)} of {len(wanted)}: {task.key} {found['psnr']:.1f} dB, {found['seconds']:.0f} s", flush=True)
    machine = torch.cuda.get_device_name() if on_gpu else "CPU"
    where = f"{images.name}, {PUBLISHED.steps} steps from {PUBLISHED.restarts} start, total variation {PUBLISHED.smooth}; {machine}, {jobs} at a time"
    return {"provenance": where, "steps": PUBLISHED.steps, "rows": rows_from(done)}


def _one(task: MatchTask, pixels: Tensor, labels: Tensor, device: str) -> dict[str, Any]:
    return one_batch(task, pixels, labels, device=device)


def _small(task: MatchTask) -> bool:
    most = BATCHES_ON_CPU if task.bits is None else 1
    return task.network == ON_CPU and task.batch_size == 1 and task.batch < most


def _place(task: MatchTask, device: str) -> Path:
    return KEPT / f"{device}-{task.key}.json"


def _kept(task: MatchTask, device: str) -> dict[str, Any] | None:
    path = _place(task, device)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
