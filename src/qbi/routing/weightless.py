"""Nodes without weights that could copy: reshapes move the map, activations and pooling may lose something."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qbi.carrier import Affine, Cause, Normalised
from qbi.routing.graph import Traced
from qbi.routing.path import REDUCING, SQUASHING, BatchNorm, Unreachable, name_of
from qbi.routing.probing import batched, effect_of, execute, look_ahead
from qbi.routing.route import Route, Way, first_places, noted


def through_other(way: Way, position: int, route: Route) -> Route:
    """Reshapes, activations, pooling, and whatever else has no weights that could be set."""
    if not isinstance(route.plus, Tensor):
        return _moved(way, position, route)
    traced, node = way.traced, way.nodes[position]
    value = traced.values[node]
    if not isinstance(value, Tensor):
        if isinstance(traced.module(node), nn.Module):
            raise Unreachable(f"{traced.label(node)} {_why_unreachable(traced, node)}", at=traced.place(node))
        return _moved(way, position, route)
    effect = effect_of(way, position, tuple(route.plus.shape))
    if effect is not None and effect.moves:
        return _moved(way, position, route)
    if effect is not None and effect.scale is not None and effect.offset is not None and route.minus is None:
        return replace(
            route,
            scale=route.scale * effect.scale,
            offset=route.offset * effect.scale + effect.offset,
            nonnegative=False,
        )
    if effect is not None and effect.shift and route.nonnegative:
        return route
    return _changed(way, position, route, cut=effect is not None and effect.shift > 0)


def _moved(way: Way, position: int, route: Route) -> Route:
    """Apply the node to the map itself."""

    def move(one: Any) -> Any:
        def widen(t: Tensor) -> Tensor:
            return batched(way, position, t)

        out = execute(way, position, pytree.tree_map_only(Tensor, widen, one))
        return pytree.tree_map_only(Tensor, lambda t: t[0].cpu(), out)

    plus = pytree.tree_map_only(Tensor, lambda t: t.round().long(), move(route.plus))
    minus = None
    if route.minus is not None:
        minus = pytree.tree_map_only(Tensor, lambda t: t.round().long(), move(route.minus))
    return replace(route, plus=plus, minus=minus, scale=move(route.scale), offset=move(route.offset))


def _changed(way: Way, position: int, route: Route, *, cut: bool) -> Route:
    """A loss: what comes out of the node is carried on as the sample."""
    traced, node = way.traced, way.nodes[position]
    module, name = traced.module(node), name_of(traced, node)
    label, place = traced.label(node), traced.place(node)
    shape = tuple(traced.values[node].shape[1:])
    given = tuple(route.plus.shape)
    known = "dropout" in name or any(word in name for word in (*REDUCING, *SQUASHING))
    if not known or isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        raise Unreachable(f"{label} {_why_unreachable(traced, node)}", at=place)
    if "dropout" in name:
        p = getattr(module, "p", None)
        cause = Cause.DROPOUT
        reason = f"drops values at random{'' if p is None else f' (p = {p})'}, which no setting of parameters undoes."
    elif math.prod(shape) != math.prod(given):
        cause = Cause.POOLING
        reason = f"reduces {given} to {shape}; what it drops cannot be read back."
    elif cut:
        cause = Cause.CUT
        reason = "cuts values below zero, and no layer before it can shift them."
    else:
        cause = Cause.SQUASHED
        reason = "changes the values it passes on."
    used = route.plus > 0
    if shape != given:
        same_channels = len(shape) > 1 and len(given) > 1 and shape[0] == given[0]
        channels = used.flatten(1).any(1) if same_channels else torch.ones(shape[0], dtype=torch.bool)
        used = channels.reshape(-1, *([1] * (len(shape) - 1))).expand(shape)
    plus = torch.zeros(shape, dtype=torch.long)
    plus[used] = torch.arange(1, int(used.sum()) + 1)
    keeps_shift = ("pool" in name or "dropout" in name) and route.offset.unique().numel() == 1
    shifted = route.offset + route.base * route.scale
    offset = torch.full(shape, float(shifted.flatten()[0]) if keeps_shift else 0.0)
    kept_channels = int(used.flatten(1).any(1).sum()) if len(shape) > 1 else int(used.sum())
    fresh = replace(
        route,
        plus=plus,
        minus=None,
        scale=torch.ones(shape),
        offset=offset,
        count=int(used.sum()),
        shape=(kept_channels, *shape[1:]),
        steps=(),
        base=0.0,
        whole=False,
        nonnegative=(route.nonnegative and ("pool" in name or "dropout" in name)) or cut or "sigmoid" in name,
    )
    return fresh.lose(label, place, cause, reason)


def _why_unreachable(traced: Traced, node: fx.Node) -> str:
    module, name = traced.module(node), name_of(traced, node)
    if isinstance(module, nn.RNNBase):
        return "is recurrent: every step mixes the sample with what came before."
    if isinstance(module, nn.MultiheadAttention) or name in ("scaled_dot_product_attention", "softmax"):
        return "is attention: it mixes the positions of a sample by weights that depend on the sample."
    if name == "something_unseen":
        return "stands between two layers: something outside any module happens there, and it could not be followed."
    if name in ("matmul", "bmm", "einsum", "mm", "linear") or name.startswith("conv"):
        return "mixes the sample's values, and none of its weights could be set to copy them."
    if any(True for _ in (module.parameters() if module is not None else ())):
        return "is a layer for which no setting is known that copies its input."
    return "changes the sample in a way that no setting of parameters undoes."


def through_norm(way: Way, position: int, route: Route) -> Route:
    """Let a normalisation layer pass, with its own offset as the shift where a ReLU follows."""
    traced, node = way.traced, way.nodes[position]
    layer, label, place = traced.module(node), traced.label(node), traced.place(node)
    assert isinstance(layer, BatchNorm | nn.LayerNorm)
    if route.minus is not None:
        raise Unreachable(f"{label} would normalise the two halves of the sample apart.", at=place)
    ahead = look_ahead(way, position)
    out = route
    if isinstance(layer, nn.LayerNorm):
        out = out.lose(label, place, Cause.NORMALISED, "takes each sample's own mean and scale away.")
    if ahead.shift and layer.bias is None:
        out = out.lose(label, place, Cause.CUT, "has no offset of its own; the activation behind it cuts the sample.")
    offset = ahead.shift if layer.bias is not None else 0.0
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.fill_(1)
        if layer.bias is not None:
            layer.bias.fill_(offset)
    axis = torch.arange(route.plus.shape[0]).reshape(-1, *([1] * (route.plus.dim() - 1)))
    channel = axis.expand(route.plus.shape)
    if isinstance(layer, nn.LayerNorm):
        channel = torch.arange(route.plus.numel()).reshape(route.plus.shape) % math.prod(layer.normalized_shape)
    features = first_places(route.plus, route.count)
    known = features >= 0
    where = features.clamp_min(0)
    affine = Affine(route.scale.flatten()[where], route.offset.flatten()[where])
    met = torch.where(known, channel.flatten()[where], 0)
    positions = route.plus.numel() // (route.plus.shape[0] if isinstance(layer, BatchNorm) else 1)
    steps = (*out.steps, *noted(affine), Normalised(str(node.target), met, positions, offset))
    shape = route.plus.shape
    return replace(
        out, nonnegative=offset > 0, steps=steps, base=offset, scale=torch.ones(shape), offset=torch.zeros(shape)
    )
