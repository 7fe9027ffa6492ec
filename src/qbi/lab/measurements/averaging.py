"""What servers read of several local steps, as FedAvg's clients take them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import qbi
from qbi.data.images import normalised
from qbi.data.open import open_images
from qbi.federation.local import LocalTraining, Optimiser
from qbi.lab.honest import NETWORKS
from qbi.lab.networks import two_layers
from qbi.lab.workers import Workers
from qbi.metrics import RECOGNISABLE, THRESHOLDS

KNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {"two layers": (two_layers, ""), **NETWORKS}
"""Networks, and the layer whose inputs are read; none: the most exposed."""
SERVERS = ("passive", "cascade", "qbi")
BATCHES = 3
HELD = 600


@dataclass(frozen=True)
class Averaged:
    """One client: so many batches of so many images, and passes over them."""

    steps: int
    rate: float
    batch_size: int = 8
    epochs: int = 1
    optimiser: Optimiser = "sgd"
    weight_decay: float = 0.0
    network: str = "two layers"


def settings() -> Iterator[Averaged]:
    """A row each: steps and rates, then what else an optimiser does."""
    for steps, batch_size in ((1, 8), (5, 8), (10, 8), (20, 4), (20, 8)):
        for rate in (1e-3, 1e-2, 1e-1):
            yield Averaged(steps, rate, batch_size)
    for epochs in (5, 20):
        yield Averaged(1, 1e-2, 16, epochs)
        yield Averaged(5, 1e-2, 8, epochs)
    for optimiser in ("momentum", "adam"):
        yield Averaged(5, 1e-2 if optimiser == "momentum" else 1e-3, optimiser=optimiser)
    yield Averaged(5, 1e-2, weight_decay=1e-3)
    for network in ("FedAvg's CNN", "quickstart"):
        for batch_size in (4, 8, 16):
            yield Averaged(5, 1e-2, batch_size, network=network)


def fedavg(data: str) -> dict[str, Any]:
    """CIFAR-10: honest (passive) and crafted, by local steps, rate and optimiser; behind convolutions the features of an honest model."""
    images = open_images(data, size=32, count=HELD, seed=0)
    x, y = normalised(images, slice(None)), images.labels
    found = dict(Workers(os.cpu_count() or 1).map(one_setting, list(settings()), x, y))
    rows = [asdict(setting) | {"read": found[setting]} for setting in settings()]
    return {
        "provenance": f"{images.name}, two layers, {BATCHES} updates a row",
        "rows": rows,
    }


def one_setting(setting: Averaged, x: Tensor, y: Tensor) -> dict[str, Any]:
    """What each server reads: the share of the client's samples, at two thresholds."""
    training = LocalTraining(setting.optimiser, setting.rate, setting.epochs, setting.weight_decay)
    client = qbi.Client(setting.batch_size, setting.steps, training)
    make, layer = KNOWN[setting.network]
    out: dict[str, Any] = dict.fromkeys(SERVERS)
    for server in SERVERS if setting.network == "two layers" else SERVERS[:1]:
        torch.manual_seed(0)
        wishes: dict[str, Any] = {"layers": layer} if layer else {}
        result = qbi.audit(make(), (x, y), attacks=[server], client=client, batches=BATCHES, defences=False, **wishes)
        tried = [a["recovered_from_gradients"] for a in result.document()["attacks"]]
        best = max(tried, key=lambda r: float(r[RECOGNISABLE.key]["mean"]), default=None)
        out[server] = None if best is None else {t.key: best[t.key]["mean"] for t in THRESHOLDS}
    return out
