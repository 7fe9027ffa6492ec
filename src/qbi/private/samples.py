"""Evaluates each sample's loss alone: another sample cannot enter its gradient, whatever the model, the weights or the loss do.

The loss of one sample is mapped over a batch by `torch.func.vmap`; where an operation has no batching rule, or the model's code looks
at values, samples go one by one. How a model is run (the plan) is found out on zeros of the batch's shape, never on data, and every
batch is filled up to one size: so neither the arithmetic nor its rounding says how many samples there are, or what they are.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from qbi.errors import BadValue, first_line
from qbi.private import forgetting
from qbi.private.arithmetic import dense, exact_arithmetic, quietly
from qbi.private.clipping import Seen, add_clipped
from qbi.private.products import returned
from qbi.private.refusals import refuse_mixing, refuse_odd_weights, refuse_scripts
from qbi.uses import Capture, Use

log = logging.getLogger("qbi.private")

Loss = Callable[[Any, Any], Tensor]
"""From what a model returns for one sample, in a batch of one, and its target to a number."""


Augment = Callable[[Any, Any], tuple[Any, Any]]
"""From a sample, in a batch of one, to several versions of it in one batch."""


@dataclass(frozen=True)
class Plan:
    """How a model is run: decided by shapes and code alone."""

    mapped: bool = True
    """All samples at once; otherwise one by one."""
    whole: frozenset[str] = frozenset()
    """Parameters without a rule: every sample's gradient of them is formed by autograd."""
    copies: bool = False
    """Whether inputs and outputs of operations are written over later."""
    plain_attention: bool = False
    """Attention in plain products: torch's fused kernels cannot always be mapped."""
    at_once: int = 64
    reason: str = ""
    """Why samples go one by one."""


