"""A learned server against stock filters: it runs the framework's own filter on public images, and learns to read what arrives.

It sends rows of QBI and a head that gives every sample the same backprop: then a row in which one sample stands is that sample times a
number that the server knows, and no bias is needed to read it. How large that number is, and how many rows stay silent, it chooses on
public images: large values drown noise, small ones stay below a cut, and silent rows use up what a percentile cuts away. Public pairs of
arriving rows and images then fit a Wiener filter in principal components and a small network behind it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qbi.attacks import QBI, Knowledge, Mounted, mount
from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.lab.compare.judging import CLASSES, LAYER, network
from qbi.lab.filters import BATCH, BATCHES, NEURONS, arriving
from qbi.lab.row_reader import RowReader, doubting, learn_rows
from qbi.lab.stock import FILTERS, StockFilter
from qbi.metrics import RECOGNISABLE, THRESHOLDS, match
from qbi.metrics.matching import mean_squared_errors
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData

HELD_OUT = 1000
"""Images of which the clients have theirs; the server has the others."""
TRIED = 2
"""Public batches on which each choice is tried."""
LEARNED, DOUBTED = 40, 10
"""Public batches from which reading is learned, and from which the server learns when it reads badly."""
SCALES = (0.01, 1.0, 100.0)
SILENT = (0.0, 0.55)
"""Shares of rows that never fire."""
RANGE = 4.0
"""Of pixels in the model's own units, about."""
QUIET = 1e-3
"""Of the rows: so small that they move no output, and every sample has the same backprop."""


@dataclass(frozen=True)
class Sent:
    """What the server sends, and how large it makes what comes back."""

    mounted: Mounted
    scale: float
    silent: float

    @classmethod
    def made(cls, features: Tensor, scale: float, silent: float, clients: int, seed: int) -> "Sent":
        """Rows for the whole sum's batch; a head in which one class weighs half, whatever the sample."""
        model = network(features.shape[1], NEURONS, CLASSES, derive_seed(seed, "learned"))
        attack = QBI.prepare(Knowledge(BATCH * clients, NEURONS, features.shape[1], features, seed=seed))
        probe = features[:2].reshape(-1, 3, 32, 32)
        sent = mount(
            model, attack, probe, generator(seed, "learned"), layer=LAYER, gain=QUIET / features.shape[1] ** 0.5
        )
        head = sent.model[-1]  # type: ignore[index]
        with torch.no_grad():
            head.weight.zero_()
            head.weight[0] = scale
            head.bias.zero_()
            head.bias[0] = torch.tensor(CLASSES - 1.0).log()
            sent.target.bias[: round(silent * NEURONS)] = -1.0
        return cls(sent, scale, silent)

    def rows(self, stock: StockFilter, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What arrives of the rows and of their biases."""
        return self.mounted.gradients(arriving(self.mounted, stock, x, y))

    def alone(self, x: Tensor) -> Tensor:
        """For every row the sample that stands in it alone, or -1."""
        fired = self.mounted.target(flat(x)).detach() > 0
        return torch.where(fired.sum(0) == 1, fired.int().argmax(0), -1)


def _batches(data: ImageData, pool: Tensor, size: int, seed: int, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches without end, passes over a pool in chance order: their places, images and labels."""
    draws = generator(seed, name)
    while True:
        order = pool[torch.randperm(len(pool), generator=draws)]
        for chosen in order[: len(order) // size * size].split(size):
            yield chosen, normalised(data, chosen), data.labels[chosen] % CLASSES


def _promise(sent: Sent, stock: StockFilter, batches: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Mean over samples of the best cosine between what arrives of a row and a sample."""
    found = []
    for _, x, y in batches:
        rows, _ = sent.rows(stock, x, y)
        found.append((F.normalize(flat(x)) @ F.normalize(rows).T).abs().amax(1).mean())
    return float(torch.stack(found).mean())


def _pairs(sent: Sent, stock: StockFilter, batches: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Arriving rows in which one sample stands, their biases, and the samples."""
    rows, biases, truth = [], [], []
    for _, x, y in batches:
        owner = sent.alone(x)
        chosen = owner >= 0
        row, bias = sent.rows(stock, x, y)
        rows.append(row[chosen])
        biases.append(bias[chosen])
        truth.append(flat(x)[owner[chosen]])
    return torch.cat(rows), torch.cat(biases), torch.cat(truth)


def _judged_readings(reader: RowReader, sent: Sent, stock: StockFilter, batches: Any) -> tuple[Tensor, ...]:
    """All rows that arrive, their biases, what is read of each, and how far that is from the nearest sample."""
    found = []
    for _, x, y in batches:
        rows, biases = there(*sent.rows(stock, x, y))
        images, _ = reader(rows, biases)
        found.append((rows, biases, images, mean_squared_errors(images, flat(x)).amin(1)))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def learned(data: ImageData, seed: int) -> Iterator[dict[str, Any]]:
    """Filter by filter under one seed: what the server chose, its recall on held-out images, and that of its readings of other batches."""
    order = torch.randperm(len(data), generator=generator(seed, "learned", "split"))
    features = flat(normalised(data, order[HELD_OUT:]))
    mean = features.mean(0)
    components = (mean, torch.linalg.eigh((features - mean).T @ (features - mean))[1])
    for stock in FILTERS:
        # Frameworks draw from global generators.
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield _against(stock, data, order, features, components, seed)


def _against(
    stock: StockFilter, data: ImageData, order: Tensor, features: Tensor, components: tuple[Tensor, Tensor], seed: int
) -> dict[str, Any]:
    size = BATCH * stock.clients
    public = _batches(data, order[HELD_OUT:], size, seed, "public")
    tried = list(islice(public, TRIED))
    choices = [Sent.made(features, scale, silent, stock.clients, seed) for scale, silent in product(SCALES, SILENT)]
    sent = max(choices, key=lambda choice: _promise(choice, stock, tried))
    reader = learn_rows(*_pairs(sent, stock, islice(public, LEARNED)), components, seed)
    reader = doubting(reader, *_judged_readings(reader, sent, stock, islice(public, DOUBTED)))
    held_out = list(islice(_batches(data, order[:HELD_OUT], size, seed, "held out"), BATCHES + 1))
    read = [denormalised(data, best(reader, *sent.rows(stock, x, y), size)) for _, x, y in held_out]
    truth = [flat(unit_pixels(data, chosen)) for chosen, _, _ in held_out]
    return {
        "filter": stock.name,
        "settings": stock.settings,
        "scale": sent.scale,
        "silent": sent.silent,
        "read": _recall(read[:-1], truth[:-1]),
        # The same candidates, held against batches that they were not read from.
        "control": _recall(read[:-1], truth[1:]),
    }


def _recall(read: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    matched = [match(flat(found).clamp(0, 1), true) for found, true in zip(read, truth, strict=True)]
    return {t.key: sum(m[t].recall for m in matched) / len(matched) for t in THRESHOLDS}


def there(rows: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of which anything arrived."""
    some = rows.abs().amax(1) > 0
    return rows[some], biases[some]


def best(reader: RowReader, rows: Tensor, biases: Tensor, most: int) -> Tensor:
    """As many images as a batch has: those that the reader is surest of, none twice."""
    rows, biases = there(rows, biases)
    if not len(rows):
        return rows
    images, doubt = reader(rows, biases)
    near = mean_squared_errors(images, images) < RECOGNISABLE.largest_error(RANGE)
    kept: list[int] = []
    for number in doubt.argsort().tolist():
        if len(kept) < most and not near[number, kept].any():
            kept.append(number)
    return images[kept]
