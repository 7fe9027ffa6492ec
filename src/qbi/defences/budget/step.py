"""The budget as a defence among others: a client's step on a batch, its update bounded."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qbi.defences.base import Kind
from qbi.defences.budget.clipping import Clipping
from qbi.defences.budget.goal import Budget
from qbi.federation.client import Loss, client_batch, default_loss, run_model
from qbi.federation.exposed import ClientStep, exposed_step
from qbi.randomness import Draws
from qbi.records import Update


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

    def take(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Tensor,
        generator: torch.Generator,
        *,
        layers: Sequence[str] | None = None,
        loss: Loss = default_loss,
        seed: int = 0,
    ) -> ClientStep:
        """A client's step whose update is bounded."""
        step = exposed_step(model, inputs, targets, layers=layers, loss=loss, seed=seed)
        return replace(step, update=self.update(model, inputs, targets, generator, loss=loss, seed=seed))

    def update(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Tensor,
        draws: Draws,
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
            draws,
            self.budget.reduction,
            self.budget.accumulate,
            model=own,
            count_noise=count,
        )
        with clipping.seeing, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            value = loss(run_model(own, inputs), targets)
            value.backward()
        named = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
        return Update(
            named, {n: b.detach().clone() for n, b in own.named_buffers()}, client_batch(inputs), float(value.detach())
        )
