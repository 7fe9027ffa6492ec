"""Stock privacy filters, through their framework's own code, against servers that read: what is left, and what was claimed.

A client trains, its framework's filter changes what is sent, and the server reads what arrives.
"""

import copy
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.attacks import Knowledge, Mounted, mount
from qbi.attacks.registry import select
from qbi.auditing.claim_records import Circumstances
from qbi.auditing.claims import worth
from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.integrations.stock import State
from qbi.lab.compare.judging import CLASSES, LAYER, network
from qbi.lab.stock import StockFilter
from qbi.metrics import THRESHOLDS, match
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData, Update

NEURONS, BATCH, BATCHES = 200, 20, 3
RATE = 0.1
"""Of the step that is read."""
TRAINING_RATE = 0.01
"""Of the rounds whose accuracy counts."""
ROUNDS = 20
SERVERS = ("passive", "cascade", "qbi")


def judged(data: ImageData, stock: StockFilter, seed: int) -> dict[str, Any]:
    """One filter under one seed: recall of every server, accuracy, ε claimed and true over the rounds that are trained."""
    # Frameworks draw from global generators, which anybody in the process can set.
    np.random.seed(seed)
    torch.manual_seed(seed)
    read = {server: _read(data, stock, server, seed) for server in SERVERS}
    parameters = sum(
        p.numel() for p in network(flat(unit_pixels(data, slice(0, 1))).shape[1], NEURONS, CLASSES, 0).parameters()
    )
    said = worth(stock.claim, Circumstances(ROUNDS, parameters)).document() if stock.claim is not None else {}
    return {
        "filter": stock.name,
        "settings": stock.settings,
        "read": read,
        "accuracy": accuracy(data, stock, seed),
        "claimed": said.get("ε claimed"),
        "epsilon": said.get("ε a round"),
        "in all": said.get("ε in all"),
        "about": said.get("about"),
    }


def summed_up(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One filter over its seeds: mean and spread of what was measured under each."""
    first = runs[0]
    read = {s: {t.key: spread_of([r["read"][s][t.key] for r in runs]) for t in THRESHOLDS} for s in first["read"]}
    return {**first, "read": read, "accuracy": spread_of([r["accuracy"] for r in runs])}


def spread_of(each: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation of single results, and the results."""
    return {"mean": fmean(each), "spread": stdev(each), "each": list(each)}


def _read(data: ImageData, stock: StockFilter, server: str, seed: int) -> Mapping[str, float]:
    (attack,) = select([server], "filters")
    each: dict[str, list[float]] = {t.key: [] for t in THRESHOLDS}
    for number in range(BATCHES):
        name = (server, number)
        size = BATCH * stock.clients
        order = torch.randperm(len(data), generator=generator(seed, "samples", *name))
        chosen, others = order[:size], order[size : size + NEURONS]
        x, y = normalised(data, chosen), data.labels[chosen] % CLASSES
        auxiliary = flat(normalised(data, others))
        model = network(auxiliary.shape[1], NEURONS, CLASSES, derive_seed(seed, "model", *name))
        prepared = attack.prepare(Knowledge(BATCH, NEURONS, auxiliary.shape[1], auxiliary, seed=seed))
        mounted = mount(model, prepared, x[:2], generator(seed, "rows", *name), layer=LAYER)
        found = mounted.read(arriving(mounted, stock, x, y)).samples
        pixels = flat(denormalised(data, found)) if len(found) else found
        matched = match(pixels, flat(unit_pixels(data, chosen)))
        for threshold in THRESHOLDS:
            each[threshold.key].append(matched[threshold].recall)
    return {key: fmean(values) for key, values in each.items()}


def arriving(mounted: Mounted, stock: StockFilter, x: Tensor, y: Tensor) -> Update:
    """The mean over clients of what arrives, as a gradient."""
    sent = {n: v.detach().clone() for n, v in mounted.model.state_dict().items()}
    total = {n: torch.zeros_like(v) for n, v in sent.items()}
    for own, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        trained = stock.apply(sent, _trained(mounted.model, own, targets, stock.noise, RATE))
        for n in total:
            total[n] += (sent[n] - trained[n]) / RATE / stock.clients
    return Update(total, {}, 0, float("nan"))


def _trained(model: nn.Module, x: Tensor, y: Tensor, noise: float | None, rate: float) -> State:
    """One pass of plain SGD over batches in order, or Opacus' own optimiser around it."""
    own = copy.deepcopy(model).train()
    optimiser: Any = torch.optim.SGD(own.parameters(), lr=rate)
    if noise is not None:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        wrapped: nn.Module = GradSampleModule(own)
        optimiser = DPOptimizer(optimiser, noise_multiplier=noise, max_grad_norm=1.0, expected_batch_size=BATCH)
    else:
        wrapped = own
    for some, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimiser.zero_grad()
        F.cross_entropy(wrapped(some), targets).backward()
        optimiser.step()
    return {n: v.detach().clone() for n, v in own.state_dict().items()}


def accuracy(data: ImageData, stock: StockFilter, seed: int, images: int = 2000, held_out: int = 1000) -> float:
    """Of one client's rounds of one epoch each, every round through the filter, on images that were not trained on."""
    order = torch.randperm(len(data), generator=generator(seed, "accuracy"))
    train, test = order[held_out : held_out + images], order[:held_out]
    x, y = normalised(data, train), data.labels[train] % CLASSES
    model = network(flat(x[:1]).shape[1], NEURONS, CLASSES, derive_seed(seed, "trained"))
    for _ in range(ROUNDS):
        sent = {n: v.detach().clone() for n, v in model.state_dict().items()}
        model.load_state_dict(stock.apply(sent, _trained(model, x, y, stock.noise, TRAINING_RATE)))
    with torch.no_grad():
        right = model(normalised(data, test)).argmax(1) == data.labels[test] % CLASSES
    return float(right.double().mean())
