"""Layers with weights, written so that they copy: single taps of one, in both signs or shifted where a ReLU follows."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qbi.carrier import Cause
from qbi.routing.path import Convolution, Unreachable
from qbi.routing.probing import look_ahead
from qbi.routing.route import Route, Way

MOST_COVERS = 5000
"""Sets of taps that are tried before all taps are taken."""

CLIPPED = 0.25
"""The sample is made smaller by this where an activation clips at 6, to fit between."""


@dataclass(frozen=True)
class _Copy:
    """One output unit of a layer with weights: the unit it copies, the tap it reads, and the positions it sees."""

    unit: int
    source: int
    negative: int | None
    tap: tuple[int, ...]
    seen: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Plan:
    """Copies wanted, best first, where they may stand, and how maps are read along the unit's dimension."""

    wanted: list[tuple[int, int | None, tuple[int, ...], tuple[Tensor, ...]]]
    units: int
    groups: int
    block: int
    """Input units in each group."""
    last: bool
    spatial: tuple[int, ...]


def _pairs_of_units(plus: Tensor, minus: Tensor | None) -> list[tuple[int, int | None]]:
    """Units that hold something of the sample, each with the unit that holds its negative part."""
    held = plus.reshape(len(plus), -1)
    used = held.any(1).nonzero()[:, 0].tolist()
    if minus is None:
        return [(u, None) for u in used]
    other = minus.reshape(len(minus), -1)
    partner = {tuple(other[u].tolist()): u for u in other.any(1).nonzero()[:, 0].tolist()}
    return [(u, partner[tuple(held[u].tolist())]) for u in used]


def plan_convolution(layer: Convolution, route: Route, spatial: Sequence[int]) -> _Plan:
    """One copy for each channel and each tap that is needed to see every position."""
    sizes = tuple(route.plus.shape[1:])
    offsets = [
        _taps(n, m, layer.kernel_size[i], layer.stride[i], _padding(layer, i), layer.dilation[i])
        for i, (n, m) in enumerate(zip(sizes, spatial, strict=True))
    ]
    sources = _pairs_of_units(route.plus, route.minus)
    wanted = [
        (source, negative, tuple(t for t, _ in taps), tuple(p for _, p in taps))
        for taps in itertools.product(*offsets)
        for source, negative in sources
    ]
    return _Plan(
        wanted, layer.out_channels, layer.groups, layer.in_channels // layer.groups, last=False, spatial=tuple(spatial)
    )


def _padding(layer: Convolution, dimension: int) -> int:
    if layer.padding == "same":
        return layer.dilation[dimension] * (layer.kernel_size[dimension] - 1) // 2
    return 0 if layer.padding == "valid" else int(layer.padding[dimension])


