"""Cells on images: recall tables, A and P, and normalisation, by three routes that must agree."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qbi.attacks import PAIRS, QBI, Attack, InGramSpace, InputRange, TrapWeights, mount
from qbi.attacks.gram_space import AuxiliaryGroup
from qbi.carrier import flat
from qbi.data.images import normalised, unit_pixels
from qbi.lab.reproduce.cells import Cell, Measured, Result
from qbi.lab.reproduce.channel_grams import (
    ChannelGrams,
    View,
    batch_norm_view,
    fixed_view,
    layer_norm_view,
    raw_view,
    view_gram,
    view_sums,
)
from qbi.lab.reproduce.methods import GramSource, attacks_measured, measured, paper_attacks, tuning_samples
from qbi.lab.reproduce.real import TrainedOn, real_measured
from qbi.lab.reproduce.split import Split, split_half
from qbi.models import two_layer
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
    test, raw = fixed_view(grams, unique, data.mean, data.std), raw_view(grams, unique)

    def group(rows: slice) -> AuxiliaryGroup:
        view = fixed_view(grams, split.auxiliary[rows].to(device), data.mean, data.std)
        return AuxiliaryGroup(auxiliary=view_gram(grams, view, view), cross=view_gram(grams, test, view))

    spaces = {
        InputRange.STANDARD: InGramSpace(view_gram(grams, test, test), grams.features, group=group),
        InputRange.UNIT: _in_gram_space(grams, raw),
    }
    return attacks_measured(cell, _attacks(cell, data, split, grams), GramSource(spaces, batches))


def _attacks(cell: Cell, data: ImageData, split: Split, grams: ChannelGrams) -> tuple[QBI, PAIRS, TrapWeights]:
    chosen = split.auxiliary[: tuning_samples(cell, len(split.auxiliary))].to(grams.sums.device)
    tuning = _in_gram_space(grams, raw_view(grams, chosen))
    return paper_attacks(cell, _AuxiliaryImages(data, split.auxiliary), tuning)


def _in_gram_space(grams: ChannelGrams, view: View) -> InGramSpace:
    return InGramSpace(view_gram(grams, view, view), grams.features, view_sums(grams, view))


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
    attack = QBI(cell.batch_size)
    return {
        name: measured(cell, attack, InGramSpace(view_gram(grams, view, view), grams.features), columns)
        for name, (view, columns) in views.items()
    }


def real_attack_cell(cell: Cell, data: ImageData, grams: ChannelGrams, device: str) -> Result:
    """The same by real weights: forward passes (`direct`), or client steps and extraction (`gradients`)."""
    split = split_half(cell, len(data))
    flatten: list[nn.Module] = [nn.Flatten()]
    attacks = _attacks(cell, data, split, grams)
    return {a.key: _real(cell, a.key, a, flatten, data, split, device) for a in attacks}


def real_normalisation_cell(cell: Cell, data: ImageData, grams: ChannelGrams, device: str) -> Result:
    """QBI behind real normalisation layers."""
    split = split_half(cell, len(data))
    layers: dict[str, list[nn.Module]] = {
        "batch": [nn.BatchNorm2d(data.shape[0]), nn.Flatten()],
        "layer": [nn.Flatten(), nn.LayerNorm(grams.features)],
    }
    attack = QBI(cell.batch_size)
    return {name: _real(cell, name, attack, prefix, data, split, device, raw=True) for name, prefix in layers.items()}


class _AuxiliaryImages:
    """Auxiliary images, loaded and normalised a group at a time."""

    def __init__(self, data: ImageData, index: Int[Tensor, " a"]) -> None:
        self.data, self.index = data, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice) -> Float[Tensor, "b m"]:
        return flat(normalised(self.data, self.index[rows]))


def _real(
    cell: Cell,
    name: str,
    attack: Attack,
    prefix: list[nn.Module],
    data: ImageData,
    split: Split,
    device: str,
    *,
    raw: bool = False,
) -> Measured:
    feed = unit_pixels if raw or attack.domain is InputRange.UNIT else normalised
    torch.manual_seed(cell.seed_for("model", name) % 2**31)
    model = nn.Sequential(*prefix, *two_layer(math.prod(data.shape), cell.neurons, CLASSES)).to(device)
    probe = feed(data, split.batches[0, :2]).to(device)
    mounted = mount(model, attack, probe, generator(cell.seed_for(name, "rows"), device=device))

    def batches() -> Iterator[TrainedOn]:
        for index in split.batches:
            inputs = feed(data, index).to(device)
            truth = flat(inputs)
            if name == "layer":
                truth = nn.functional.layer_norm(truth, truth.shape[1:])
            yield TrainedOn(inputs, torch.arange(len(index), device=device) % CLASSES, truth)

    return real_measured(mounted, batches(), cell.route, keep_normalised=name == "layer")
