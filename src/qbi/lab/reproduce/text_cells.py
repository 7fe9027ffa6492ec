"""Cells on text: embedded reviews, whose embedding is drawn afresh for every run."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from qbi.attacks import PAIRS, QBI, Attack, InGramSpace, InputRange, TrapWeights, mount
from qbi.attacks.gram_space import AuxiliaryGroup
from qbi.lab.reproduce.cells import Cell, Measured, Result
from qbi.lab.reproduce.methods import GramSource, attacks_measured, measured, paper_attacks, tuning_samples
from qbi.lab.reproduce.real import TrainedOn, real_measured
from qbi.lab.reproduce.split import Split, split_half
from qbi.models import text_model
from qbi.randomness import generator
from qbi.records import TextData

DIMENSION = 250
TWO_EMBEDDINGS = "pairs, two embeddings"
"""PAIRS as the authors ran it on text."""

POSITIONS = 16
"""Token positions multiplied in float32 before they are added up in float64."""


def text_cell(cell: Cell, data: TextData, device: str) -> Result:
    """QBI, PAIRS and trap weights on one split, in Gram space.

    Trap weights need inputs above zero, so for them the embedding is uniform on [0, 1]; a server chooses it.
    """
    split = split_half(cell, len(data))
    tokens = data.tokens.to(device)
    test, auxiliary = (
        tokens[split.batches.flatten()],
        tokens[split.auxiliary[: -(-cell.neurons // cell.batch_size) * cell.batch_size]],
    )
    batches = torch.arange(len(test), device=device).reshape(split.batches.shape)
    features = tokens.shape[1] * DIMENSION
    normal, uniform = embedding(cell, len(data.vocabulary), device), trap_embedding(cell, len(data.vocabulary), device)
    cross = embedded_gram(test, auxiliary, normal)

    def group(rows: slice) -> AuxiliaryGroup:
        among = embedded_gram(auxiliary[rows], auxiliary[rows], normal)
        return AuxiliaryGroup(auxiliary=among, cross=cross[:, rows])

    own = embedding(cell, len(data.vocabulary), device, "second embedding")

    def elsewhere(rows: slice) -> AuxiliaryGroup:
        """Tuned in one embedding and tested in another, as the authors' data set class makes it (erratum 20)."""
        chosen = auxiliary[rows]
        return AuxiliaryGroup(
            auxiliary=embedded_gram(chosen, chosen, own), cross=embedded_gram(test, chosen, normal, own)
        )

    spaces = {
        InputRange.STANDARD: InGramSpace(embedded_gram(test, test, normal), features, group=group),
        InputRange.UNIT: _in_gram_space(test, uniform),
    }
    attacks = _attacks(cell, tokens, split, normal, uniform)
    apart = InGramSpace(spaces[InputRange.STANDARD].test, features, group=elsewhere)
    return {
        **attacks_measured(cell, attacks, GramSource(spaces, batches)),
        TWO_EMBEDDINGS: measured(cell, attacks[1], apart, batches),
    }


def _attacks(
    cell: Cell, tokens: Tensor, split: Split, normal: Tensor, uniform: Tensor
) -> tuple[QBI, PAIRS, TrapWeights]:
    chosen = tokens[split.auxiliary[: tuning_samples(cell, len(split.auxiliary))]]
    return paper_attacks(cell, _AuxiliaryTexts(tokens[split.auxiliary], normal), _in_gram_space(chosen, uniform))


def _in_gram_space(tokens: Tensor, table: Tensor) -> InGramSpace:
    features = tokens.shape[1] * DIMENSION
    return InGramSpace(embedded_gram(tokens, tokens, table), features, embedded_sums(tokens, table))


def embedding(cell: Cell, vocabulary: int, device: str, purpose: str = "embedding") -> Float[Tensor, "v d"]:
    """A fresh standard normal embedding (erratum 15)."""
    draws = generator(cell.seed_for(purpose), device=device)
    return torch.randn(vocabulary, DIMENSION, generator=draws, device=device)


def trap_embedding(cell: Cell, vocabulary: int, device: str) -> Float[Tensor, "v d"]:
    """A fresh embedding on [0, 1], for trap weights."""
    draws = generator(cell.seed_for("trap embedding"), device=device)
    return torch.rand(vocabulary, DIMENSION, generator=draws, device=device)


def real_text_cell(cell: Cell, data: TextData, device: str) -> Result:
    """The same by real weights: forward passes (`direct`), or client steps and extraction (`gradients`)."""
    split = split_half(cell, len(data))
    tokens = data.tokens.to(device)
    normal, uniform = embedding(cell, len(data.vocabulary), device), trap_embedding(cell, len(data.vocabulary), device)
    tables = {InputRange.STANDARD: normal, InputRange.UNIT: uniform}
    attacks = _attacks(cell, tokens, split, normal, uniform)
    return {a.key: _real(cell, a, tables[a.domain], tokens, split) for a in attacks}


class _AuxiliaryTexts:
    """Auxiliary texts, embedded a group at a time."""

    def __init__(self, tokens: Int[Tensor, "a t"], table: Float[Tensor, "v d"]) -> None:
        self.tokens, self.table = tokens, table

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> Float[Tensor, "b m"]:
        return self.table[self.tokens[rows]].flatten(1)


def _real(cell: Cell, attack: Attack, table: Tensor, tokens: Tensor, split: Split) -> Measured:
    torch.manual_seed(cell.seed_for("model", attack.key) % 2**31)
    model = text_model(len(table), tokens.shape[1], DIMENSION, cell.neurons).to(table.device)
    first = model.get_submodule("embedding")
    assert isinstance(first, nn.Embedding)
    with torch.no_grad():
        first.weight.copy_(table)
    rows = generator(cell.seed_for(attack.key, "rows"), device=table.device)
    mounted = mount(model, attack, tokens[:2], rows)
    batches = (
        TrainedOn(tokens[index], torch.arange(len(index), device=table.device) % 2, table[tokens[index]].flatten(1))
        for index in split.batches
    )
    return real_measured(mounted, batches, cell.route)


def embedded_gram(
    a: Int[Tensor, "a t"], b: Int[Tensor, "b t"], table: Float[Tensor, "v d"], other: Float[Tensor, "v d"] | None = None
) -> Float64[Tensor, "a b"]:
    """Inner products of embedded texts, a few positions at a time: never the whole a×(t·d) matrix.

    With `other`, the second texts are embedded by that table.
    """
    second = table if other is None else other
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=table.device)
    for start in range(0, a.shape[1], POSITIONS):
        left = table[a[:, start : start + POSITIONS]].flatten(1)
        right = left if a is b and other is None else second[b[:, start : start + POSITIONS]].flatten(1)
        total += left @ right.T
    return total


def embedded_sums(tokens: Int[Tensor, "a t"], table: Float[Tensor, "v d"]) -> Float64[Tensor, " a"]:
    """The sum of each embedded text's values."""
    return table.double().sum(1)[tokens].sum(1)