def _taps(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> list[tuple[int, Tensor]]:
    """As few taps as see every position of one dimension, the one that sees most first; −1 is the border."""
    seen = []
    for tap in range(kernel):
        places = torch.arange(out) * stride - padding + tap * dilation
        seen.append(torch.where((places >= 0) & (places < size), places, -1))
    sets = [set(places.tolist()) - {-1} for places in seen]
    reachable = set().union(*sets)
    fewest = max(1, math.ceil(len(reachable) / max(1, max(map(len, sets)))))
    for count in range(fewest, kernel + 1):
        covers = itertools.islice(itertools.combinations(range(kernel), count), MOST_COVERS)
        best = min(
            (c for c in covers if set().union(*(sets[t] for t in c)) == reachable),
            key=lambda c: sum(abs(t - kernel // 2) for t in c),
            default=None,
        )
        if best is not None:
            return sorted(((t, seen[t]) for t in best), key=lambda pair: -len(sets[pair[0]]))
    return list(enumerate(seen))


def plan_linear(layer: nn.Linear, route: Route) -> _Plan:
    """One copy for each feature that holds something of the sample."""
    # A linear layer acts on the last dimension: its units are the features there, at every position.
    plus = route.plus.movedim(-1, 0)
    minus = None if route.minus is None else route.minus.movedim(-1, 0)
    wanted: list[tuple[int, int | None, tuple[int, ...], tuple[Tensor, ...]]] = [
        (source, negative, (), ()) for source, negative in _pairs_of_units(plus, minus)
    ]
    return _Plan(wanted, layer.out_features, 1, layer.in_features, last=True, spatial=tuple(plus.shape[1:]))


def through_weights(way: Way, position: int, route: Route, plan: _Plan) -> Route:
    """Write single weights of one so that the layer copies the sample, in both signs or shifted where a ReLU follows."""
    traced, node = way.traced, way.nodes[position]
    layer, label, place = traced.module(node), traced.label(node), traced.place(node)
    assert isinstance(layer, Convolution | nn.Linear)
    ahead = look_ahead(way, position)
    must_pass = ahead.shift > 0 and not (route.nonnegative and route.minus is None)
    needed = len(plan.wanted)
    full = list(_allocate(plan, 1))
    pairs = must_pass and ahead.pairs and len(list(_allocate(plan, 2))) == needed
    copies = list(_allocate(plan, 2)) if pairs else full
    out = route
    if len(copies) < needed:
        kinds = f" in {plan.groups} groups" if plan.groups > 1 else ""
        out = out.lose(
            label,
            place,
            Cause.NARROW,
            f"has {plan.units} outputs{kinds}; the sample needs {needed}. It is too narrow to carry it.",
        )
    if not copies:
        raise Unreachable(f"{label} has no output that could carry anything of the sample.", at=place)
    shifted = must_pass and not pairs and layer.bias is not None
    if must_pass and not pairs and not shifted:
        out = out.lose(
            label,
            place,
            Cause.CUT,
            f"has {plan.units} outputs and no bias; passing the {ahead.name} behind it needs {2 * needed} outputs "
            "(a pair for each value's sign) or a bias (a shift).",
        )
    added = ahead.shift if shifted else 0.0
    size = CLIPPED if shifted and ahead.shift < way.shift else 1.0
    _write(layer, copies, pairs=pairs, added=added, size=size)
    scale = _copied(route.scale, copies, plan, side=0) * size
    offset = _copied(route.offset, copies, plan, side=0) * size + added
    if pairs:
        scale = scale + _copied(route.scale, copies, plan, side=1)
        offset = offset + _copied(route.offset, copies, plan, side=1)
    return replace(
        out,
        plus=_copied(route.plus, copies, plan, side=0),
        minus=_copied(route.plus, copies, plan, side=1) if pairs else None,
        scale=torch.where(scale == 0, 1.0, scale),
        offset=offset,
        nonnegative=pairs or shifted or (route.nonnegative and route.minus is None),
    )


def _allocate(plan: _Plan, sides: int) -> Iterator[_Copy]:
    """Give each wanted copy its unit (and a second one for the other sign), within the group of its source."""
    inside = plan.units // plan.groups
    taken = [0] * plan.groups
    for source, negative, tap, seen in plan.wanted:
        group = source // plan.block
        if taken[group] + sides > inside:
            continue
        unit = group * inside + taken[group]
        taken[group] += sides
        yield _Copy(unit, source, negative, tap, seen)


def _write(layer: Convolution | nn.Linear, copies: list[_Copy], *, pairs: bool, added: float, size: float) -> None:
    width = layer.weight.shape[1]
    sides = (0, 1) if pairs else (0,)
    units = torch.tensor([c.unit + side for c in copies for side in sides])
    with torch.no_grad():
        layer.weight[units] = 0
        if layer.bias is not None:
            layer.bias[units] = added
        for side in sides:
            sign = -size if side else size
            places = [(c.unit + side, c.source % width, *c.tap) for c in copies]
            layer.weight[torch.tensor(places).unbind(1)] = sign
            paired = [(c.unit + side, c.negative % width, *c.tap) for c in copies if c.negative is not None]
            if paired:
                layer.weight[torch.tensor(paired).unbind(1)] = -sign


def _copied(given: Tensor, copies: list[_Copy], plan: _Plan, *, side: int) -> Tensor:
    """A map behind the layer: each unit sees its source through its tap; the border sees nothing."""
    if plan.last:
        out = given.new_zeros(*plan.spatial, plan.units)
        out[..., torch.tensor([c.unit + side for c in copies])] = given[..., torch.tensor([c.source for c in copies])]
        return out
    out = given.new_zeros(plan.units, *plan.spatial)
    for _, same in itertools.groupby(copies, key=lambda c: c.tap):
        group = list(same)
        part = given[torch.tensor([c.source for c in group])]
        for dimension, places in enumerate(group[0].seen):
            part = part.index_select(dimension + 1, places.clamp_min(0))
            shape = [1] * part.dim()
            shape[dimension + 1] = -1
            part = part * (places >= 0).reshape(shape)
        out[torch.tensor([c.unit + side for c in group])] = part
    return out
