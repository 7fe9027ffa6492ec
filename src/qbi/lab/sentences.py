"""What an honest-but-curious server reads of batches of text, on transformers built from published configurations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.errors import CannotRead
from qbi.federation import client_step
from qbi.federation.client import Loss, default_loss
from qbi.lab.text_models import Bert, Gpt2, adapt
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.randomness import derive_seed, generator
from qbi.sentences import read_sentences, score
from qbi.sentences.span import ROUNDING

LENGTH = 32

PADDING, SHORTEST = 0, 8
"""What stands behind the end of shorter sequences, in every published vocabulary of WordPiece, and the shortest of them."""

ROUNDINGS = (ROUNDING, 2.0**-16, 2.0**-12, 2.0**-9, 2.0**-6, 2.0**-3)
"""What the server takes for the error of a noisy gradient: it knows the noise, so the best of these is counted."""


HALF = -1.0
"""In the place of noise: gradients in bfloat16."""


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each position foretells the next token, but for what stands behind the end of a sequence."""
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=PADDING)


KINDS: dict[str, tuple[type[Bert] | type[Gpt2], int, Loss]] = {
    "BERT": (Bert, 30_522, default_loss),
    "GPT-2": (Gpt2, 50_257, next_token_loss),
}
"""Models with their published vocabularies."""


@dataclass(frozen=True)
class TextModel:
    """A model, its loss, and whether it foretells tokens."""

    name: str
    model: nn.Module
    loss: Loss
    foretells: bool
    vocabulary: int

    def targets(self, ids: Tensor, labels: Tensor) -> Tensor:
        """What the loss compares outputs with."""
        return ids if self.foretells else labels


def build(
    kind: str, width: int = 768, layers: int = 3, *, vocabulary: int | None = None, rank: int = 0, seed: int = 0
) -> TextModel:
    """BERT for classification or GPT-2 as a language model: the published configuration, of fewer layers, without dropout.

    Args:
        kind: "BERT" or "GPT-2".
        width: 768 for the base models, 1024 for BERT-large and GPT-2 medium.
        layers: how many of its layers.
        vocabulary: the published one, if nothing is said.
        rank: of LoRA on the attention's maps; 0 trains everything.
        seed: of its weights.
    """
    made, published, loss = KINDS[kind]
    size = vocabulary or published
    torch.manual_seed(derive_seed(seed, "weights", kind, width) % 2**31)
    model = made(size, width, layers)
    if rank:
        adapt(model, rank)
    return TextModel(kind, model, loss, kind != "BERT", size)


def train(made: TextModel, ids: Tensor, labels: Tensor, steps: int, *, seed: int = 0) -> float:
    """Some steps of AdamW on other texts, so that weights are those of a model in use; the last loss."""
    optimiser = torch.optim.AdamW([p for p in made.model.parameters() if p.requires_grad], lr=1e-4)
    draws = generator(seed, "training")
    value = torch.zeros(())
    made.model.train()
    for _ in range(steps):
        chosen = torch.randint(len(ids), (16,), generator=draws)
        optimiser.zero_grad()
        value = made.loss(made.model(ids[chosen]), made.targets(ids[chosen], labels[chosen]))
        value.backward()
        optimiser.step()
    return float(value.detach())


