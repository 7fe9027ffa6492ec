"""What a node does, found out by running it: moves values, passes those around a shift, or changes them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qbi.routing.path import BatchNorm, Convolution, name_of, tensors
from qbi.routing.route import Way

OTHER_SHIFTS = (3.0, 16.0, 32.0)
"""Tried where the usual one does not do: a ReLU6 is the identity around 3, a GELU above 10, a SiLU above 20."""

SPREAD = 2.9
"""How far around the shift an activation must be the identity."""


def execute(way: Way, position: int, value: Any) -> Any:
    """Run one node with its operand on the way replaced, and silence from the side."""
    traced, node, through = way.traced, way.nodes[position], way.nodes[position - 1]

    def given(operand: fx.Node) -> Any:
        if operand is through:
            return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, value)
        known = traced.values[operand]
        return torch.zeros_like(known) if operand in way.moved and isinstance(known, Tensor) else known

    module = traced.module(node)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return traced.run(node, given, module=None if module is None else module.train())


def batched(way: Way, position: int, one: Tensor) -> Tensor:
    """One sample's values, as many times as the probe has samples, of the type the node expects."""
    like = tensors(way.traced.values[way.nodes[position - 1]])[0]
    return (
        one.to(like.dtype if like.is_floating_point() else torch.float32).to(like.device).expand(len(like), *one.shape)
    )


@dataclass(frozen=True)
class Effect:
    """What a node without weights of its own does: moves values about, passes those around a shift, or changes them."""

    moves: bool
    shift: float = 0.0
    scale: Tensor | None = None
    offset: Tensor | None = None


def effect_of(way: Way, position: int, shape: tuple[int, ...]) -> Effect | None:
    """Find out by trying; None where it changes values in another way."""
    draws = torch.Generator().manual_seed(0)
    values = 0.1 + torch.rand(shape, generator=draws) * (SPREAD - 0.1)
    values = values * torch.where(torch.rand(shape, generator=draws) < 0.5, -1.0, 1.0)

    def run(one: Tensor) -> Tensor | None:
        try:
            out = execute(way, position, batched(way, position, one))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        return out[0].float().cpu() if isinstance(out, Tensor) and out.dim() > 0 else None

    out = run(values)
    if out is None:
        return None
    if out.shape == values.shape:
        if torch.equal(out, values):
            return Effect(moves=True)
        for shift in (way.shift, *OTHER_SHIFTS):
            shifted = run(values + shift)
            if shifted is not None and bool(((shifted - values - shift).abs() <= 2e-6 * (shift + SPREAD)).all()):
                return Effect(moves=False, shift=shift)
        second, third = run(values + 1), run(2 * values)
        if second is not None and third is not None:
            slope = second - out
            start = out - slope * values
            near = (third - (2 * slope * values + start)).abs() <= 1e-5 * (1 + third.abs())
            if bool(near.all()) and bool((slope != 0).all()) and bool(out.isfinite().all()):
                return Effect(moves=False, scale=slope, offset=start)
    index = run(torch.arange(1.0, math.prod(shape) + 1).reshape(shape))
    if index is None or not bool((index == index.round()).all()):
        return None
    if not 0 <= float(index.min()) <= float(index.max()) <= math.prod(shape):
        return None
    padded = torch.cat([torch.zeros(1), values.flatten()])
    return Effect(moves=True) if torch.equal(padded[index.long()], out) else None


@dataclass(frozen=True)
class Ahead:
    """What comes behind a layer: it decides how the layer hands the sample on."""

    shift: float
    """The shift at which the next activation is the identity; 0 where none must be passed."""
    pairs: bool
    """Whether the two signs may travel apart: no pooling before the next weights, no normalisation anywhere."""
    name: str


def look_ahead(way: Way, position: int) -> Ahead:
    """What stands between a layer and the next one with weights or statistics."""
    traced = way.traced
    rest = way.nodes[position + 1 : -1]
    normalised = any(isinstance(traced.module(n), BatchNorm | nn.LayerNorm | nn.GroupNorm) for n in rest)
    pairs, shift, name = not normalised, 0.0, ""
    for index, node in enumerate(rest, position + 1):
        module = traced.module(node)
        if isinstance(module, Convolution | nn.Linear | BatchNorm | nn.LayerNorm | nn.GroupNorm):
            break
        before = traced.values[way.nodes[index - 1]]
        if not isinstance(before, Tensor) or not isinstance(traced.values[node], Tensor):
            continue
        effect = effect_of(way, index, tuple(before.shape[1:]))
        if effect is None:
            pairs = False
        elif effect.shift and not shift:
            shift, name = effect.shift, type(module).__name__ if module is not None else name_of(traced, node)
            # Two signs can travel apart only where the negative one becomes exactly nothing.
            pairs = pairs and _cuts_to_zero(way, index, tuple(before.shape[1:]))
    return Ahead(shift, pairs, name)


def _cuts_to_zero(way: Way, position: int, shape: tuple[int, ...]) -> bool:
    below = execute(way, position, batched(way, position, torch.full(shape, -SPREAD)))
    above = execute(way, position, batched(way, position, torch.full(shape, SPREAD)))
    return bool((below == 0).all()) and bool((above == SPREAD).all())
