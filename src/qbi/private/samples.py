"""Evaluates each sample's loss alone: another sample cannot enter its gradient, whatever the model, the weights or the loss do.

The loss of one sample is mapped over a batch by `torch.func.vmap`; where an operation has no batching rule, or the model's code looks
at values, samples go one by one. How a model is run (the plan) is found out on zeros of the batch's shape, never on data, and every
batch is filled up to one size: so neither the arithmetic nor its rounding says how many samples there are, or what they are.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from qbi.errors import BadValue, QbiError, first_line
from qbi.private.clipping import MOST_FORMED, MOST_FORMED_ON_CPU, Seen, add_clipped, formed_values, returned
from qbi.private.forgetting import forgetful, seed_all
from qbi.uses import Capture, Use

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
        for name, part in model.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise BadValue(
                    f"private: “{name}” is a compiled script, whose weights cannot be followed; use the plain module."
                )
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

    def plan(self, inputs: Any, targets: Any, most: int) -> Plan:
        """Find out, on zeros, how the model is run; `most` samples at once."""
        x, y = tree_map(lambda v: v.new_zeros((2, *v.shape[1:])), (inputs, targets))
        reached = self._reached(x, y)
        if any(m._backward_hooks or m._backward_pre_hooks for m in self.model.modules()):
            return Plan(mapped=False, at_once=max(1, most), reason="a module has hooks on its backward pass")
        plan, checked = Plan(), False
        for _ in range(5 + len(self.parameters)):
            try:
                uses, unknown, losses, roots = self._mapped(x, y, plan)
                wanted = [*(u.out for u in uses), *roots.values()]
                if wanted:
                    torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
                unknown |= reached - plan.whole - {n for u in uses for n in u.names}
            except QbiError:
                raise
            except Exception as problem:
                if not plan.copies and "modified by an inplace" in str(problem):
                    plan = replace(plan, copies=True)
                elif not plan.plain_attention:
                    plan = replace(plan, plain_attention=True)
                else:
                    return Plan(
                        mapped=False, at_once=max(1, most), reason=f"{type(problem).__name__}: {first_line(problem)}"
                    )
                continue
            if unknown:
                plan = replace(plan, whole=plan.whole | unknown)
            elif not plan.copies and not all(u.is_intact() for u in uses):
                plan = replace(plan, copies=True)
            elif not checked and uses:
                checked = True
                try:
                    fine, why = self._agrees(x, y, plan), "a use of a weight cannot be followed"
                except Exception as problem:
                    fine, why = False, f"{type(problem).__name__}: {first_line(problem)}"
                if not fine:
                    return Plan(mapped=False, at_once=max(1, most), reason=why)
            else:
                break
        each = formed_values(uses, {n: self.shapes[n] for n in plan.whole}, self.shapes)
        held = MOST_FORMED if next(iter(self.parameters.values())).device.type == "cuda" else MOST_FORMED_ON_CPU
        limit = max(1, min(most, held // max(1, each)))
        return replace(plan, at_once=-(-most // -(-most // limit)))  # even parts

    def add(
        self, sums: Mapping[str, Tensor], inputs: Any, targets: Any, used: Tensor, clip: float, plan: Plan
    ) -> tuple[Seen, Tensor]:
        """Add the clipped gradients of the samples that are `used` to the sums; what was seen of each sample, and its loss."""
        if not plan.mapped:
            return self._add_one_by_one(sums, inputs, targets, used, clip)
        uses, unknown, losses, roots = self._mapped(inputs, targets, plan)
        if unknown or not all(use.is_intact() for use in uses):
            raise BadValue(
                "private: the model ran otherwise than on zeros of the same shape; it must not choose its operations by its data."
            )
        names = sorted(plan.whole)
        wanted = [*(use.out for use in uses), *(roots[n] for n in names)]
        gradients = torch.autograd.grad(losses.sum(), wanted, materialize_grads=True) if wanted else ()
        with exact_arithmetic(used.device):
            parts = [returned(use, back) for use, back in zip(uses, gradients, strict=False)]
            whole = {n: _dense(g) for n, g in zip(names, gradients[len(uses) :], strict=True)}
            return add_clipped(sums, parts, whole, clip, used), losses.detach()

    def _mapped(self, inputs: Any, targets: Any, plan: Plan) -> tuple[list[Use], set[str], Tensor, dict[str, Tensor]]:
        """Losses of all samples, what the capture saw, and the copies of parameters without a rule, one for each sample."""
        samples = len(tree_leaves(inputs)[0])
        device = next(iter(self.parameters.values())).device
        values = self._values()
        roots = {n: values.pop(n).expand(samples, *self.shapes[n]).requires_grad_() for n in plan.whole}
        tracked = {id(values[n]): n for n in self.parameters if n in values}
        anchor = torch.zeros((), device=device, requires_grad=True)
        seen: list[Capture] = []

        def one(each: Tensor, own: Mapping[str, Tensor], x: Any, y: Any) -> Tensor:
            with Capture(tracked, anchor, each, copies=plan.copies) as capture:
                seen.append(capture)
                value = self._loss({**values, **own}, x, y)
            return value + each.to(value.dtype)

        attention = sdpa_kernel(SDPBackend.MATH) if plan.plain_attention else contextlib.nullcontext()
        with _quietly(), attention, self._forgetful():
            losses = vmap(one, randomness="different")(torch.zeros(samples, device=device), roots, inputs, targets)
        return seen[0].uses, seen[0].unknown, losses, roots

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
            x, y = tree_map(lambda v, number=number: v[number], (inputs, targets))
            # Copies: what a forward pass writes into them is gone with the sample.
            values = {n: v.clone() for n, v in self._values().items()}
            own = {n: values[n].requires_grad_() for n in self.parameters}
            with torch.enable_grad(), _quietly(), self._forgetful(), torch.random.fork_rng(devices=[]):
                seed_all(seeds[number])
                value = self._loss(values, x, y)
            if not value.requires_grad:  # the same for every weight
                gradients: Any = [torch.zeros_like(v) for v in own.values()]
            else:
                gradients = torch.autograd.grad(value, list(own.values()), materialize_grads=True)
            with exact_arithmetic(used.device):
                whole = {n: _dense(g)[None] for n, g in zip(own, gradients, strict=True)}
                seen = add_clipped(sums, [], whole, clip, used.new_ones(1))
            norms[number], fine[number], losses[number] = seen.norms[0], seen.fine[0], value.detach().float()
        return Seen(norms, fine), losses

    def _reached(self, x: Any, y: Any) -> set[str]:
        """The parameters that a sample's loss depends on, by one plain pass on zeros; refuses uses beside the model's own call."""
        first = tree_map(lambda v: v[0], (x, y))
        values = {n: v.clone() for n, v in self._values().items()}
        own = {n: values[n].requires_grad_() for n in self.parameters}
        with torch.enable_grad(), _quietly(), self._forgetful(), torch.random.fork_rng(devices=[]):
            value = self._loss(values, *first)
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

    def _forgetful(self) -> contextlib.AbstractContextManager[None]:
        """Nothing that the model, the loss or the augmentation keeps is carried to the next sample."""
        return forgetful(self.model, self.loss, self.augment)

    def _agrees(self, x: Any, y: Any, plan: Plan) -> bool:
        """Whether gradients by uses are those of autograd, on random numbers; if not, some use was not seen.

        Autograd's come from plain passes, sample by sample, or, where a model draws random numbers, from the same mapped pass with every weight
        differentiated.
        """
        draws = torch.Generator().manual_seed(0)

        def drawn(v: Tensor) -> Tensor:
            return torch.randn(v.shape, generator=draws).to(v) if v.is_floating_point() else v

        x, y = tree_map(drawn, (x, y))
        first, again = self._plain(x, y, 0), self._plain(x, y, 1)
        true = first if _alike(first, again) else self._seeded(x, y, replace(plan, whole=frozenset(self.parameters)))
        return _alike(true, self._seeded(x, y, plan))

    def _seeded(self, x: Any, y: Any, plan: Plan) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            seed_all(0)
            return self._gradients(x, y, plan)

    def _plain(self, x: Any, y: Any, seed: int) -> dict[str, Tensor]:
        """The sum over samples of every gradient, by passes of their own."""
        out = {
            n: torch.zeros(s, dtype=torch.float64, device=p.device)
            for (n, s), p in zip(self.shapes.items(), self.parameters.values(), strict=True)
        }
        for number in range(2):
            one = tree_map(lambda v, number=number: v[number], (x, y))
            values = {n: v.clone() for n, v in self._values().items()}
            own = {n: values[n].requires_grad_() for n in self.parameters}
            with torch.enable_grad(), _quietly(), self._forgetful(), torch.random.fork_rng(devices=[]):
                seed_all(seed)
                value = self._loss(values, *one)
            if value.requires_grad:
                for n, g in zip(
                    own, torch.autograd.grad(value, list(own.values()), materialize_grads=True), strict=True
                ):
                    out[n] += _dense(g)
        return out

    def _gradients(self, x: Any, y: Any, plan: Plan) -> dict[str, Tensor]:
        """The sum over samples of every gradient, as a plan forms them."""
        uses, _, losses, roots = self._mapped(x, y, plan)
        names = sorted(plan.whole)
        wanted = [*(use.out for use in uses), *(roots[n] for n in names)]
        gradients = torch.autograd.grad(losses.sum(), wanted, materialize_grads=True)
        out = {n: g.double().sum(0) for n, g in zip(names, gradients[len(uses) :], strict=True)}
        with exact_arithmetic(losses.device):
            for use, back in zip(uses, gradients, strict=False):
                part = returned(use, back)
                if use.weight is not None:
                    out[use.weight] = out.get(use.weight, 0) + use.kind.weight_gradients(
                        part.given, part.back
                    ).double().sum(0)
                if use.bias is not None:
                    out[use.bias] = out.get(use.bias, 0) + use.kind.bias_gradients(part.back).double().sum(0)
        return out

    def _values(self) -> dict[str, Tensor]:
        """Parameters and copies of the buffers, by name: a forward pass cannot change a buffer of the model."""
        values = {n: p.detach() for n, p in self.model.named_parameters()}
        return values | {n: b.detach().clone() for n, b in self.model.named_buffers()}

    def _loss(self, values: Mapping[str, Tensor], x: Any, y: Any) -> Tensor:
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


def refuse_mixing(model: nn.Module) -> None:
    """Batch statistics join samples, and their buffers leave without noise."""
    for name, part in model.named_modules():
        statistics = isinstance(part, nn.modules.batchnorm._BatchNorm) or (
            isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats
        )
        if statistics and part.training:
            raise BadValue(
                f"private: “{name}” ({type(part).__name__}) is in training mode: it joins the samples of a batch, and its statistics would leave "
                "without noise. Use GroupNorm (qbi.with_group_norm(model) converts a model), or put it into eval()."
            )


def refuse_odd_weights(parameters: Mapping[str, Tensor]) -> None:
    """Weights whose gradients the step would not form as training expects."""
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise BadValue(
                f"private: “{name}” has no shape yet; run the model once on data of the right shape, then create Private."
            )
        if parameter.is_complex() or parameter.is_sparse:
            kind = "complex" if parameter.is_complex() else "sparse"
            raise BadValue(
                f"private: “{name}” is {kind}; store it as plain numbers (torch.view_as_real), or freeze it."
            )
        if parameter._backward_hooks:
            raise BadValue(
                f"private: “{name}” has a hook on its gradient, which the step does not run; freeze the weights that are not to move."
            )


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Equal to a hundredth of their size, weight by weight; what is not finite tells nothing."""
    for name in {*one, *other}:
        zero = torch.zeros(())
        a, b = (v.get(name, zero).cpu().double() for v in (one, other))
        size = max(float(a.norm()), float(b.norm()))
        if math.isfinite(size) and float((a - b).norm()) > 1e-2 * size + 1e-30:
            return False
    return True


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def with_group_norm(model: nn.Module) -> nn.Module:
    """A copy in which Opacus' fixer has put what keeps samples apart in the place of what mixes them.

    >>> type(with_group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1]).__name__
    'GroupNorm'
    """
    from opacus.validators import ModuleValidator

    fixed: nn.Module = ModuleValidator.fix(model)
    return fixed


@contextlib.contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Full float32 products: no TF32, no bfloat16 inside, no autocast, no graph."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Plain operations only: attention's fast path would hide its parameters; slow batching rules are no news to the user."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
