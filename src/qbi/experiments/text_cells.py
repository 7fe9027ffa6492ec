"""Cells on text: embedded reviews, whose embedding is drawn afresh for every run."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from qbi.attacks import PAIRS, QBI, Attack, TrapWeights, mount
from qbi.attacks.in_gram_space import AuxiliaryGroup
from qbi.experiments.cells import Cell, Measured, Result
from qbi.experiments.methods import TRAP_BATCHES, best_trap_scale, pairs_measured, qbi_measured, trap_measured
from qbi.experiments.real import Batch, real_measured
from qbi.experiments.split import Split, split_half
from qbi.models import text_model
from qbi.randomness import generator
from qbi.records import TextData

DIMENSION = 250
POSITIONS = 16
"""Token positions multiplied in float32 before they are added up in float64."""


def text_cell(cell: Cell, data: TextData, device: str) -> Result:
    """QBI, PAIRS and trap weights on one split, in Gram space.

    Trap weights need inputs above zero, so for them the embedding is uniform on [0, 1]; a server chooses it.
    """
    split = split_half(cell, len(data))
    tokens = data.tokens.to(device)
    test, auxiliary = tokens[split.batches.flatten()], tokens[split.auxiliary[: cell.neurons]]
    batches = torch.arange(len(test), device=device).reshape(split.batches.shape)
    features = tokens.shape[1] * DIMENSION
    normal, uniform = embedding(cell, len(data.vocabulary), device), trap_embedding(cell, len(data.vocabulary), device)
    matrix = embedded_gram(test, test, normal)
    cross = embedded_gram(test, auxiliary, normal)

    def group(rows: slice) -> AuxiliaryGroup:
        among = embedded_gram(auxiliary[rows], auxiliary[rows], normal)
        return AuxiliaryGroup(auxiliary=among, cross=cross[:, rows])

    return {
        "qbi": qbi_measured(cell, matrix, batches, features),
        "pairs": pairs_measured(cell, matrix, batches, features, group),
        "trap-weights": trap_measured(
            cell,
            embedded_gram(test, test, uniform),
            embedded_sums(test, uniform),
            batches,
            features,
            _trap_scale(cell, tokens, split, uniform),
        ),
    }


def embedding(cell: Cell, vocabulary: int, device: str) -> Float[Tensor, "v d"]:
    """A fresh standard normal embedding (erratum 15)."""
    draws = generator(cell.seed_for("embedding"), device=device)
    return torch.randn(vocabulary, DIMENSION, generator=draws, device=device)


def trap_embedding(cell: Cell, vocabulary: int, device: str) -> Float[Tensor, "v d"]:
    """A fresh embedding on [0, 1], for trap weights."""
    draws = generator(cell.seed_for("trap embedding"), device=device)
    return torch.rand(vocabulary, DIMENSION, generator=draws, device=device)


def embedded_gram(a: Int[Tensor, "a t"], b: Int[Tensor, "b t"], table: Float[Tensor, "v d"]) -> Float64[Tensor, "a b"]:
    """Inner products of embedded texts, a few positions at a time: never the whole a×(t·d) matrix."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=table.device)
    for start in range(0, a.shape[1], POSITIONS):
        left = table[a[:, start : start + POSITIONS]].flatten(1)
        right = left if a is b else table[b[:, start : start + POSITIONS]].flatten(1)
        total += left @ right.T
    return total


def embedded_sums(tokens: Int[Tensor, "a t"], table: Float[Tensor, "v d"]) -> Float64[Tensor, " a"]:
    """The sum of each embedded text's values."""
    return table.double().sum(1)[tokens].sum(1)


def _trap_scale(cell: Cell, tokens: Tensor, split: Split, table: Tensor) -> float:
    count = min(TRAP_BATCHES, len(split.auxiliary) // cell.batch_size) * cell.batch_size
    chosen = tokens[split.auxiliary[:count]]
    features = tokens.shape[1] * DIMENSION
    return best_trap_scale(cell, embedded_gram(chosen, chosen, table), embedded_sums(chosen, table), features)


def real_text_cell(cell: Cell, data: TextData, device: str) -> Result:
    """The same by real weights: forward passes (`direct`), or client steps and extraction (`gradients`)."""
    split = split_half(cell, len(data))
    tokens = data.tokens.to(device)
    normal, uniform = embedding(cell, len(data.vocabulary), device), trap_embedding(cell, len(data.vocabulary), device)
    auxiliary = _Auxiliary(tokens[split.auxiliary], normal)
    attacks: dict[str, tuple[Attack, Tensor]] = {
        "qbi": (QBI(cell.batch_size), normal),
        "pairs": (PAIRS(cell.batch_size, auxiliary), normal),
        "trap-weights": (TrapWeights(_trap_scale(cell, tokens, split, uniform)), uniform),
    }
    return {name: _real(cell, name, attack, table, tokens, split) for name, (attack, table) in attacks.items()}


class _Auxiliary:
    """Auxiliary texts, embedded a group at a time."""

    def __init__(self, tokens: Int[Tensor, "a t"], table: Float[Tensor, "v d"]) -> None:
        self.tokens, self.table = tokens, table

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> Float[Tensor, "b m"]:
        return self.table[self.tokens[rows]].flatten(1)


def _real(cell: Cell, name: str, attack: Attack, table: Tensor, tokens: Tensor, split: Split) -> Measured:
    torch.manual_seed(cell.seed_for("model", name) % 2**31)
    model = text_model(len(table), tokens.shape[1], DIMENSION, cell.neurons).to(table.device)
    first = model.get_submodule("embedding")
    assert isinstance(first, nn.Embedding)
    with torch.no_grad():
        first.weight.copy_(table)
    rows = generator(cell.seed_for(name, "rows"), device=table.device)
    mounted = mount(model, attack, tokens[:2], rows)
    batches = (
        Batch(tokens[index], torch.arange(len(index), device=table.device) % 2, table[tokens[index]].flatten(1))
        for index in split.batches
    )
    return real_measured(mounted, batches, cell.route)
