"""What servers read of text; resumed where it was stopped."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qbi.data.text import load_imdb
from qbi.lab.kept import Kept
from qbi.lab.sentences import HALF, LENGTH, build, judge, train
from qbi.lab.wordpiece import encode, train_wordpiece
from qbi.lab.workers import Workers

TEXTS, HELD = 4000, 1000
"""Reviews that are used, and those of them that no model is trained on."""
BATCHES = 3
SEED = 1
"""The batches of seed 0 were looked at while the reading was written."""
READER = "tokens solved for together, prefixes ranked by sums"
"""How sequences are put together, for tables that were measured before."""
ON_GPU = 6
"""Batches that are read at a time on one GPU: each takes some gigabytes and leaves it idle half of the time."""


@dataclass(frozen=True)
class TextTask:
    """One batch of one setting."""

    kind: str
    what: str
    batch_size: int
    batch: int = 0
    width: int = 768
    rank: int = 0
    steps: int = 0
    """Of training before the gradient is taken."""
    bits: float | None = None
    other: bool = False
    masked: bool = False
    coarse: float = 0.0
    length: int = LENGTH

    @property
    def key(self) -> str:
        """A name for files, and for `--only`."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.kind} {self.what} {self.batch_size} {self.batch}")


def settings() -> Iterator[TextTask]:
    """One for each row of the table; the long ones first."""
    for kind in ("BERT", "GPT-2"):
        yield TextTask(kind, "1,024 wide, trained for 100 steps", 32, width=1024, steps=100)
        yield TextTask(kind, "1,024 wide, as initialised", 32, width=1024)
        yield TextTask(kind, "1,024 wide, another batch", 32, width=1024, other=True)
        yield TextTask(kind, "768 wide, trained for 100 steps", 8, steps=100)
        yield TextTask(kind, "768 wide, as initialised", 8)
        yield TextTask(kind, "768 wide, another batch", 8, other=True)
        yield TextTask(kind, "768 wide, as initialised", 1)
        yield TextTask(kind, "768 wide, 8 to 32 tokens under a mask", 8, masked=True)
        yield TextTask(kind, "768 wide, under a mask, another batch", 8, masked=True, other=True)
        yield TextTask(kind, "768 wide, sent in bfloat16", 8, coarse=HALF)
        yield TextTask(kind, "768 wide, noise of a thousandth", 8, coarse=1e-3)
    yield TextTask("BERT", "768 wide, noise of a hundredth", 8, coarse=1e-2)
    yield TextTask("BERT", "768 wide, noise of a thousandth, another batch", 8, coarse=1e-3, other=True)
    for rank in (8, 256):
        yield TextTask("BERT", f"768 wide, LoRA {rank}, as initialised", 4, rank=rank)
        yield TextTask("BERT", f"768 wide, LoRA {rank}, after a step", 4, rank=rank, steps=1)
    for kind in ("BERT", "GPT-2"):
        yield TextTask(kind, "1,024 wide, as initialised", 64, width=1024)
        yield TextTask(kind, "2,048 wide, as initialised", 128, width=2048)
        yield TextTask(kind, "1,024 wide, 12 tokens, as initialised", 64, width=1024, length=12)
        yield TextTask(kind, "2,048 wide, 12 tokens, as initialised", 128, width=2048, length=12)
        yield TextTask(kind, "2,048 wide, 12 tokens, another batch", 128, width=2048, length=12, other=True)
    yield TextTask("BERT", "256 wide, as initialised", 4, width=256)
    for bits in (72.0, 18.0, 8.0):
        yield TextTask("BERT", f"256 wide, private step, {bits:g} bits", 4, width=256, bits=bits)


def sentences(data: str, only: str = "") -> dict[str, Any]:
    """Batches of 32 tokens of IMDB reviews, on a GPU where there is one.

    Args:
        data: the archive or folder of the reviews.
        only: part of the names of entries, as they are printed; all others are taken from what was kept.
    """
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    tasks = [TextTask(**{**task.__dict__, "batch": number}) for task in settings() for number in range(BATCHES)]
    kept = Kept("sentences", device)
    found = {task: row for task in tasks if (row := kept.get(task.key)) is not None}
    left = [task for task in tasks if task not in found and only in task.key]
    jobs = min(ON_GPU if on_gpu else os.cpu_count() or 1, max(1, len(left)))
    for task, row in Workers(jobs).map(one_batch, left, *texts(data), device):
        found[task] = row
        kept.put(task.key, row)
        print(f"{len(found)} of {len(tasks)}: {task.key} {row}", flush=True)
    machine = f"{torch.cuda.get_device_name()}, {ON_GPU} batches at a time" if on_gpu else "CPU, a core for each batch"
    where = f"IMDB reviews, the first {LENGTH} WordPiece tokens ([CLS] first), a vocabulary of 30,522 trained on {TEXTS:,} reviews, three layers; {BATCHES} batches, seed {SEED}; {machine}"
    return {"provenance": where, "reader": READER, "rows": rows_from(found)}


def rows_from(found: dict[TextTask, dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the batches that were done."""
    rows = []
    for task in settings():
        own = [row for done, row in found.items() if TextTask(**{**done.__dict__, "batch": 0}) == task]
        if own:
            numbers = {k: sum(row[k] for row in own) / len(own) for k in own[0] if isinstance(own[0][k], float)}
            reason = next((row["reason"] for row in own if row["reason"]), "")
            rows.append({"model": task.kind, "what": task.what, "batch_size": task.batch_size, "batches": len(own)})
            rows[-1] |= {**numbers, "reason": reason}
    return rows


def one_batch(task: TextTask, ids: Tensor, labels: Tensor, device: str = "cpu") -> dict[str, Any]:
    """What is read of it; private steps are taken on the CPU."""
    where = device if task.bits is None else "cpu"
    made = build(task.kind, task.width, rank=task.rank, seed=SEED)
    made.model.to(where)
    ids, labels = ids[:, : task.length].to(where), labels.to(where)
    if task.steps:
        train(made, ids[HELD:], labels[HELD:], task.steps)
    more = {"bits": task.bits, "other": task.other, "masked": task.masked, "coarse": task.coarse}
    return judge(made, ids[:HELD], labels[:HELD], batch_size=task.batch_size, seed=SEED + task.batch, **more)  # type: ignore[arg-type]


def texts(data: str) -> tuple[Tensor, Tensor]:
    """Token ids of the reviews that are long enough, and their labels, in an order of their own."""
    corpus = load_imdb(Path(data))
    order = torch.randperm(len(corpus.texts), generator=torch.Generator().manual_seed(0))[:TEXTS].tolist()
    chosen = [corpus.texts[i][:2000] for i in order]
    ids = encode(chosen, train_wordpiece(chosen, 30_522), LENGTH)
    full = [k for k, own in enumerate(ids) if len(own) == LENGTH]
    return torch.tensor([ids[k] for k in full]), torch.tensor([corpus.labels[order[k]] for k in full])