class Evaluator:
    """A model and a loss of one sample."""

    def __init__(self, model: nn.Module, loss: Loss, augment: Augment | None = None) -> None:
        self.model, self.loss, self.augment = model, loss, augment
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise BadValue("private: no weight of the model is trained; set requires_grad on those that are.")
        refuse_mixing(model)
        refuse_odd_weights(self.parameters)
        refuse_scripts(model)
        self.shapes = {n: p.shape for n, p in self.parameters.items()}
        names = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
        self.places = {
            f"{place}.{name}" if place else name: names[id(tensor)]
            for place, part in model.named_modules()
            for name, tensor in (
                *part.named_parameters(recurse=False, remove_duplicate=False),
                *part.named_buffers(recurse=False, remove_duplicate=False),
            )
        }
        """Every place where a parameter or buffer stands, also a second one of the same: tied weights stay tied."""

    def add(
        self, sums: Mapping[str, Tensor], inputs: Any, targets: Any, used: Tensor, clip: float, plan: Plan
    ) -> tuple[Seen, Tensor]:
        """Add the clipped gradients of the samples that are `used` to the sums; what was seen of each sample, and its loss."""
        if not plan.mapped:
            return self._add_one_by_one(sums, inputs, targets, used, clip)
        names = sorted(plan.whole)
        with self.mapped(inputs, targets, plan) as (uses, unknown, losses, roots):
            if unknown or not all(use.is_intact() for use in uses):
                raise BadValue(
                    "private: the model ran otherwise than on zeros of the same shape; it must not choose its operations by its data."
                )
            wanted = [*(use.out for use in uses), *(roots[n] for n in names)]
            gradients = torch.autograd.grad(losses.sum(), wanted, materialize_grads=True) if wanted else ()
        with exact_arithmetic(used.device):
            parts = [returned(use, back) for use, back in zip(uses, gradients, strict=False)]
            whole = {n: dense(g) for n, g in zip(names, gradients[len(uses) :], strict=True)}
            return add_clipped(sums, parts, whole, clip, used), losses.detach()

    @contextlib.contextmanager
    def mapped(
        self, inputs: Any, targets: Any, plan: Plan
    ) -> Iterator[tuple[list[Use], set[str], Tensor, dict[str, Tensor]]]:
        """Losses of all samples, what the capture saw, and the copies of parameters without a rule, one for each sample.

        Gradients are taken inside: what a backward pass leaves behind is put back with the rest.
        """
        samples = len(tree_leaves(inputs)[0])
        device = next(iter(self.parameters.values())).device
        values = self.values()
        roots = {n: values.pop(n).expand(samples, *self.shapes[n]).requires_grad_() for n in plan.whole}
        tracked = {id(values[n]): n for n in self.parameters if n in values}
        anchor = torch.zeros((), device=device, requires_grad=True)
        seen: list[Capture] = []

        def one(each: Tensor, own: Mapping[str, Tensor], x: Any, y: Any) -> Tensor:
            with Capture(tracked, anchor, each, copies=plan.copies) as capture:
                seen.append(capture)
                value = self.loss_of({**values, **own}, x, y)
            return value + each.to(value.dtype)

        attention = sdpa_kernel(SDPBackend.MATH) if plan.plain_attention else contextlib.nullcontext()
        # What sees tensors below the mapping, all samples in one, is shut out; a model that needs it goes one by one.
        shut = torch.autograd.graph.disable_saved_tensors_hooks("samples are mapped, and hooks would see all of them")
        with quietly(), attention, self.forgetful(weights=False), shut:
            forgetting.seed_others()
            losses = vmap(one, randomness="different")(torch.zeros(samples, device=device), roots, inputs, targets)
            yield seen[0].uses, seen[0].unknown, losses, roots

    def _add_one_by_one(
        self, sums: Mapping[str, Tensor], inputs: Any, targets: Any, used: Tensor, clip: float
    ) -> tuple[Seen, Tensor]:
        norms, losses = (
            torch.zeros(len(used), dtype=torch.float64, device=used.device),
            torch.zeros(len(used), device=used.device),
        )
        fine = torch.ones_like(used)
        # A seed for every place, also for empty ones: dropout of one sample does not depend on who else is there.
        seeds = torch.randint(2**62, (len(used),)).tolist()
        for number in used.nonzero()[:, 0].tolist():
            x, y = tree_map(lambda v, number=number: v[number].clone(), (inputs, targets))
            try:
                with self.alone(x, y, seed=seeds[number]) as (value, own):
                    if not value.requires_grad:  # the same for every weight
                        gradients: Any = [torch.zeros_like(v) for v in own.values()]
                    else:
                        gradients = torch.autograd.grad(value, list(own.values()), materialize_grads=True)
            except Exception as problem:
                log.error("a sample on which the model fails counts for nothing: %s", first_line(problem))
                fine[number] = False
                continue
            with exact_arithmetic(used.device):
                whole = {n: dense(g)[None] for n, g in zip(own, gradients, strict=True)}
                seen = add_clipped(sums, [], whole, clip, used.new_ones(1))
            norms[number], fine[number], losses[number] = seen.norms[0], seen.fine[0], value.detach().float()
        return Seen(norms, fine), losses

    def reached(self, x: Any, y: Any) -> set[str]:
        """The parameters that a sample's loss depends on, by one plain pass on zeros; refuses uses beside the model's own call."""
        first, target = tree_map(lambda v: v[0], (x, y))
        with self.alone(first, target) as (value, own):
            if not value.requires_grad:
                return set()
            wanted = [*self.parameters.values(), *own.values()]
            found = torch.autograd.grad(value, wanted, allow_unused=True)
        for name, outside in zip(self.parameters, found, strict=False):
            if outside is not None:
                raise BadValue(
                    f"private: “{name}” is used beside the model's own call, in the loss or kept in a list, where its gradient cannot be "
                    "followed. Use weights inside the model only; a penalty on weights goes into Private(penalty=...)."
                )
        return {n for n, g in zip(own, found[len(self.parameters) :], strict=True) if g is not None}

    @contextlib.contextmanager
    def alone(self, x: Any, y: Any, *, seed: int | None = None) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The loss of one sample by a plain pass, and the copies of the parameters that it was taken with; gradients are taken inside."""
        # Copies: what a forward pass writes into them is gone with the sample.
        values = {n: v.clone() for n, v in self.values().items()}
        own = {n: values[n].requires_grad_() for n in self.parameters}
        device = next(iter(self.parameters.values())).device
        fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with torch.enable_grad(), quietly(), self.forgetful(), fork:
            if seed is not None:
                forgetting.seed_all(seed)
            yield self.loss_of(values, x, y), own

    def forgetful(self, *, weights: bool = True) -> contextlib.AbstractContextManager[None]:
        """Nothing that the model, the loss or the augmentation keeps is carried to the next sample."""
        return forgetting.forgetful(self.model, self.loss, self.augment, weights=weights)

    def values(self) -> dict[str, Tensor]:
        """Parameters and copies of the buffers, by name: a forward pass cannot change a buffer of the model."""
        values = {n: p.detach() for n, p in self.model.named_parameters()}
        return values | {n: b.detach().clone() for n, b in self.model.named_buffers()}

    def loss_of(self, values: Mapping[str, Tensor], x: Any, y: Any) -> Tensor:
        """The loss of one sample, as a batch of one."""
        everywhere = {place: values[name] for place, name in self.places.items()}
        x, y = tree_map(lambda v: v[None], (x, y))
        if self.augment is not None:
            x, y = self.augment(x, y)
        args, named = ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, tuple | list) else (x,), {})
        value = self.loss(functional_call(self.model, everywhere, args, named, tie_weights=False), y)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise BadValue(
                f"private: the loss of one sample is {shape}; it must be one number, such as a mean over the sample's own parts."
            )
        return value.reshape(())
