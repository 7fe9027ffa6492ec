"""What gradient matching sees; resumed where it was stopped."""

from typing import Any

import torch
from torch import Tensor

from qbi.data.open import open_images
from qbi.lab.kept import Kept
from qbi.lab.matching import PUBLISHED, MatchTask, one_batch, rows_from, tasks
from qbi.lab.workers import Workers

ON_CPU = "LeNet (Zhu)"
"""All that a CPU is asked for: batches of one image of this network; the others take minutes each."""
ON_GPU = 6
"""Batches at a time on one GPU: small networks leave it idle."""


def matching(data: str, only: str = "") -> dict[str, Any]:
    """CIFAR-10 in batches of 1 to 8; all rows on a GPU, the smallest on a CPU. What was kept of either counts.

    Args:
        data: the images.
        only: part of the names of entries, as they are printed; all others are taken from what was kept.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = open_images(data, size=32, count=6000, seed=0)
    done: dict[MatchTask, dict[str, Any]] = {}
    for place in ("cpu", "cuda"):
        kept = {task: Kept("matching", place).get(task.key) for task in tasks()}
        done |= {task: found | {"on_gpu": place == "cuda"} for task, found in kept.items() if found is not None}
    asked = [task for task in tasks() if task not in done and only in task.key]
    left = [task for task in asked if device == "cuda" or (task.network, task.batch_size) == (ON_CPU, 1)]
    jobs = min(ON_GPU if device == "cuda" else 1, max(1, len(left)))
    for task, found in Workers(jobs).map(_one, left, images.pixels, images.labels, device):
        Kept("matching", device).put(task.key, found)
        done[task] = found | {"on_gpu": device == "cuda"}
        print(f"{len(done)} of {len(tasks())}: {task.key} {found['psnr']:.1f} dB, {found['seconds']:.0f} s", flush=True)
    where = (
        f"{images.name}, {PUBLISHED.steps} steps from {PUBLISHED.restarts} start, total variation {PUBLISHED.smooth}"
    )
    return {"provenance": where, "steps": PUBLISHED.steps, "rows": rows_from(done)}


def _one(task: MatchTask, pixels: Tensor, labels: Tensor, device: str) -> dict[str, Any]:
    return one_batch(task, pixels, labels, device=device)
