"""Several local steps, as FedAvg's clients take them: what is sent is the difference of the weights."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from qbi.errors import BadValue
from qbi.federation.client import Loss, client_batch, default_loss, run_model
from qbi.records import Update

Optimiser = Literal["sgd", "momentum", "adam"]


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains before it sends an update."""

    optimiser: Optimiser = "sgd"
    learning_rate: float = 0.1
    epochs: int = 1
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.weight_decay < float("inf"):
            raise BadValue(f"local training: weight decay {self.weight_decay}; it is a number of at least 0.")
        if not self.learning_rate > 0 or self.epochs < 1:
            raise BadValue(
                f"local training: learning rate {self.learning_rate}, {self.epochs} epochs; both must be positive."
            )


Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]


def local_update(
    model: nn.Module, batches: Sequence[Batch], training: LocalTraining, *, loss: Loss = default_loss, seed: int = 0
) -> Update:
    """Train a copy over the batches and give back what a server sees: weights before minus weights after, in their own precision.

    After one step of SGD this is the gradient times the learning rate, up to the rounding of the weights: a server
    divides it just the same. The model is not changed.
    """
    if not batches:
        raise BadValue("local training: there is no batch; give at least one.")
    trained = copy.deepcopy(model).train()
    optimiser = _optimiser(trained, training)
    value = torch.zeros(())
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for _ in range(training.epochs):
            for inputs, targets in batches:
                optimiser.zero_grad()
                value = loss(run_model(trained, inputs), targets)
                if not bool(torch.isfinite(value)):
                    raise BadValue(f"local training: the loss is {value.item()}; lower the learning rate.")
                value.backward()
                optimiser.step()
    before = dict(model.named_parameters())
    difference = {n: before[n].detach() - p.detach() for n, p in trained.named_parameters() if p.grad is not None}
    buffers = {n: b.detach().clone() for n, b in trained.named_buffers()}
    steps = len(batches) * training.epochs
    return Update(difference, buffers, client_batch(batches[0][0]), float(value.detach()), steps, len(batches))


def _optimiser(model: nn.Module, training: LocalTraining) -> torch.optim.Optimizer:
    rate = training.learning_rate
    if training.optimiser == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate, weight_decay=training.weight_decay)
    momentum = 0.9 if training.optimiser == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=training.weight_decay)


def without_decay(update: Update, sent: nn.Module, training: LocalTraining, steps: int) -> Update:
    """What a server makes of an update with weight decay: it knows the weights it sent, and takes their part off.

    Exact after one step of SGD; after more, the weights that decayed were no longer quite those.
    """
    if not training.weight_decay or training.optimiser == "adam":
        return update
    part = training.learning_rate * training.weight_decay * steps
    own = {n: p.detach() for n, p in sent.named_parameters()}
    return replace(update, gradients={n: g - part * own[n] for n, g in update.gradients.items()})
