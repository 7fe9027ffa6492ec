"""Each sample's own gradient, from what went into a module and what came back: its size, and sums of it with weights.

Nothing is kept of size samples × weights: linear layers and convolutions give the norm from two small products (ghost clipping), or
from one sample's gradient at a time where that is smaller; other layers through Opacus' rules, or by running them on single samples.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from qbi.calling import call_with
from qbi.defences.budget.products import MOST_VALUES, Weights, convolved, is_pair, pair_norms, slack, split, squares
from qbi.defences.calls import Call
from qbi.defences.layout import Layout, Place, leaves


def own_parameters(module: nn.Module) -> Weights:
    """Those that stand directly in a module."""
    return {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}


def squared_norms(
    call: Call, places: Sequence[Place], names: Sequence[str], samples: int
) -> tuple[Tensor, Weights | None]:
    """Squared norms of each sample's gradient of the named parameters of one call; and the gradients, where they were formed whole."""
    if is_pair(call.module):
        return pair_norms(call, places, names, samples)
    if type(call.module) is nn.Embedding and not call.module.scale_grad_by_freq:
        return _lookup_norms(call, call.module, places, samples), None
    parts = sample_gradients(call, places, names, samples)
    return torch.cat([squares(part) for part in parts]), parts[0] if len(parts) == 1 else None


