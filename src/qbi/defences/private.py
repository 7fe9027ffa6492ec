"""DP-SGD through Opacus: each sample's gradient is clipped, noise is added to their sum.

The one *formal* defence here. What it promises is said with its scope, never as a bare ε: neighbouring batches differ by
adding or removing one sample, batches are Poisson samples at the stated rate, and what is covered are the gradients;
buffers, the loss and the learning rate are not.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbi.defences.base import Kind
from qbi.errors import BadValue, first_line
from qbi.federation.client import Loss, client_batch, default_loss, run_model
from qbi.records import Update


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ), and what they speak of."""

    epsilon: float
    delta: float
    scope: str

    def __str__(self) -> str:
        return f"ε = {self.epsilon:.2f} at δ = {self.delta:g} ({self.scope})"


@dataclass(frozen=True)
class DPSGD:
    """Clip every sample's gradient to `clip`, add noise of standard deviation `noise`·`clip` to the sum.

    The sensitivity of the sum is the clip: the noise is never measured against anything smaller. Noise 0 with an
    infinite clip changes nothing and promises nothing.
    """

    clip: float = 1.0
    noise: float = 1.0

    def __post_init__(self) -> None:
        if not self.clip > 0 or not self.noise >= 0:
            raise BadValue(
                f"DP-SGD: clip is {self.clip}, noise {self.noise}; the clip must be positive, noise not negative."
            )

    @property
    def name(self) -> str:
        """With its parameters."""
        return f"DP-SGD, clip {self.clip:g}, noise {self.noise:g}"

    @property
    def kind(self) -> Kind:
        """Formal only with noise."""
        return "formal" if self.noise else "heuristic"

    def guarantee(self, *, sample_rate: float, steps: int, delta: float) -> Guarantee:
        """ε as Opacus's RDP accountant gives it."""
        if not 0 < sample_rate <= 1 or steps < 1 or not 0 < delta < 1:
            raise BadValue(
                f"DP-SGD: sample rate {sample_rate}, {steps} steps, δ {delta}; the rate lies in (0, 1], δ in (0, 1)."
            )
        scope = f"one sample added or removed, Poisson batches at rate {sample_rate:g}, {steps} steps, gradients only"
        if not self.noise:
            return Guarantee(float("inf"), delta, scope)
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        accountant.history = [(self.noise, sample_rate, steps)]
        return Guarantee(float(accountant.get_epsilon(delta)), delta, scope)

    def update(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Tensor,
        generator: torch.Generator,
        *,
        loss: Loss = default_loss,
        seed: int = 0,
    ) -> Update:
        """The private mean gradient of a batch. Memory: one gradient of the model for every sample."""
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        private = copy.deepcopy(model).train()
        try:
            private = GradSampleModule(private, loss_reduction="mean")
        except NotImplementedError as problem:
            reason = first_line(problem).strip("[]")
            raise BadValue(f"DP-SGD: this model has no gradient of single samples ({reason}).") from problem
        optimiser = DPOptimizer(
            torch.optim.SGD(private.parameters(), lr=1.0),
            noise_multiplier=self.noise,
            max_grad_norm=self.clip,
            expected_batch_size=client_batch(inputs),
            generator=generator,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            value = loss(run_model(private, inputs), targets)
        value.backward()
        optimiser.pre_step()
        named = {n.removeprefix("_module."): p.grad for n, p in private.named_parameters() if p.grad is not None}
        buffers = {n.removeprefix("_module."): b for n, b in private.named_buffers()}
        return Update(gradients=named, buffers=buffers, batch_size=client_batch(inputs), loss=float(value.detach()))
