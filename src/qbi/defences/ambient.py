"""The guard for training code one does not want to touch: it watches every linear layer and every optimiser step.

Inside the block, whatever model is trained by whatever loop: before an optimiser moves weights, the gradients of linear
layers with a bias are counted and protected, as `LeakGuard` does for one model. It fails closed: gradients of such a layer
that were not seen to arise are refused.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from qbi.defences.aggp import AGGP
from qbi.defences.guard import LeakRefused, is_finite
from qbi.defences.policy import PolicyName, decide, policy_named
from qbi.errors import BadValue
from qbi.exposure import Watch
from qbi.exposure.watching import watchable
from qbi.federation.exposed import ClientStep
from qbi.randomness import SystemEntropy, generator
from qbi.records import Update

log = logging.getLogger("qbi.guard")


@dataclass
class Tally:
    """What was seen over all steps of one training."""

    steps: int = 0
    samples: int = 0
    readable: int = 0
    """Samples of all steps that a server could have read from that step's gradients, from a row or a difference of two."""
    rows_changed: int = 0
    first_readable: dict[str, int] = field(default_factory=dict)
    """By shape of the layer: how many were readable in the first step."""

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.readable} of {self.samples} samples readable, {self.rows_changed} rows changed"
        )


class AmbientGuard:
    """Watches every linear layer with a bias and every optimiser inside a `with` block.

    Args:
        policy: as `LeakGuard`'s: report, auto, noise, aggp, drop, skip, refuse; all heuristic.
        settings: of AGGP.
        fewest: of `drop`.
        seed: for tests only; without it, noise comes from the operating system.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with AmbientGuard("noise") as guard:
    ...     nn.functional.cross_entropy(model(torch.rand(3, 6)), torch.tensor([0, 1, 1])).backward()
    ...     optimiser.step()
    >>> guard.tally.steps
    1
    """

    def __init__(
        self,
        policy: PolicyName = "auto",
        *,
        settings: AGGP | None = None,
        fewest: int = 16,
        seed: int | None = None,
    ) -> None:
        self.policy = policy_named(policy, "AmbientGuard", settings=settings, fewest=fewest)
        self.draws = SystemEntropy() if seed is None else generator(seed, "guard")
        self.tally = Tally()
        self._watch = Watch()
        self._layers: dict[str, nn.Linear] = {}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "AmbientGuard":
        self._hooks = [
            register_module_forward_hook(self._forward),
            register_optimizer_step_pre_hook(self._before_step),
        ]
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget()

    def _forget(self) -> None:
        self._watch.clear()
        self._layers.clear()

    def _forward(self, module: nn.Module, given: Any, out: Any) -> None:
        if isinstance(module, nn.Linear) and watchable(module) and isinstance(out, Tensor) and out.requires_grad:
            name = str(id(module))
            self._layers[name] = module
            self._watch.catch(name, given[0], out)

    def _before_step(self, optimiser: torch.optim.Optimizer, _args: Any, _options: Mapping[str, Any]) -> None:
        moved = {id(p) for group in optimiser.param_groups for p in group["params"] if p.grad is not None}
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not is_finite(parameter.grad):
                    self._refuse(optimiser, "gradients have NaN or infinite values")
        seen = {n: layer for n, layer in self._layers.items() if id(layer.weight) in moved}
        exposures = []
        for name, layer in seen.items():
            try:
                exposures.append(self._watch.exposure(name))
            except BadValue:
                self._refuse(
                    optimiser, f"a linear layer {tuple(layer.weight.shape)} got gradients that were not seen to arise"
                )
        parameters = {f"{n}.{part}": getattr(layer, part) for n, layer in seen.items() for part in ("weight", "bias")}
        update = Update({n: p.grad for n, p in parameters.items()}, {}, 0, float("nan"))
        decision = decide(self.policy, ClientStep(update, tuple(exposures)), self.draws)
        whole = max((len(e.inputs) for e in exposures), default=0)
        readable = max(decision.readable, default=0)
        self.tally.steps += 1
        self.tally.samples += whole
        self.tally.readable += readable
        self.tally.rows_changed += decision.rows_changed
        if self.tally.steps == 1:
            shapes = ["×".join(map(str, layer.weight.shape)) for layer in seen.values()]
            self.tally.first_readable = {s: leak.count for s, leak in zip(shapes, decision.leaks, strict=True)}
        if decision.act == "refuse":
            self._refuse(optimiser, f"{readable} of {whole} samples of a step could be read")
        if decision.act == "clear":
            self._clear(optimiser)
        else:
            for name, parameter in parameters.items():
                parameter.grad = decision.gradients[name].to(parameter.dtype)
        self._forget()

    def _refuse(self, optimiser: torch.optim.Optimizer, why: str) -> None:
        self._clear(optimiser)
        self._forget()
        raise LeakRefused(f"AmbientGuard: {why}. The gradients were cleared.")

    @staticmethod
    def _clear(optimiser: torch.optim.Optimizer) -> None:
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
