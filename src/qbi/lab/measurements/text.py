"""What servers read of text."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qbi.data.text import load_imdb
from qbi.lab.sentences import LENGTH, build, judge, train
from qbi.lab.wordpiece import encode, train_wordpiece
from qbi.lab.workers import Workers

TEXTS, HELD = 4000, 1000
"""Reviews that are used, and those of them that no model is trained on."""
BATCHES = 3
SEED = 1
"""The batches of seed 0 were looked at while the reading was written."""


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


def settings() -> Iterator[TextTask]:
    """One for each row of the table; the long ones first."""
    for kind in ("BERT", "GPT-2"):
        yield TextTask(kind, "1,024 wide, as initialised", 32, width=1024)
        yield TextTask(kind, "768 wide, trained for 100 steps", 8, steps=100)
        yield TextTask(kind, "768 wide, as initialised", 8)
        yield TextTask(kind, "768 wide, another batch", 8, other=True)
        yield TextTask(kind, "768 wide, as initialised", 1)
    for rank in (8, 256):
        yield TextTask("BERT", f"768 wide, LoRA {rank}, as initialised", 4, rank=rank)
        yield TextTask("BERT", f"768 wide, LoRA {rank}, after a step", 4, rank=rank, steps=1)
    yield TextTask("BERT", "256 wide, as initialised", 4, width=256)
    for bits in (72.0, 18.0, 8.0):
        yield TextTask("BERT", f"256 wide, private step, {bits:g} bits", 4, width=256, bits=bits)


def sentences(data: str) -> dict[str, Any]:
    """Batches of 32 tokens of IMDB reviews; `data` is the archive or folder of the reviews."""
    tasks = [TextTask(**{**task.__dict__, "batch": number}) for task in settings() for number in range(BATCHES)]
    jobs = os.cpu_count() or 1
    found: dict[TextTask, dict[str, Any]] = {}
    for task, row in Workers(jobs).map(one_batch, tasks, *texts(data)):
        found[task] = row
        print(f"{len(found)} of {len(tasks)}: {task} {row}", flush=True)
    where = f"IMDB reviews, the first {LENGTH} WordPiece tokens ([CLS] first), three layers; {BATCHES} batches, seed {SEED}; {jobs} cores, one for each batch"
    return {"provenance": where, "rows": rows_from(found)}


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


def one_batch(task: TextTask, ids: Tensor, labels: Tensor) -> dict[str, Any]:
    """What is read of it."""
    made = build(task.kind, task.width, rank=task.rank, seed=SEED)
    if task.steps:
        train(made, ids[HELD:], labels[HELD:], task.steps)
    more = {"bits": task.bits, "other": task.other}
    return judge(made, ids[:HELD], labels[:HELD], batch_size=task.batch_size, seed=SEED + task.batch, **more)  # type: ignore[arg-type]


def texts(data: str) -> tuple[Tensor, Tensor]:
    """Token ids of the reviews that are long enough, and their labels, in an order of their own."""
    corpus = load_imdb(Path(data))
    order = torch.randperm(len(corpus.texts), generator=torch.Generator().manual_seed(0))[:TEXTS].tolist()
    chosen = [corpus.texts[i][:2000] for i in order]
    ids = encode(chosen, train_wordpiece(chosen, 30_522), LENGTH)
    full = [k for k, own in enumerate(ids) if len(own) == LENGTH]
    return torch.tensor([ids[k] for k in full]), torch.tensor([corpus.labels[order[k]] for k in full])
