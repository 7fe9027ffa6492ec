"""The budget as a defence among others: a client's step on a batch, its update bounded."""

import contextlib
import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbi.defences.base import Kind
from qbi.defences.budget.clipping import Clipping
from qbi.defences.budget.goal import Budget
from qbi.errors import QbiError
from qbi.federation.client import Loss, client_batch, default_loss, run_model
from qbi.randomness import Draws
from qbi.records import Update

FEW = 3
"""Samples on which it is found out where samples stand in a model's tensors."""


@dataclass(frozen=True)
class Bounded:
    """Each sample's gradient clipped over all trainable weights, noise on the sum: `LeakGuard`'s policy `budget`."""

    budget: Budget

    @property
    def name(self) -> str:
        """With what it promises."""
        return f"budget of {self.budget.bits():.3g} bits"

    @property
    def kind(self) -> Kind:
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
        """The bounded gradient of one batch; the model is not changed."""
        own = copy.deepcopy(model).train()
        own.zero_grad()
        gradients, count = self.budget.shares
        clipping = Clipping(
            self.budget.clip,
            gradients,
            generator,
            self.budget.reduction,
            self.budget.accumulate,
            model=own,
            count_noise=count,
        )
        with clipping.seeing, torch.random.fork_rng(devices=[]):
            with contextlib.suppress(QbiError):  # what is wrong shows on the batch, if anything is
                few = tuple(part[:FEW] for part in inputs) if isinstance(inputs, tuple) else (inputs[:FEW],)
                clipping.seeing.look_ahead(own, (few, {}))
            torch.manual_seed(seed)
            value = loss(run_model(own, inputs), targets)
            value.backward()
        named = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
        return Update(
            named, {n: b.detach().clone() for n, b in own.named_buffers()}, client_batch(inputs), float(value.detach())
        )
