"""What servers read of text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qbi.data.text import load_imdb
from qbi.data.wordpiece import encode, train_wordpiece
from qbi.lab.sentences import LENGTH, TextModel, build, judge, train

TEXTS, HELD = 4000, 1000
"""Reviews that are used, and those of them that no model is trained on."""


def sentences(data: str) -> dict[str, Any]:
    """Batches of 32 tokens of IMDB reviews; `data` is the archive or folder of the reviews."""
    return {"provenance": PROVENANCE, "rows": list(rows_of(data))}


PROVENANCE = "IMDB reviews, the first 32 WordPiece tokens ([CLS] first), a vocabulary of 30,522 trained on 4,000 reviews; three layers; two CPU cores"


def texts(data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of the reviews that are long enough, and their labels, in an order of their own."""
    corpus = load_imdb(Path(data))
    order = torch.randperm(len(corpus.texts), generator=torch.Generator().manual_seed(0))[:TEXTS].tolist()
    chosen = [corpus.texts[i][:2000] for i in order]
    ids = encode(chosen, train_wordpiece(chosen, 30_522), LENGTH)
    full = [k for k, own in enumerate(ids) if len(own) == LENGTH]
    return torch.tensor([ids[k] for k in full]), torch.tensor([corpus.labels[order[k]] for k in full])


def rows_of(data: str) -> Iterator[dict[str, Any]]:
    """One row for each setting."""
    ids, labels = texts(data)
    held, others = (ids[:HELD], labels[:HELD]), (ids[HELD:], labels[HELD:])

    def row(made: TextModel, what: str, size: int, **more: Any) -> dict[str, Any]:
        return {"model": made.name, "what": what, **more, **judge(made, *held, batch_size=size, **more)}

    for kind in ("BERT", "GPT-2"):
        made = build(kind)
        for size in (1, 8):
            yield row(made, "768 wide, as initialised", size)
        yield row(made, "768 wide, another batch", 8, other=True)
        train(made, *others, 100)
        yield row(made, "768 wide, trained for 100 steps", 8)
        yield row(build(kind, 1024), "1,024 wide, as initialised", 32)
    small = build("BERT", 256)
    yield row(small, "256 wide, as initialised", 4)
    for bits in (72.0, 18.0, 8.0):
        yield row(small, f"256 wide, private step, {bits:g} bits", 4, bits=bits)
    for rank in (8, 256):
        adapted = build("BERT", rank=rank)
        yield row(adapted, f"768 wide, LoRA {rank}, as initialised", 4)
        train(adapted, *others, 1)
        yield row(adapted, f"768 wide, LoRA {rank}, after a step", 4)
