"""Beyond the paper: whole batches, read by the strongest servers from real gradients. One batch a cell."""

import torch
from torch import Tensor, nn

from qbi.attacks import Attack, Cascade, Knowledge, Mounted, Passive, Reading, mount
from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.federation import client_step
from qbi.lab.reproduce.cells import GRID, Cell, Measured, Result
from qbi.lab.reproduce.split import split_half
from qbi.lab.reproduce.text_cells import DIMENSION, embedding
from qbi.metrics import EXACT, FAITHFUL, RECOGNISABLE, match
from qbi.models import text_model, two_layer
from qbi.randomness import generator
from qbi.records import ImageData, TextData

BEYOND_GRID = (*GRID, (1000, 300), (1000, 400), (1000, 500))
BEYOND_TEXT_GRID = tuple((1000, b) for b in (20, 50, 100, 200, 300, 400, 500))
ATTACKS: tuple[type[Attack], ...] = (Cascade, Passive)
CLASSES = 10
MOST_UNMIXED = 500
"""Samples up to which an honest model's update is taken apart; beyond, that takes minutes and has never succeeded."""


def beyond_images(cell: Cell, data: ImageData, device: str) -> Result:
    """Cascade on a crafted layer and unmixing on an honest one, on one batch of images."""
    split = split_half(cell, len(data))
    chosen = split.batches[0]
    x, y = normalised(data, chosen).to(device), (data.labels[chosen] % CLASSES).to(device)
    spare = flat(normalised(data, split.auxiliary[: 3 * cell.batch_size]))
    torch.manual_seed(cell.seed_for("model") % 2**31)
    model = nn.Sequential(nn.Flatten(), *two_layer(spare.shape[1], cell.neurons, CLASSES)).to(device)
    return _results(cell, model, "1", x, y, flat(x), spare, device)


def beyond_texts(cell: Cell, data: TextData, device: str) -> Result:
    """The same on embedded reviews."""
    split = split_half(cell, len(data))
    tokens = data.tokens.to(device)
    chosen = split.batches[0].to(device)
    table = embedding(cell, len(data.vocabulary), device)
    torch.manual_seed(cell.seed_for("model") % 2**31)
    model = text_model(len(table), tokens.shape[1], DIMENSION, cell.neurons).to(device)
    first = model.get_submodule("embedding")
    assert isinstance(first, nn.Embedding)
    with torch.no_grad():
        first.weight.copy_(table)
    spare = table[tokens[split.auxiliary[: 3 * cell.batch_size].to(device)]].flatten(1).cpu()
    truth = table[tokens[chosen]].flatten(1)
    return _results(cell, model, "fc1", tokens[chosen], data.labels[chosen.cpu()].to(device), truth, spare, device)


def _results(
    cell: Cell, model: nn.Module, layer: str, x: Tensor, y: Tensor, truth: Tensor, spare: Tensor, device: str
) -> Result:
    out: dict[str, Measured] = {}
    for attack in ATTACKS:
        if not attack.crafts and cell.batch_size > MOST_UNMIXED:
            continue
        prepared = attack.prepare(Knowledge(cell.batch_size, cell.neurons, spare.shape[1], spare))
        rows = generator(cell.seed_for(attack.key, "rows"), device=device)
        out[attack.key] = _read(mount(model, prepared, x[:2], rows, layer=layer), x, y, truth)
    return out


def _read(sent: Mounted, x: Tensor, y: Tensor, truth: Tensor) -> Measured:
    found = sent.read(client_step(sent.model, x, y), Reading(largest=float(x.abs().max())))
    levels = match(found.samples, truth, data_range=4.0)
    proven = 0 if found.certified is None else int(found.certified.sum())
    return {
        "recall": levels[EXACT].recall,
        "faithful": levels[FAITHFUL].recall,
        "rough": levels[RECOGNISABLE].recall,
        "certified": proven / len(truth),
    }
