"""Heuristic policies at the end of every backward pass: linear layers are counted and changed as the policy says."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qbi.defences.calls import Call, LeakRefused, Root
from qbi.defences.layout import leaves
from qbi.defences.policy import Decision, Policy, decide
from qbi.defences.seeing import Seeing, weakly
from qbi.exposure import Exposure
from qbi.exposure.watching import watchable
from qbi.federation.exposed import ClientStep
from qbi.finite import is_finite
from qbi.randomness import Draws
from qbi.records import Update


@dataclass(frozen=True)
class Counted:
    """What was found in one backward pass."""

    samples: int
    readable: int
    rows_changed: int
    layers: dict[str, int]
    """By shape: how many samples stood alone in a row."""


@dataclass
class Counting:
    """Listens to backward passes, counts what linear layers with a bias give away, and applies a policy to them."""

    policy: Policy
    draws: Draws
    passes: list[Counted] = field(default_factory=list)
    unwatched: set[str] = field(default_factory=set)
    """Modules with trainable weights that these policies do not look at."""

    def __post_init__(self) -> None:
        self.seeing = Seeing(weakly(self._listen), trial=False)
        self.seeing.on_backward = weakly(self._remember)
        self.placed: dict[int, Tensor] = {}
        self.parameters: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}

    def is_placed(self, parameter: Tensor) -> bool:
        """Whether the gradient that stands there was seen to arise."""
        return parameter.grad is None or self.placed.get(id(parameter)) is parameter.grad

    def _remember(self, root: Root) -> None:
        kept = {id(p): p.grad for p in root.trainable().values() if p.grad is not None}
        self._before |= {key: g.detach().clone() for key, g in kept.items() if bool(g.any())}

    def _listen(self, calls: list[Call]) -> None:
        roots = {id(c.root): c.root for c in calls}.values()
        parameters = [p for root in roots for p in root.trainable().values()]
        with torch.no_grad():
            try:
                self._protect(calls, list(roots), parameters)
            except BaseException:
                # Whatever goes wrong, nothing raw stays.
                for parameter in parameters:
                    parameter.grad = None
                raise
            finally:
                self._before = {}

    def _protect(self, calls: list[Call], roots: list[Root], parameters: list[Tensor]) -> None:
        if not all(p.grad is None or is_finite(p.grad) for p in parameters):
            raise LeakRefused("guard: gradients have NaN or infinite values. They were cleared.")
        called = {id(c.module) for c in calls}
        layers = {id(m): m for root in roots for m in root.module.modules() if id(m) in called and _counts(m)}
        self._refuse_unseen(roots, layers)
        exposures, gradients, own = [], {}, {}
        for key, layer in layers.items():
            assert isinstance(layer, nn.Linear)
            exposures.append(_exposure(str(key), [c for c in calls if c.module is layer]))
            for part, parameter in (("weight", layer.weight), ("bias", layer.bias)):
                if parameter.grad is None:
                    raise LeakRefused(
                        "guard: gradients were taken by autograd.grad, which passes the guard by; use backward()."
                    )
                before = self._before.get(id(parameter))
                gradients[f"{key}.{part}"] = parameter.grad if before is None else parameter.grad - before
                own[f"{key}.{part}"] = parameter
        decision = decide(self.policy, ClientStep(Update(gradients, {}, 0, float("nan")), tuple(exposures)), self.draws)
        self.passes.append(_counted(decision, exposures))
        if decision.act == "refuse":
            count = max(decision.readable, default=0)
            raise LeakRefused(
                f"guard: {count} samples of a step stand alone in a row or a difference of two. The gradients were cleared."
            )
        for name, parameter in own.items():
            before = self._before.get(id(parameter))
            changed = decision.gradients[name].to(parameter.dtype)
            parameter.grad = changed if before is None else changed + before
        for parameter in parameters:
            if decision.act == "clear":
                parameter.grad = self._before.get(id(parameter))
            if parameter.grad is not None:
                self.placed[id(parameter)], self.parameters[id(parameter)] = parameter.grad, parameter

    def _refuse_unseen(self, roots: Iterable[Root], layers: dict[int, nn.Module]) -> None:
        """A linear layer that got a gradient without being called is used behind the guard's back."""
        for root in roots:
            attention = {id(m.out_proj) for m in root.module.modules() if isinstance(m, nn.MultiheadAttention)}
            for name, module in root.module.named_modules():
                reached = any(p.requires_grad and p.grad is not None for p in module.parameters(recurse=False))
                if not reached or id(module) in layers:
                    continue
                if _counts(module) and id(module) not in attention and not self._had(module):
                    raise LeakRefused(
                        f"guard: “{name}” got a gradient that was not seen to arise; call the layer itself. The gradients were cleared."
                    )
                self.unwatched.add(f"{name or 'the model'} ({type(module).__name__})")

    def _had(self, module: nn.Module) -> bool:
        """Whether all of its gradient stood there before this pass."""
        return all(
            id(p) in self._before and p.grad is not None and torch.equal(p.grad, self._before[id(p)])
            for p in module.parameters(recurse=False)
        )


def _counts(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and watchable(module)


def _exposure(name: str, calls: list[Call]) -> Exposure:
    into = [leaves(c.given)[0] for c in calls]
    back = [c.gradients[0] for c in calls]
    return Exposure(
        name,
        torch.cat([v.reshape(-1, v.shape[-1]) for v in into]).float(),
        torch.cat([g.reshape(-1, g.shape[-1]) for g in back]).float().T,
    )


def _counted(decision: Decision, exposures: list[Exposure]) -> Counted:
    shapes = [f"{len(e.shares)}×{e.inputs.shape[1]}" for e in exposures]
    return Counted(
        samples=max((len(e.inputs) for e in exposures), default=0),
        readable=max(decision.readable, default=0),
        rows_changed=decision.rows_changed,
        layers={shape: leak.count for shape, leak in zip(shapes, decision.leaks, strict=True)},
    )
