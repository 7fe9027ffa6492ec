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
from qbi.defences.guard import POLICIES, LeakRefused, Policy, is_finite, protect
from qbi.errors import BadValue
from qbi.exposure import count_leaks, difference_leaks
from qbi.federation.exposed import Watch

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

    Policies are `LeakGuard`'s: report, auto, noise, aggp, drop, skip, refuse.
    """

    def __init__(
        self, policy: Policy = "auto", *, settings: AGGP | None = None, fewest: int = 16, seed: int = 0
    ) -> None:
        if policy not in POLICIES:
            raise BadValue(f"AmbientGuard: no policy is called {policy!r}; there are {', '.join(POLICIES)}.")
        self.policy, self.settings, self.fewest = policy, settings or AGGP(), fewest
        self.generator = torch.Generator().manual_seed(seed)
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
        if isinstance(module, nn.Linear) and module.bias is not None and isinstance(out, Tensor) and out.requires_grad:
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
                exposures.append((layer, self._watch.exposure(name)))
            except BadValue:
                self._refuse(
                    optimiser, f"a linear layer {tuple(layer.weight.shape)} got gradients that were not seen to arise"
                )
        leaks = [count_leaks(exposure) for _, exposure in exposures]
        whole = max((len(e.inputs) for _, e in exposures), default=0)
        either = [
            int((leak.samples | difference_leaks(exposure)).sum())
            for leak, (_, exposure) in zip(leaks, exposures, strict=True)
        ]
        readable = max(either, default=0)
        self.tally.steps += 1
        self.tally.samples += whole
        self.tally.readable += readable
        if self.tally.steps == 1:
            self.tally.first_readable = {
                "×".join(map(str, layer.weight.shape)): leak.count
                for (layer, _), leak in zip(exposures, leaks, strict=True)
            }
        if self.policy in ("noise", "aggp", "drop"):
            self.tally.rows_changed += sum(
                protect(layer, exposure, self.policy, self.settings, self.fewest, self.generator)
                for layer, exposure in exposures
            )
        elif self.policy == "auto":
            self.tally.rows_changed += sum(
                protect(layer, exposure, self.policy, self.settings, self.fewest, self.generator)
                for (layer, exposure), count in zip(exposures, either, strict=True)
                if count
            )
        elif readable and self.policy == "skip":
            self._clear(optimiser)
        elif readable and self.policy == "refuse":
            self._refuse(optimiser, f"{readable} of {whole} samples of a step could be read")
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
