"""Cells on images: recall tables, A and P, and normalisation, by three routes that must agree."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qbi.attacks import PAIRS, QBI, Attack, TrapWeights, mount
from qbi.attacks.in_gram_space import AuxiliaryGroup
from qbi.carrier import flat
from qbi.channel_gram import (
    ChannelGrams,
    View,
    batch_norm_view,
    fixed_view,
    layer_norm_view,
    raw_view,
    view_gram,
    view_sums,
)
from qbi.data.images import normalised, unit_pixels
from qbi.experiments.cells import Cell, Measured, Result
from qbi.experiments.methods import TRAP_BATCHES, best_trap_scale, pairs_measured, qbi_measured, trap_measured
from qbi.experiments.real import Batch, real_measured
from qbi.experiments.split import Split, split_half
from qbi.randomness import generator
from qbi.records import ImageData

CLASSES = 10
"""Classes of the head behind the attacked layer; any number would do."""


def attack_cell(cell: Cell, data: ImageData, grams: ChannelGrams) -> Result:
    """QBI, PAIRS and trap weights on one split, in Gram space."""
    split = split_half(cell, len(data))
    device = grams.sums.device
    unique, batches = split.batches.unique(return_inverse=True)
    unique, batches = unique.to(device), batches.to(device)
    test = fixed_view(grams, unique, data.mean, data.std)
    matrix = view_gram(grams, test, test)

    def group(rows: slice) -> AuxiliaryGroup:
        view = fixed_view(grams, split.auxiliary[rows].to(device), data.mean, data.std)
        return AuxiliaryGroup(auxiliary=view_gram(grams, view, view), cross=view_gram(grams, test, view))

    raw = raw_view(grams, unique)
    scale = _trap_scale(cell, split, grams)
    return {
        "qbi": qbi_measured(cell, matrix, batches, grams.features),
        "pairs": pairs_measured(cell, matrix, batches, grams.features, group),
        "trap-weights": trap_measured(
            cell, view_gram(grams, raw, raw), view_sums(grams, raw), batches, grams.features, scale
        ),
    }


def normalisation_cell(cell: Cell, data: ImageData, grams: ChannelGrams) -> Result:
    """QBI behind BatchNorm and behind LayerNorm, on data that are not normalised beforehand, in Gram space."""
    split = split_half(cell, len(data))
    device = grams.sums.device
    batches = split.batches.to(device)
    every = torch.arange(batches.numel(), device=device).reshape(batches.shape)
    unique, inverse = batches.unique(return_inverse=True)
    views: dict[str, tuple[View, Tensor]] = {
        "batch": (batch_norm_view(grams, batches), every),
        "layer": (layer_norm_view(grams, unique), inverse),
    }
    return {
        name: qbi_measured(cell, view_gram(grams, view, view), columns, grams.features)
        for name, (view, columns) in views.items()
    }


def _trap_scale(cell: Cell, split: Split, grams: ChannelGrams) -> float:
    count = min(TRAP_BATCHES, len(split.auxiliary) // cell.batch_size) * cell.batch_size
    view = raw_view(grams, split.auxiliary[:count].to(grams.sums.device))
    return best_trap_scale(cell, view_gram(grams, view, view), view_sums(grams, view), grams.features)


def real_attack_cell(cell: Cell, data: ImageData, grams: ChannelGrams, device: str) -> Result:
    """The same by real weights: forward passes (`direct`), or client steps and extraction (`gradients`)."""
    split = split_half(cell, len(data))
    attacks: dict[str, Attack] = {
        "qbi": QBI(cell.batch_size),
        "pairs": PAIRS(cell.batch_size, _Auxiliary(data, split.auxiliary)),
        "trap-weights": TrapWeights(_trap_scale(cell, split, grams)),
    }
    return {name: _real(cell, name, attack, [nn.Flatten()], data, split, device) for name, attack in attacks.items()}


def real_normalisation_cell(cell: Cell, data: ImageData, grams: ChannelGrams, device: str) -> Result:
    """QBI behind real normalisation layers."""
    split = split_half(cell, len(data))
    layers: dict[str, list[nn.Module]] = {
        "batch": [nn.BatchNorm2d(data.shape[0]), nn.Flatten()],
        "layer": [nn.Flatten(), nn.LayerNorm(grams.features)],
    }
    attack = QBI(cell.batch_size)
    return {name: _real(cell, name, attack, prefix, data, split, device) for name, prefix in layers.items()}


class _Auxiliary:
    """Auxiliary images, loaded and normalised a group at a time."""

    def __init__(self, data: ImageData, index: Int[Tensor, " a"]) -> None:
        self.data, self.index = data, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice) -> Float[Tensor, "b m"]:
        return flat(normalised(self.data, self.index[rows]))


def _real(
    cell: Cell, name: str, attack: Attack, prefix: list[nn.Module], data: ImageData, split: Split, device: str
) -> Measured:
    raw = name != "qbi" and name != "pairs"
    feed = unit_pixels if raw else normalised
    torch.manual_seed(cell.seed_for("model", name) % 2**31)
    features = math.prod(data.shape)
    head = [nn.Linear(features, cell.neurons), nn.ReLU(), nn.Linear(cell.neurons, CLASSES)]
    model = nn.Sequential(*prefix, *head).to(device)
    probe = feed(data, split.batches[0, :2]).to(device)
    mounted = mount(model, attack, probe, generator(cell.seed_for(name, "rows"), device=device))

    def batches() -> Iterator[Batch]:
        for index in split.batches:
            inputs = feed(data, index).to(device)
            truth = flat(inputs)
            if name == "layer":
                truth = nn.functional.layer_norm(truth, truth.shape[1:])
            yield Batch(inputs, torch.arange(len(index), device=device) % CLASSES, truth)

    return real_measured(mounted, batches(), cell.route, keep_normalised=name == "layer")
