"""The weights that a private training releases: taken as public at the beginning, moved by released steps alone."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qbi.errors import BadValue
from qbi.private.beginning import Beginning

State = Mapping[str, Tensor]


class Weights:
    """A model's trained weights as they were released last, and all its other tensors as they were when training began.

    Args:
        model: whose tensors these are.
        parameters: those that are trained, by name.
        average: decay of a running average of the released weights; none is kept without it.
        beside: what is called beside the model, such as the loss; what it holds is put back too.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        average: float | None,
        beside: tuple[Any, ...] = (),
    ) -> None:
        self.model, self.parameters, self.average, self.beside = model, parameters, average, beside
        self.optimisers: WeakKeyDictionary[torch.optim.Optimizer, Momentum] = WeakKeyDictionary()
        self.begin()

    def begin(self) -> None:
        """Take the weights as they are for public."""
        state = self.model.state_dict(keep_vars=True)
        own = {id(p): n for n, p in self.parameters.items()}
        self.trained = {name: own[id(v)] for name, v in state.items() if id(v) in own}
        self.fixed = {n: v.detach().clone() for n, v in state.items() if n not in self.trained}
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        self.others = {n: (v, v.detach().clone()) for n, v in tensors if n not in self.parameters}
        self.beginning = Beginning(self.model, *self.beside)
        self.kept = {n: p.detach().clone() for n, p in self.parameters.items()}
        self.mean: dict[str, Tensor] | None = None
        self.gradients: Tensor | None = None
        self.note()

    def load(self, state: State, admit: Callable[[], None]) -> None:
        """Take other weights for public, if they are let in, and the former ones again if not: having been loaded makes nothing public."""
        before = dict(vars(self))
        try:
            self.model.load_state_dict(dict(state))
            self.begin()
            admit()
        except BaseException:
            # What was released last, and not what the model held: that may have been written by anybody.
            vars(self).update(before)
            self.restore()
            self.note()
            raise

    def forget_optimisers(self) -> None:
        """Momentum of steps that were paid for elsewhere, or nowhere, does not move what leaves now."""
        self.optimisers = WeakKeyDictionary()

    def note(self) -> None:
        """Remember how often each weight was written, so that a write from elsewhere is noticed."""
        self.versions = {n: p._version for n, p in self.parameters.items()}

    def by_name(self, values: Tensor) -> dict[str, Tensor]:
        """A flat tensor over all trained weights, by weight."""
        parts = values.split([p.numel() for p in self.parameters.values()])
        pairs = zip(self.parameters.items(), parts, strict=True)
        return {n: part.reshape(p.shape).to(p.dtype) for (n, p), part in pairs}

    def released(self) -> list[State]:
        """Trained weights as they may leave now, by every name they have: the last ones, their average, the last gradient."""
        sources = [self.kept, *([self.mean] if self.mean is not None else [])]
        if self.gradients is not None:
            sources.append(self.by_name(self.gradients))
        return [{name: values[own].clone() for name, own in self.trained.items()} for values in sources]

    def state(self, *, averaged: bool) -> dict[str, Tensor]:
        """The whole state as it may leave."""
        if averaged and self.mean is None:
            raise BadValue("private: no average is kept; create Private with average=0.99, say.")
        weights = self.mean if averaged and self.mean is not None else self.kept
        return {
            name: weights[self.trained[name]].clone() if name in self.trained else self.fixed[name].clone()
            for name in self.model.state_dict()
        }

    def check(self) -> None:
        """The weights that are trained stay the same ones, and only released steps move them."""
        now = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if now.keys() != self.parameters.keys() or any(now[n] is not p for n, p in self.parameters.items()):
            raise BadValue(
                "private: weights were added, replaced, frozen or freed since Private was created; create it anew."
            )
        if {n for n, _ in self.model.named_buffers()} - self.others.keys():
            raise BadValue(
                "private: the model got buffers since Private was created; run it once before, or create Private anew."
            )
        for name, parameter in self.parameters.items():
            if parameter._backward_hooks:
                raise BadValue(f"private: “{name}” has a hook on its gradient, which the step does not run; remove it.")
            if parameter._version != self.versions[name] and not torch.equal(parameter.detach(), self.kept[name]):
                raise BadValue(
                    f"private: “{name}” was changed outside of private.step; what moved it is not bounded. Load public weights with "
                    "private.load_state_dict, and put penalties on weights into Private(penalty=...)."
                )

    def check_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        """Momentum and the like may only hold what was released."""
        if isinstance(optimiser, torch.optim.LBFGS):
            raise BadValue("private: LBFGS steers by the loss, which is not released; use SGD or Adam.")
        if any(not isinstance(v, Tensor | int | float | str) for v in _kept(optimiser)):
            raise BadValue(
                "private: the optimiser keeps something else than tensors and numbers, which nobody can put back; use one of torch.optim."
            )
        known = self.optimisers.get(optimiser)
        if _mark(optimiser) != (known.mark if known is not None else ()):
            raise BadValue(
                "private: the optimiser holds a state (momentum, say) that did not come from this private training; it would leave with the weights. "
                "Create the optimiser anew, and let private.step alone step it."
            )

    def take(self, gradients: Tensor) -> None:
        """Put released gradients, flat over all weights, in the place of whatever stood there."""
        self.gradients = gradients
        for name, part in self.by_name(gradients.clone()).items():
            self.parameters[name].grad = part

    def add_gradient_of(self, penalty: Callable[[nn.Module], Tensor]) -> None:
        """Add the gradient of a term of the weights alone, which depends on no data."""
        with torch.enable_grad():
            term = penalty(self.model)
        more = torch.autograd.grad(term, list(self.parameters.values()), allow_unused=True)
        for parameter, gradient in zip(self.parameters.values(), more, strict=True):
            if gradient is not None:
                assert parameter.grad is not None
                parameter.grad += gradient
        self.restore()  # whatever it did to the weights

    def restore(self) -> None:
        """The weights of the last release, and all else as it was at the beginning: whatever was done to them is undone."""
        self.beginning.put_back()
        with torch.no_grad():
            for now, before in self.others.values():
                now.copy_(before)
            torch._foreach_copy_(list(self.parameters.values()), list(self.kept.values()))

    def step(self, optimiser: torch.optim.Optimizer) -> None:
        """Let an optimiser step by the released gradients alone, and keep what comes of it."""
        own = {id(p) for p in self.parameters.values()}
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in own:  # raw gradients of frozen weights, or of anything else, move nothing
                    parameter.grad = None
        known = self.optimisers.get(optimiser)
        if known is not None:
            known.put_back(optimiser)
        optimiser.step()
        self._keep()
        self.optimisers[optimiser] = Momentum(optimiser)

    def clear(self) -> None:
        """No gradient is left."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.note()

    def _keep(self) -> None:
        torch._foreach_copy_(list(self.kept.values()), [p.detach() for p in self.parameters.values()])
        self.note()
        if self.average is None:
            return
        if self.mean is None:
            self.mean = {n: v.clone() for n, v in self.kept.items()}
        for name, value in self.mean.items():
            value.lerp_(self.kept[name], 1 - self.average)


class Momentum:
    """What an optimiser kept after a released step: as much memory again as it takes itself.

    torch counts writes into a tensor, but not those of fused optimisers and not those through `.data`; so what is kept is put back before the next
    step, whatever was written since.
    """

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.mark = _mark(optimiser)
        self.values = [v.detach().clone() for v in _tensors(optimiser)]

    def put_back(self, optimiser: torch.optim.Optimizer) -> None:
        """Into the same tensors, of which `mark` says that they are still there."""
        with torch.no_grad():
            for now, before in zip(_tensors(optimiser), self.values, strict=True):
                now.copy_(before)


def _kept(optimiser: torch.optim.Optimizer) -> list[Any]:
    return [v for v in tree_leaves([dict(state) for state in optimiser.state.values()]) if v is not None]


def _tensors(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [v for v in _kept(optimiser) if isinstance(v, Tensor)]


def _mark(optimiser: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Which tensors an optimiser keeps, how often each was written, and all else that it keeps, as it is."""
    return tuple((id(v), v._version) if isinstance(v, Tensor) else v for v in _kept(optimiser))
