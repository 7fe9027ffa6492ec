"""Finds out how a model is run: on zeros of the batch's shape and on random numbers, never on data.

What the rules of `qbi.uses` see is compared with autograd. A weight on which they differ is not followed by rules: every sample's
gradient of it is formed by autograd.
"""

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from qbi.errors import BadValue, QbiError, first_line
from qbi.private.arithmetic import dense, exact_arithmetic, full_precision
from qbi.private.clipping import MOST_FORMED, MOST_FORMED_ON_CPU, formed_values
from qbi.private.forgetting import seeded
from qbi.private.products import returned
from qbi.private.samples import Evaluator, Plan
from qbi.uses import Use

log = logging.getLogger("qbi.private")

CLOSE = 1e-2
"""Gradients that differ by more than this share of their size are not the same."""
ROUNDING = 1e-5
"""Share of the whole gradient that float32 may leave where a weight's own gradient is zero, as that of a key's bias in attention."""


def find_plan(evaluator: Evaluator, inputs: Any, targets: Any, most: int) -> Plan:
    """How this model is run on batches of these shapes; `most` samples at once."""
    x, y = tree_map(lambda v: v.new_zeros((2, *v.shape[1:])), (inputs, targets))
    reached = evaluator.reached(x, y)
    one_by_one = Plan(mapped=False, at_once=max(1, most))
    if any(m._backward_hooks or m._backward_pre_hooks for m in evaluator.model.modules()):
        return replace(one_by_one, reason="a module has hooks on its backward pass")
    plan = Plan()
    for _ in range(6 + len(evaluator.parameters)):
        try:
            uses, unknown = _seen(evaluator, x, y, plan)
            unknown |= reached - plan.whole - {n for u in uses for n in u.names}
            if not unknown and (plan.copies or all(u.is_intact() for u in uses)):
                unknown = disagreeing(evaluator, x, y, plan) if uses else set()
                if unknown & plan.whole:
                    return replace(one_by_one, reason="gradients come out otherwise where samples go together")
                if not unknown:
                    break
        except QbiError:
            raise
        except Exception as problem:
            if not plan.copies and "modified by an inplace" in str(problem):
                plan = replace(plan, copies=True)
            elif not plan.plain_attention:
                plan = replace(plan, plain_attention=True)
            else:
                return replace(one_by_one, reason=f"{type(problem).__name__}: {first_line(problem)}")
            continue
        plan = replace(plan, whole=plan.whole | unknown) if unknown else replace(plan, copies=True)
    else:
        return replace(one_by_one, reason="no way of running it together was found")
    each = formed_values(uses, {n: evaluator.shapes[n] for n in plan.whole}, evaluator.shapes)
    held = MOST_FORMED if next(iter(evaluator.parameters.values())).device.type == "cuda" else MOST_FORMED_ON_CPU
    limit = max(1, min(most, held // max(1, each)))
    return replace(plan, at_once=-(-most // -(-most // limit)))  # even parts


def _seen(evaluator: Evaluator, x: Any, y: Any, plan: Plan) -> tuple[list[Use], set[str]]:
    """The uses of weights in one pass and weights without a rule; fails where the pass or its gradients do."""
    with evaluator.mapped(x, y, plan) as (uses, unknown, losses, roots):
        wanted = [*(u.out for u in uses), *roots.values()]
        if wanted:
            torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
    return uses, unknown


def disagreeing(evaluator: Evaluator, x: Any, y: Any, plan: Plan) -> set[str]:
    """The weights whose gradients, as a plan forms them, are not autograd's on random numbers: some use of them was not seen.

    Autograd's come from plain passes, sample by sample, or, where a model draws random numbers, from the same mapped pass with every weight
    differentiated.
    """
    draws = torch.Generator().manual_seed(0)

    def drawn(v: Tensor) -> Tensor:
        return torch.randn(v.shape, generator=draws).to(v) if v.is_floating_point() else v

    x, y = tree_map(drawn, (x, y))
    # Half precision and TF32 would hide in their rounding what is looked for.
    with full_precision(next(iter(evaluator.parameters.values())).device):
        true, again = _plain(evaluator, x, y, 0), _plain(evaluator, x, y, 1)
        if _unlike(true, again, frozenset()):
            true = _seeded(evaluator, x, y, replace(plan, whole=frozenset(evaluator.parameters)))
        return _unlike(true, _seeded(evaluator, x, y, plan), plan.whole)


def refuse_carrying(evaluator: Evaluator, inputs: Any, targets: Any, plan: Plan) -> None:
    """Some samples, quite different ones, and the first again: they must send what they sent before.

    What a model or a loss keeps is put back; what it keeps elsewhere (in a global, in an object that nobody finds) would be carried from one
    sample to the next, and is found out here. Random numbers are tried first; models that take none of those get shares, then zeros and ones.
    """

    x, y = tree_map(lambda v: v.new_zeros((2, *v.shape[1:])), (inputs, targets))

    def sent(given: tuple[Any, Any]) -> dict[str, Tensor]:
        x, y = given
        return _seeded(evaluator, x, y, plan) if plan.mapped else _plain(evaluator, x, y, 0)

    told, enough, problem = False, 0, ""
    with full_precision(next(iter(evaluator.parameters.values())).device):
        for first, others in _trials(x, y):
            try:
                sent(first)
                before, between, after = sent(first), sent(others), sent(first)
            except QbiError:
                raise
            except Exception as failure:  # some models take no such numbers
                problem = problem or first_line(failure)
                continue
            if carried := _unlike(before, after, frozenset(before)):
                raise BadValue(
                    f"private: the gradient of “{min(carried)}” for the same samples changes once others were there: the model or the loss keeps something "
                    "of them where it cannot be put back, such as a global. Keep it inside of the model, or leave it out."
                )
            finite = all(bool(g.isfinite().all()) for found in (before, between, after) for g in found.values())
            told |= finite
            enough += finite and any(bool(g.any()) for g in before.values())
            if enough == 2:  # under either label: where a loss is saturated, one of them sends nothing
                return
    if problem and not told:
        log.warning(
            "no made-up sample could be tried on the model (%s); that it keeps nothing of samples is taken on trust",
            problem,
        )
    elif not told:
        raise BadValue(
            "private: gradients of made-up samples are not finite, so nobody can try out whether the model keeps something of its samples. Scale its weights."
        )


def _trials(x: Any, y: Any) -> Iterator[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """Pairs of made-up batches, from a secret seed: whoever wrote the weights does not know them. Whole numbers are zeros, then ones."""
    draws = torch.Generator().manual_seed(secrets.randbits(62))

    def each(floats: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
        found: tuple[Any, Any] = tree_map(lambda v: (floats if v.is_floating_point() else whole)(v), (x, y))
        return found

    def normal(v: Tensor) -> Tensor:
        return torch.randn(v.shape, generator=draws).to(v)

    def large(v: Tensor) -> Tensor:
        return 1e3 * normal(v) + 1

    def share(v: Tensor) -> Tensor:
        return torch.rand(v.shape, generator=draws).to(v)

    def tiny(v: Tensor) -> Tensor:
        return 1e-6 * normal(v)

    for floats, others in ((normal, large), (share, share), (tiny, tiny)):
        yield each(floats, torch.zeros_like), each(others, torch.ones_like)
        yield each(floats, torch.ones_like), each(others, torch.zeros_like)
    yield each(torch.zeros_like, torch.zeros_like), each(torch.ones_like, torch.ones_like)
    yield each(torch.zeros_like, torch.zeros_like), each(torch.ones_like, torch.zeros_like)


def _unlike(one: Mapping[str, Tensor], other: Mapping[str, Tensor], whole: frozenset[str]) -> set[str]:
    """Weights whose gradients differ; by more than rounding where autograd formed both. What is not finite tells nothing."""
    names = sorted({*one, *other})
    zero = torch.zeros(())
    pairs = {n: [v.get(n, zero).cpu().double() for v in (one, other)] for n in names}
    sizes = {n: max(float(a.norm()), float(b.norm())) for n, (a, b) in pairs.items()}
    largest = max((s for s in sizes.values() if math.isfinite(s)), default=0.0)
    return {
        n
        for n, (a, b) in pairs.items()
        if math.isfinite(sizes[n])
        and float((a - b).norm()) > CLOSE * sizes[n] + (ROUNDING * largest if n in whole else 1e-30)
    }


def _seeded(evaluator: Evaluator, x: Any, y: Any, plan: Plan) -> dict[str, Tensor]:
    with seeded(0):
        return _gradients(evaluator, x, y, plan)


def _plain(evaluator: Evaluator, x: Any, y: Any, seed: int) -> dict[str, Tensor]:
    """The sum over samples of every gradient, by passes of their own."""
    out = {
        n: torch.zeros(s, dtype=torch.float64, device=p.device)
        for (n, s), p in zip(evaluator.shapes.items(), evaluator.parameters.values(), strict=True)
    }
    for number in range(2):
        first, target = tree_map(lambda v, number=number: v[number], (x, y))
        with evaluator.alone(first, target, seed=seed) as (value, own):
            if value.requires_grad:
                found = torch.autograd.grad(value, list(own.values()), materialize_grads=True)
                for n, g in zip(own, found, strict=True):
                    out[n] += dense(g)
    return out


def _gradients(evaluator: Evaluator, x: Any, y: Any, plan: Plan) -> dict[str, Tensor]:
    """The sum over samples of every gradient, as a plan forms them."""
    names = sorted(plan.whole)
    with evaluator.mapped(x, y, plan) as (uses, _, losses, roots):
        wanted = [*(use.out for use in uses), *(roots[n] for n in names)]
        gradients = torch.autograd.grad(losses.sum(), wanted, materialize_grads=True)
    out = {n: g.double().sum(0) for n, g in zip(names, gradients[len(uses) :], strict=True)}
    with exact_arithmetic(losses.device):
        for use, back in zip(uses, gradients, strict=False):
            part = returned(use, back)
            if use.weight is not None:
                formed = use.kind.weight_gradients(part.given, part.back)
                out[use.weight] = out.get(use.weight, 0) + formed.double().sum(0)
            if use.bias is not None:
                out[use.bias] = out.get(use.bias, 0) + use.kind.bias_gradients(part.back).double().sum(0)
    return out
