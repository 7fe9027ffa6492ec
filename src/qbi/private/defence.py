"""The private step as a defence among others: a client's step on a batch, its update bounded."""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qbi.federation.client import Loss, client_batch, default_loss, prediction
from qbi.private.goal import Budget
from qbi.private.step import Private
from qbi.randomness import Draws, SystemEntropy, random_integer
from qbi.records import Update


@dataclass(frozen=True)
class PrivateStep:
    """Each sample's gradient clipped over all trained weights, noise on the sum, on the grid: what `qbi.Private` does."""

    budget: Budget

    @property
    def name(self) -> str:
        """With what it promises."""
        return f"private step, {self.budget.bits():.3g} bits"

    @property
    def kind(self) -> Literal["formal", "heuristic"]:
        """It carries a proof, unless there is no noise."""
        return "formal" if self.budget.noise else "heuristic"

    def update(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Tensor,
        generator: Draws,
        *,
        loss: Loss = default_loss,
        seed: int = 0,
    ) -> Update:
        """The released gradient of one batch; the model is not changed."""
        own, count = copy.deepcopy(model).train(), client_batch(inputs)
        private = Private(
            own,
            lambda out, y: loss(prediction(out), y),
            batch_size=count,
            clip=self.budget.clip,
            bits=self.budget.bits(1),
            total=float("inf"),
        )
        if not isinstance(generator, SystemEntropy):
            private._repeat(random_integer(generator))
        optimiser = torch.optim.SGD(own.parameters(), lr=1.0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            report = private.step(optimiser, inputs, targets)
        gradients = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
        return Update(gradients, {n: b.detach().clone() for n, b in own.named_buffers()}, count, report.loss)
