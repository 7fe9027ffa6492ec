"""What every defence is: a map from a client's step to a client's step; what is sent is its update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from qbi.exposure import Exposure
from qbi.federation.client import Loss, default_loss
from qbi.federation.exposed import ClientStep, exposed_step
from qbi.randomness import Draws
from qbi.records import Update

Kind = Literal["formal", "heuristic"]


class Described(Protocol):
    """What tables say of a defence. *Formal* ones carry a proof, *heuristic* ones a measurement."""

    @property
    def name(self) -> str:
        """How tables call it."""
        ...

    @property
    def kind(self) -> Kind:
        """Formal or heuristic."""
        ...


@runtime_checkable
class Defence(Described, Protocol):
    """Changes an update before it leaves."""

    def apply(self, step: ClientStep, generator: Draws) -> ClientStep:
        """The step to send instead; the given one is not changed."""
        ...


@runtime_checkable
class StepDefence(Described, Protocol):
    """Makes the update itself, since it needs what a finished one no longer holds, such as each sample's own gradient."""

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
        """What a client sends instead; the model is not changed."""
        ...


def protected_step(
    defence: Defence | StepDefence,
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    generator: torch.Generator,
    *,
    layers: Sequence[str] | None = None,
    loss: Loss = default_loss,
    seed: int = 0,
) -> ClientStep:
    """A client's step with either kind of defence on."""
    step = exposed_step(model, inputs, targets, layers=layers, loss=loss, seed=seed)
    if isinstance(defence, StepDefence):
        return replace(step, update=defence.update(model, inputs, targets, generator, loss=loss, seed=seed))
    return defence.apply(step, generator)


@dataclass(frozen=True)
class Chain:
    """Defences one after another; formal only if one of them is."""

    parts: tuple[Defence, ...]

    @property
    def name(self) -> str:
        """The parts' names."""
        return " + ".join(part.name for part in self.parts) or "none"

    @property
    def kind(self) -> Kind:
        """What was formal stays formal: the others only see what is already protected."""
        return "formal" if any(part.kind == "formal" for part in self.parts) else "heuristic"

    def apply(self, step: ClientStep, generator: Draws) -> ClientStep:
        """Apply the parts in order."""
        for part in self.parts:
            step = part.apply(step, generator)
        return step


def chain(*defences: Defence) -> Chain:
    """Compose defences."""
    return Chain(defences)


def change_rows(step: ClientStep, change: Callable[[Exposure, Tensor, Tensor], tuple[Tensor, Tensor]]) -> ClientStep:
    """Replace the weight gradients of every exposed layer, and those of its bias where it has one."""
    gradients = dict(step.update.gradients)
    for exposure in step.exposures:
        weight, bias = f"{exposure.layer}.weight", f"{exposure.layer}.bias"
        summed = exposure.backprops.sum(1)
        gradients[weight], changed = change(exposure, gradients[weight], gradients.get(bias, summed))
        if bias in gradients:
            gradients[bias] = changed
    return replace(step, update=replace(step.update, gradients=gradients))


def change_all(step: ClientStep, change: Callable[[Tensor], Tensor]) -> ClientStep:
    """Replace every gradient on its own."""
    gradients = {name: change(gradient) for name, gradient in step.update.gradients.items()}
    return replace(step, update=replace(step.update, gradients=gradients))