def _lookup_norms(call: Call, module: nn.Embedding, places: Sequence[Place], samples: int) -> Tensor:
    """Of an embedding: what came back to the same entry adds up, entries apart from each other do not."""
    index = split(leaves(call.given)[0], places[0], samples, call).reshape(samples, -1)
    back = split(call.gradients[0], places[len(leaves(call.given))], samples, call).float()
    back = back.reshape(samples, index.shape[1], -1)
    if module.padding_idx is not None:
        back = back * (index != module.padding_idx)[..., None]
    total = back.new_zeros(samples)
    for chosen in torch.arange(samples, device=back.device).split(max(1, MOST_VALUES // index.shape[1] ** 2)):
        same = index[chosen, :, None] == index[chosen, None, :]
        total[chosen] = ((back[chosen] @ back[chosen].mT) * same).sum((1, 2)).clamp_min(0)
    return total + slack(torch.full_like(total, index.shape[1]), back.square().sum((1, 2)), back.shape[2])


def sample_gradients(call: Call, places: Sequence[Place], names: Sequence[str], samples: int) -> list[Weights]:
    """Each sample's gradient of the named parameters, a number of samples at a time."""
    weights: Weights = {n: p for n, p in call.module.named_parameters() if n in names}
    at_once = max(1, MOST_VALUES // max(1, sum(p.numel() for p in weights.values())))
    rule = _rules().get(type(call.module))
    count = len(leaves(call.given))
    given = [
        split(v, place, samples, call) if isinstance(v, Tensor) and place is not None else v
        for v, place in zip(leaves(call.given), places[:count], strict=True)
    ]
    shared = [
        i for i, place in enumerate(places[:count]) if place is None or not isinstance(leaves(call.given)[i], Tensor)
    ]
    back = {i: split(g, places[count + i], samples, call) for i, g in call.gradients.items()}
    out = []
    for start in range(0, samples, at_once):
        chosen = slice(start, start + at_once)
        part = [v if i in shared else v[chosen] for i, v in enumerate(given)]
        returned = {i: g[chosen] for i, g in back.items()}
        by_rule = None
        if rule is not None and len(part) == 1 and part[0].shape[1:2] == (1,) and 0 not in shared:
            # Rules that are made for one way to call a layer fail on others; running it on single samples always works.
            with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):
                by_rule = rule(call.module, [part[0].flatten(0, 1)], returned[0].flatten(0, 1))
        if by_rule is None:
            out.append(_each(call, part, set(shared), returned, weights))
        else:
            named = {id(p): n for n, p in weights.items()}
            out.append({named[id(p)]: g for p, g in by_rule.items() if id(p) in named})
    return out


def _each(call: Call, given: list[Any], shared: set[int], back: dict[int, Tensor], weights: Weights) -> Weights:
    """Run a module on single samples: all at once where torch can, one by one where it cannot."""
    fixed = {n: p.detach() for n, p in weights.items()}
    numbers = sorted(back)

    def run(values: Weights, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest = iter(own)
        whole = [v if i in shared else next(rest) for i, v in enumerate(given)]
        args, named = tree_unflatten(whole, tree_flatten(call.given)[1])
        out = leaves(call_with(call.module, values, args, named))
        return tuple(out[i] for i in numbers)

    def pulled(own: list[Tensor], returned: list[Tensor]) -> Weights:
        pull: Any = vjp(lambda values: run(values, own), fixed)[1]
        return dict(pull(tuple(returned))[0])

    def one(own: Sequence[Tensor], returned: Sequence[Tensor]) -> list[Tensor]:
        values = {n: p.clone().requires_grad_() for n, p in fixed.items()}
        with torch.enable_grad():
            out = run(values, own)
        return list(torch.autograd.grad(out, list(values.values()), list(returned), materialize_grads=True))

    own = [v for i, v in enumerate(given) if i not in shared]
    returned = [back[i] for i in numbers]
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        if not isinstance(call.module, nn.RNNBase):
            try:
                return dict(vmap(pulled, randomness="different")(own, returned))
            except (RuntimeError, ValueError, NotImplementedError):
                pass  # not everything can be run on many samples at once; one by one always works
        rows = [one([v[i] for v in own], [g[i] for g in returned]) for i in range(len(returned[0]))]
        return {n: torch.stack(parts) for n, parts in zip(fixed, zip(*rows, strict=True), strict=True)}


def weighted_sum(call: Call, places: Sequence[Place], names: Sequence[str], weights: Tensor) -> Weights:
    """Σ wᵢ·gᵢ of the named parameters: one more backward pass through the weights of a linear map or a table alone.

    All others are summed from the very gradients that were measured, so that what leaves is what was clipped.
    """
    if not is_pair(call.module) and type(call.module) is not nn.Embedding:
        return _summed(sample_gradients(call, places, names, len(weights)), weights)
    count = len(leaves(call.given))
    back = {i: _weighed(g, places[count + i], weights, call) for i, g in call.gradients.items()}
    # A sample whose gradient is not finite has weight zero, and zero times infinity is no number.
    args, named = call.given if bool(weights.all()) else tree_map(_finite, call.given)
    if type(call.module) is nn.Linear:
        flat = back[0].reshape(-1, back[0].shape[-1])
        into = leaves((args, named))[0].reshape(-1, call.module.in_features).to(flat.dtype)
        return {n: flat.T @ into if n == "weight" else flat.sum(0) for n in names}
    if is_pair(call.module):
        return convolved(call.module, leaves((args, named))[0], back[0], names)
    assert isinstance(call.module, nn.Embedding)
    return {"weight": _looked_up(call.module, leaves((args, named))[0], back[0])}


def _looked_up(module: nn.Embedding, index: Tensor, back: Tensor) -> Tensor:
    """A table's gradient, added up in float32: in half precision sums come to a halt, and norms say nothing of what leaves."""
    flat, rows = index.flatten(), back.reshape(-1, back.shape[-1])
    if module.padding_idx is not None:
        rows = rows * (flat != module.padding_idx)[:, None]
    return rows.new_zeros(module.weight.shape).index_add_(0, flat, rows)


def _summed(parts: Sequence[Weights], weights: Tensor) -> Weights:
    sizes = [len(next(iter(part.values()))) for part in parts]
    sums = [combined(part, chosen) for part, chosen in zip(parts, weights.split(sizes), strict=True)]
    return {n: torch.stack([part[n] for part in sums]).sum(0) for n in sums[0]}


def combined(gradients: Weights, weights: Tensor) -> Weights:
    """Σ wᵢ·gᵢ of gradients, one per sample."""
    if not bool(weights.all()):
        gradients = {n: _finite(g) for n, g in gradients.items()}
    return {n: torch.tensordot(weights, g.to(weights.dtype), dims=1) for n, g in gradients.items()}


def _weighed(values: Tensor, place: Place, weights: Tensor, call: Call) -> Tensor:
    if not isinstance(place, Layout):
        split(values, place, len(weights), call)
    assert isinstance(place, Layout)
    values = values.to(weights.dtype)  # half precision would round the weights up, and sums of the products to nothing
    return place.weigh(values if bool(weights.all()) else _finite(values), weights)


def _finite(values: Any) -> Any:
    return values.nan_to_num(0, 0, 0) if isinstance(values, Tensor) and values.is_floating_point() else values


@cache
def _rules() -> dict[type[nn.Module], Callable[..., dict[nn.Parameter, Tensor]]]:
    from opacus.grad_sample import GradSampleModule

    return dict(GradSampleModule.GRAD_SAMPLERS)