def judge(
    made: TextModel,
    ids: Tensor,
    labels: Tensor,
    *,
    batch_size: int,
    batches: int = 1,
    seed: int = 0,
    bits: float | None = None,
    other: bool = False,
    masked: bool = False,
    coarse: float = 0.0,
) -> dict[str, Any]:
    """What is read of batches.

    Args:
        made: the model.
        ids, labels: texts to draw batches from.
        batch_size, batches, seed: how many.
        bits: of the private step; none: the plain gradient.
        other: compare what is read with another batch, of which the gradient says nothing.
        masked: sequences of `SHORTEST` tokens to all of them, padded, with a mask.
        coarse: noise on each gradient, against its own size; -1 sends it in bfloat16 instead.
    """
    ids = _shortened(ids, generator(seed, "lengths")) if masked else ids
    rows: list[dict[str, float]] = []
    reason = ""
    for number in range(batches):
        order = torch.randperm(len(ids), generator=generator(seed, "sentences", number))
        x, y = ids[order[:batch_size]], labels[order[:batch_size]]
        gradients = _sent(made, _feed(x) if masked else (x,), made.targets(x, y), bits, seed + number)
        gradients = _coarsened(gradients, coarse, generator(seed, "noise", number))
        truth = ids[order[batch_size : 2 * batch_size]] if other else x
        found = []
        known = ROUNDINGS if bits is not None else (2.0**-9 if coarse == HALF else ROUNDING,)
        if coarse > 0 and made.foretells:
            known = (2 * coarse,)  # the server knows the noise; encoders are read without knowing it
        for rounding in known:
            try:
                read = read_sentences(
                    made.model,
                    gradients,
                    vocabulary=made.vocabulary,
                    length=ids.shape[1],
                    batch_size=batch_size,
                    feed=_feed if masked else None,
                    padding=PADDING if masked else None,
                    seed=seed,
                    rounding=rounding,
                )
            except CannotRead as problem:
                reason = reason or str(problem)
                continue
            found.append(_scores(read.sequences, read.tokens, truth, foretells=made.foretells))
            found[-1] |= {"rank": read.rank, "seconds": read.seconds}
        nothing = {"exact": 0.0, "rouge_1": 0.0, "rouge_2": 0.0, "words": 0.0, "tokens": 0.0, "wrong": 0.0}
        rows.append(max(found, key=lambda row: (row["exact"], row["tokens"]), default=nothing))
    keys = {key for row in rows for key in row}
    means = {key: sum(row.get(key, 0.0) for row in rows) / len(rows) for key in sorted(keys)}
    return {"batch_size": batch_size, "batches": batches, **means, "reason": reason}


def _coarsened(gradients: Mapping[str, Tensor], coarse: float, draws: torch.Generator) -> dict[str, Tensor]:
    """As a client sends them that halves its traffic, or adds a little noise."""
    if coarse == HALF:
        return {name: g.bfloat16().float() for name, g in gradients.items()}
    noise = {name: torch.randn(g.shape, generator=draws).to(g) if coarse else 0.0 for name, g in gradients.items()}
    return {name: g + coarse * g.square().mean().sqrt() * noise[name] for name, g in gradients.items()}


def _shortened(ids: Tensor, draws: torch.Generator) -> Tensor:
    """Each sequence cut at a length of its own."""
    lengths = torch.randint(SHORTEST, ids.shape[1] + 1, (len(ids), 1), generator=draws).to(ids.device)
    return ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= lengths, PADDING)


def _feed(ids: Tensor) -> tuple[Tensor, ...]:
    return ids, (ids != PADDING).long()


def _scores(
    sequences: tuple[tuple[int, ...], ...], tokens: tuple[int, ...], truth: Tensor, *, foretells: bool
) -> dict[str, float]:
    """The last token of a text that is foretold is a target only: no layer sees it, and it is not counted."""
    rows = [[token for token in row if token != PADDING] for row in truth.tolist()]
    seen = [row[:-1] if foretells else row for row in rows]
    found = score([[token for token in row if token != PADDING] for row in sequences], seen)
    present = {token for row in seen for token in row}
    return {
        "exact": found.exact,
        "rouge_1": found.rouge_1,
        "rouge_2": found.rouge_2,
        "words": found.words,
        "tokens": len(present & set(tokens)) / len(present),
        "wrong": float(len(set(tokens) - present)),
    }


def _sent(
    made: TextModel, inputs: tuple[Tensor, ...], targets: Tensor, bits: float | None, seed: int
) -> Mapping[str, Tensor]:
    def plain(outputs: Tensor, wanted: Tensor) -> Tensor:
        return made.loss(outputs, wanted)

    if bits is None:
        return client_step(made.model, inputs, targets, loss=plain, seed=seed).gradients
    step = PrivateStep(Budget.for_goal(bits=bits))
    return step.update(made.model, inputs, targets, generator(seed, "noise"), loss=plain, seed=seed).gradients
