"""Turn the layers before one layer into the identity, and say how the sample arrives there.

The way is followed node by node. At each one a map says which value of the sample stands where: layers with weights are
written so that they copy (convolutions by single taps, several of them where a stride or a missing border asks for it),
a ReLU is passed by a pair of channels for both signs or by a shift, reshapes and the like move the map itself. What
cannot be the identity is named as a loss, and what comes out of it is carried on as the sample.

Everything here changes the model it is given: callers pass copies.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qbi.carrier import Affine, Carrier, Loss, Normalised, Step, flat
from qbi.errors import CannotMount
from qbi.routing.graph import Inputs, Traced, as_inputs, trace
from qbi.routing.path import (
    JOINS,
    REDUCING,
    SQUASHING,
    BatchNorm,
    Convolution,
    Unreachable,
    find_path,
    is_sum,
    moved_by,
    name_of,
    silence,
    tensors,
)

DEFAULT_SHIFT = 8.0
"""Added to pass a ReLU: normalised data rarely lies below −8, and float32 still keeps six digits."""

OTHER_SHIFTS = (3.0, 16.0, 32.0)
"""Tried where the usual one does not do: a ReLU6 is the identity around 3, a GELU above 10, a SiLU above 20."""

MOST_COVERS = 5000
"""Sets of taps that are tried before all taps are taken."""

CLIPPED = 0.25
"""The sample is made smaller by this where an activation clips at 6, to fit between."""

SPREAD = 2.9
"""How far around the shift an activation must be the identity."""


@dataclass(frozen=True)
class _Route:
    """The sample on its way: which of its values stands where in one sample's activations, counted from 1; 0 is none."""

    plus: Any
    scale: Any
    offset: Any
    count: int
    shape: tuple[int, ...]
    minus: Any = None
    nonnegative: bool = False
    steps: tuple[Step, ...] = ()
    losses: tuple[Loss, ...] = ()
    embedding: str | None = None
    base: float = 0.0
    """What the last normalisation layer was made to add; `offset` counts from there."""
    whole: bool = True
    """Whether the values are still the client's own; after a loss of another kind they are what came out of it."""

    @property
    def present(self) -> int:
        """How many of the sample's values are still there."""
        return sum(int((t.unique() > 0).sum()) for t in tensors(self.plus))

    def lose(self, layer: str, reason: str, *, approximate: bool = False) -> "_Route":
        """The same, with a loss noted."""
        return replace(self, losses=(*self.losses, Loss(layer, reason, approximate)))


@dataclass(frozen=True)
class _Way:
    """The nodes to pass, and what is needed to look at them."""

    traced: Traced
    nodes: Sequence[fx.Node]
    shift: float
    moved: set[fx.Node] = field(repr=False)

    @property
    def layers(self) -> list[str]:
        return [str(n.target) for n in self.nodes if n.op == "call_module"]


def carry_to(
    model: nn.Module,
    layer: str,
    sample: Tensor | Inputs,
    *,
    shift: float = DEFAULT_SHIFT,
    strict: bool = True,
    traced: Traced | None = None,
) -> Carrier:
    """Make the model carry a batch like `sample` to the named layer, in place; returns how it arrives.

    `sample` is a batch of at least two inputs; its values serve as the probe of the final check. With `strict` a loss on
    the way is an error that names the layer; otherwise it is noted in the carrier. Where nothing of the sample can
    be brought there, the error is `Unreachable`.
    """
    inputs = as_inputs(sample)
    traced = trace(model, inputs) if traced is None else traced
    nodes = traced.nodes_of(layer)
    if len(nodes) != 1:
        times = "is never called" if not nodes else f"is called {len(nodes)} times, and its gradients add up"
        raise Unreachable(f"{layer}: it {times}; a sample cannot be told apart there.")
    path = find_path(traced, nodes[0])
    way = _Way(traced, path, shift, moved_by(traced))
    repeated = {n for n in way.layers if way.layers.count(n) > 1}
    if repeated:
        raise Unreachable(
            f"{sorted(repeated)[0]}: it is used more than once on the way; one setting cannot serve both."
        )
    route = _start(traced.values[path[0]], way)
    for position in range(1, len(path) - 1):
        route = _pass(way, position, route)
        if strict:
            _refuse(route)
    source = _input_index(traced, path[0])
    carrier = replace(_arrive(traced.model.get_submodule(layer), route), source=source)
    try:
        _check(model, layer, inputs, inputs[source], carrier)
    except CannotMount as problem:
        if strict:
            raise
        cut = Loss(layer, f"sees another value than was sent ({str(problem).split(': ', 1)[1]})")
        return replace(carrier, losses=(*carrier.losses, cut), places=None)
    return carrier


def _refuse(route: _Route) -> None:
    for loss in route.losses:
        if not loss.approximate:
            raise CannotMount(str(loss))


def _input_index(traced: Traced, node: fx.Node) -> int:
    return [n for n in traced.graph.nodes if n.op == "placeholder"].index(node)


def _start(value: Tensor, way: _Way) -> _Route:
    if not value.is_floating_point() and not any(
        isinstance(way.traced.module(n), nn.Embedding) for n in way.nodes if n.op == "call_module"
    ):
        label = way.traced.label(way.nodes[-1])
        raise Unreachable(f"{label}: the input holds whole numbers and meets no embedding on the way to it.")
    return _fresh(tuple(value.shape[1:]))


def _fresh(shape: tuple[int, ...]) -> _Route:
    count = math.prod(shape)
    plus = torch.arange(1, count + 1).reshape(shape)
    return _Route(plus, torch.ones(shape), torch.zeros(shape), count, shape)


def _pass(way: _Way, position: int, route: _Route) -> _Route:
    """The route behind one node."""
    traced, node = way.traced, way.nodes[position]
    module, label = traced.module(node), traced.label(node)
    before = route.present
    _join(way, position)
    if isinstance(module, nn.Embedding):
        value = traced.values[node]
        return replace(_fresh(tuple(value.shape[1:])), embedding=str(node.target))
    if not isinstance(route.plus, Tensor) and module is not None:
        raise Unreachable(f"{label} takes several tensors at once.")
    if isinstance(module, Convolution):
        out = _through_weights(way, position, route, _convolution(module, route, traced.values[node].shape[2:]))
    elif isinstance(module, nn.Linear):
        out = _through_weights(way, position, route, _linear(module, route))
    elif isinstance(module, BatchNorm | nn.LayerNorm):
        out = _through_norm(way, position, route)
    else:
        out = _through_other(way, position, route)
    if out.whole and out.present < before and len(out.losses) == len(route.losses):
        out = out.lose(label, f"keeps {out.present} of {before} values.")
    if out.present == 0:
        raise Unreachable(f"{label} keeps nothing of the sample.")
    return out


def _join(way: _Way, position: int) -> None:
    """Silence what is added to the sample from the side; refuse what meets it in another way."""
    traced, node, through = way.traced, way.nodes[position], way.nodes[position - 1]
    others = [n for n in node.all_input_nodes if n is not through and n in way.moved]
    if not others or name_of(traced, node) in JOINS:
        return
    for other in others:
        if not is_sum(traced, node):
            raise Unreachable(f"{traced.label(node)} combines the sample with {traced.label(other)}.")
        if not silence(traced, other, way.layers):
            raise Unreachable(
                f"{traced.label(node)} adds {traced.label(other)} to the sample, which cannot be silenced."
            )


def _execute(way: _Way, position: int, value: Any) -> Any:
    """Run one node with its operand on the way replaced, and silence from the side."""
    traced, node, through = way.traced, way.nodes[position], way.nodes[position - 1]

    def given(operand: fx.Node) -> Any:
        if operand is through:
            return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, value)
        known = traced.values[operand]
        return torch.zeros_like(known) if operand in way.moved and isinstance(known, Tensor) else known

    args = fx.node.map_arg(node.args, given)
    more = fx.node.map_arg(node.kwargs, given)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if node.op == "call_module":
            return traced.module(node).train()(*args, **more)  # type: ignore[union-attr]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **more)
        assert callable(node.target)
        return node.target(*args, **more)


def _batched(way: _Way, position: int, one: Tensor) -> Tensor:
    """One sample's values, as many times as the probe has samples, of the type the node expects."""
    like = tensors(way.traced.values[way.nodes[position - 1]])[0]
    return (
        one.to(like.dtype if like.is_floating_point() else torch.float32).to(like.device).expand(len(like), *one.shape)
    )


@dataclass(frozen=True)
class _Kind:
    """What a node without weights of its own does: moves values about, passes those around a shift, or changes them."""

    moves: bool
    shift: float = 0.0
    scale: Tensor | None = None
    offset: Tensor | None = None


def _kind(way: _Way, position: int, shape: tuple[int, ...]) -> _Kind | None:
    """Find out by trying; None where it changes values in another way."""
    draws = torch.Generator().manual_seed(0)
    values = 0.1 + torch.rand(shape, generator=draws) * (SPREAD - 0.1)
    values = values * torch.where(torch.rand(shape, generator=draws) < 0.5, -1.0, 1.0)

    def run(one: Tensor) -> Tensor | None:
        try:
            out = _execute(way, position, _batched(way, position, one))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        return out[0].float().cpu() if isinstance(out, Tensor) and out.dim() > 0 else None

    out = run(values)
    if out is None:
        return None
    if out.shape == values.shape:
        if torch.equal(out, values):
            return _Kind(moves=True)
        for shift in (way.shift, *OTHER_SHIFTS):
            shifted = run(values + shift)
            if shifted is not None and bool(((shifted - values - shift).abs() <= 2e-6 * (shift + SPREAD)).all()):
                return _Kind(moves=False, shift=shift)
        second, third = run(values + 1), run(2 * values)
        if second is not None and third is not None:
            slope = second - out
            start = out - slope * values
            near = (third - (2 * slope * values + start)).abs() <= 1e-5 * (1 + third.abs())
            if bool(near.all()) and bool((slope != 0).all()) and bool(out.isfinite().all()):
                return _Kind(moves=False, scale=slope, offset=start)
    index = run(torch.arange(1.0, math.prod(shape) + 1).reshape(shape))
    if index is None or not bool((index == index.round()).all()):
        return None
    if not 0 <= float(index.min()) <= float(index.max()) <= math.prod(shape):
        return None
    padded = torch.cat([torch.zeros(1), values.flatten()])
    return _Kind(moves=True) if torch.equal(padded[index.long()], out) else None


def _through_other(way: _Way, position: int, route: _Route) -> _Route:
    """Reshapes, activations, pooling, and whatever else has no weights that could be set."""
    if not isinstance(route.plus, Tensor):
        return _moved(way, position, route)
    traced, node = way.traced, way.nodes[position]
    value = traced.values[node]
    if not isinstance(value, Tensor):
        if isinstance(traced.module(node), nn.Module):
            raise Unreachable(f"{traced.label(node)} {_why_unreachable(traced, node)}")
        return _moved(way, position, route)
    kind = _kind(way, position, tuple(route.plus.shape))
    if kind is not None and kind.moves:
        return _moved(way, position, route)
    if kind is not None and kind.scale is not None and kind.offset is not None and route.minus is None:
        return replace(
            route,
            scale=route.scale * kind.scale,
            offset=route.offset * kind.scale + kind.offset,
            nonnegative=False,
        )
    if kind is not None and kind.shift and route.nonnegative:
        return route
    return _changed(way, position, route, cut=kind is not None and kind.shift > 0)


def _moved(way: _Way, position: int, route: _Route) -> _Route:
    """Apply the node to the map itself."""

    def move(one: Any) -> Any:
        def widen(t: Tensor) -> Tensor:
            return _batched(way, position, t)

        out = _execute(way, position, pytree.tree_map_only(Tensor, widen, one))
        return pytree.tree_map_only(Tensor, lambda t: t[0].cpu(), out)

    plus = pytree.tree_map_only(Tensor, lambda t: t.round().long(), move(route.plus))
    minus = None
    if route.minus is not None:
        minus = pytree.tree_map_only(Tensor, lambda t: t.round().long(), move(route.minus))
    return replace(route, plus=plus, minus=minus, scale=move(route.scale), offset=move(route.offset))


def _changed(way: _Way, position: int, route: _Route, *, cut: bool) -> _Route:
    """A loss: what comes out of the node is carried on as the sample."""
    traced, node = way.traced, way.nodes[position]
    module, name, label = traced.module(node), name_of(traced, node), traced.label(node)
    shape = tuple(traced.values[node].shape[1:])
    given = tuple(route.plus.shape)
    known = "dropout" in name or any(word in name for word in (*REDUCING, *SQUASHING))
    if not known or isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        raise Unreachable(f"{label} {_why_unreachable(traced, node)}")
    if "dropout" in name:
        p = getattr(module, "p", None)
        reason = f"drops values at random{'' if p is None else f' (p = {p})'}, which no setting of parameters undoes."
    elif math.prod(shape) != math.prod(given):
        reason = f"reduces {given} to {shape}; what it drops cannot be read back."
    elif cut:
        reason = "cuts values below zero, and no layer before it can shift them."
    else:
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
    return fresh.lose(label, reason)


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


def _convolution(layer: Convolution, route: _Route, spatial: Sequence[int]) -> _Plan:
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


def _linear(layer: nn.Linear, route: _Route) -> _Plan:
    # A linear layer acts on the last dimension: its units are the features there, at every position.
    plus = route.plus.movedim(-1, 0)
    minus = None if route.minus is None else route.minus.movedim(-1, 0)
    wanted: list[tuple[int, int | None, tuple[int, ...], tuple[Tensor, ...]]] = [
        (source, negative, (), ()) for source, negative in _pairs_of_units(plus, minus)
    ]
    return _Plan(wanted, layer.out_features, 1, layer.in_features, last=True, spatial=tuple(plus.shape[1:]))


def _through_weights(way: _Way, position: int, route: _Route, plan: _Plan) -> _Route:
    """Write single weights of one so that the layer copies the sample, in both signs or shifted where a ReLU follows."""
    traced, node = way.traced, way.nodes[position]
    layer, label = traced.module(node), traced.label(node)
    assert isinstance(layer, Convolution | nn.Linear)
    ahead = _ahead(way, position)
    must_pass = ahead.shift > 0 and not (route.nonnegative and route.minus is None)
    needed = len(plan.wanted)
    full = list(_allocate(plan, 1))
    pairs = must_pass and ahead.pairs and len(list(_allocate(plan, 2))) == needed
    copies = list(_allocate(plan, 2)) if pairs else full
    out = route
    if len(copies) < needed:
        kinds = f" in {plan.groups} groups" if plan.groups > 1 else ""
        out = out.lose(
            label, f"has {plan.units} outputs{kinds}; the sample needs {needed}. It is too narrow to carry it."
        )
    if not copies:
        raise Unreachable(f"{label} has no output that could carry anything of the sample.")
    shifted = must_pass and not pairs and layer.bias is not None
    if must_pass and not pairs and not shifted:
        out = out.lose(
            label,
            f"has {plan.units} outputs and no bias; passing the {ahead.name} behind it needs {2 * needed} outputs "
            "(a pair for each value's sign) or a bias (a shift).",
        )
    added = ahead.shift if shifted else 0.0
    size = CLIPPED if shifted and ahead.shift < way.shift else 1.0
    _write(layer, copies, plan, pairs=pairs, added=added, size=size)
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


def _write(
    layer: Convolution | nn.Linear, copies: list[_Copy], plan: _Plan, *, pairs: bool, added: float, size: float
) -> None:
    width = layer.weight.shape[1]
    sides = (0, 1) if pairs else (0,)
    units = torch.tensor([c.unit + side for c in copies for side in sides])
    with torch.no_grad():
        layer.weight[units] = 0
        if layer.bias is not None:
            layer.bias[units] = added
        for side in sides:
            sign = -size if side else size
            rows = torch.tensor([c.unit + side for c in copies])
            taps = [torch.tensor([c.tap[d] for c in copies]) for d in range(len(plan.spatial))] if not plan.last else []
            layer.weight[(rows, torch.tensor([c.source % width for c in copies]), *taps)] = sign
            paired = [c for c in copies if c.negative is not None]
            if paired:
                rows = torch.tensor([c.unit + side for c in paired])
                taps = (
                    [torch.tensor([c.tap[d] for c in paired]) for d in range(len(plan.spatial))]
                    if not plan.last
                    else []
                )
                negatives = torch.tensor([(c.negative or 0) % width for c in paired])
                layer.weight[(rows, negatives, *taps)] = -sign


def _copied(given: Tensor, copies: list[_Copy], plan: _Plan, *, side: int) -> Tensor:
    """A map behind the layer: each unit sees its source through its tap; the border sees nothing."""
    if plan.last:
        out = given.new_zeros(*plan.spatial, plan.units)
        out[..., torch.tensor([c.unit + side for c in copies])] = given[..., torch.tensor([c.source for c in copies])]
        return out
    out = given.new_zeros(plan.units, *plan.spatial)
    for seen, same in itertools.groupby(copies, key=lambda c: c.tap):
        group = list(same)
        _ = seen
        part = given[torch.tensor([c.source for c in group])]
        for dimension, places in enumerate(group[0].seen):
            part = part.index_select(dimension + 1, places.clamp_min(0))
            shape = [1] * part.dim()
            shape[dimension + 1] = -1
            part = part * (places >= 0).reshape(shape)
        out[torch.tensor([c.unit + side for c in group])] = part
    return out


@dataclass(frozen=True)
class _Ahead:
    """What comes behind a layer: it decides how the layer hands the sample on."""

    shift: float
    """The shift at which the next activation is the identity; 0 where none must be passed."""
    pairs: bool
    """Whether the two signs may travel apart: no pooling before the next weights, no normalisation anywhere."""
    name: str


def _ahead(way: _Way, position: int) -> _Ahead:
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
        kind = _kind(way, index, tuple(before.shape[1:]))
        if kind is None:
            pairs = False
        elif kind.shift and not shift:
            shift, name = kind.shift, type(module).__name__ if module is not None else name_of(traced, node)
            # Two signs can travel apart only where the negative one becomes exactly nothing.
            pairs = pairs and _cuts_to_zero(way, index, tuple(before.shape[1:]))
    return _Ahead(shift, pairs, name)


def _cuts_to_zero(way: _Way, position: int, shape: tuple[int, ...]) -> bool:
    below = _execute(way, position, _batched(way, position, torch.full(shape, -SPREAD)))
    above = _execute(way, position, _batched(way, position, torch.full(shape, SPREAD)))
    return bool((below == 0).all()) and bool((above == SPREAD).all())


def _through_norm(way: _Way, position: int, route: _Route) -> _Route:
    """Let a normalisation layer pass, with its own offset as the shift where a ReLU follows."""
    traced, node = way.traced, way.nodes[position]
    layer, label = traced.module(node), traced.label(node)
    assert isinstance(layer, BatchNorm | nn.LayerNorm)
    if route.minus is not None:
        raise Unreachable(f"{label} would normalise the two halves of the sample apart.")
    ahead = _ahead(way, position)
    out = route
    if isinstance(layer, nn.LayerNorm):
        out = out.lose(label, "takes each sample's own mean and scale away.", approximate=True)
    if ahead.shift and layer.bias is None:
        out = out.lose(label, "has no offset of its own; the activation behind it cuts the sample.")
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
    features = _first_places(route.plus, route.count)
    known = features >= 0
    where = features.clamp_min(0)
    affine = Affine(route.scale.flatten()[where], route.offset.flatten()[where])
    met = torch.where(known, channel.flatten()[where], 0)
    positions = route.plus.numel() // (route.plus.shape[0] if isinstance(layer, BatchNorm) else 1)
    steps = (*out.steps, *_noted(affine), Normalised(str(node.target), met, positions, offset))
    shape = route.plus.shape
    return replace(
        out, nonnegative=offset > 0, steps=steps, base=offset, scale=torch.ones(shape), offset=torch.zeros(shape)
    )


def _noted(affine: Affine) -> tuple[Affine, ...]:
    return () if bool((affine.scale == 1).all()) and bool((affine.offset == 0).all()) else (affine,)


def _first_places(plus: Tensor, count: int) -> Tensor:
    """The first position of each of the sample's values; −1 for those that are lost."""
    held = plus.flatten()
    places = torch.full((count + 1,), -1)
    used = (held > 0).nonzero()[:, 0].flip(0)
    places[held[used]] = used
    return places[1:]


def _arrive(target: nn.Module, route: _Route) -> Carrier:
    """Where the sample stands in the input of the layer."""
    assert isinstance(target, nn.Linear)
    if not isinstance(route.plus, Tensor):
        raise Unreachable("the layer takes several tensors at once.")
    losses = route.losses
    if route.plus.dim() > 1:
        return _arrive_by_token(target, route)
    places = _first_places(route.plus, route.count)
    kept = (places >= 0).nonzero()[:, 0]
    columns = places[kept]
    negative = None if route.minus is None else _first_places(route.minus, route.count)[kept]
    affine = Affine(route.scale.flatten()[columns], route.offset.flatten()[columns])
    steps = tuple(_kept(step, kept) for step in route.steps) + _noted(affine)
    plain = negative is None and torch.equal(columns, torch.arange(target.in_features)) and len(kept) == route.count
    shape = route.shape if len(kept) == route.count else (len(kept),)
    return Carrier(
        shape=shape,
        width=target.in_features,
        columns=None if plain else columns,
        negative=negative,
        steps=steps,
        embedding=route.embedding,
        losses=losses,
        places=kept[None] if route.whole else None,
    )


def _kept(step: Step, kept: Tensor) -> Step:
    if isinstance(step, Normalised):
        return replace(step, channel=step.channel[kept])
    return Affine(step.scale[kept], step.offset[kept])


def _arrive_by_token(target: nn.Linear, route: _Route) -> Carrier:
    """A layer that acts on each position by itself reads positions, not samples."""
    plus = route.plus.reshape(-1, route.plus.shape[-1])
    full = (plus > 0).all(0)
    if not bool(full.any()):
        full = (plus > 0).any(0)
    columns = full.nonzero()[:, 0]
    minus = None
    if route.minus is not None:
        second = route.minus.reshape(-1, plus.shape[-1])
        where = {tuple(second[:, c].tolist()): c for c in range(second.shape[1]) if bool(second[:, c].any())}
        minus = torch.tensor([where[tuple(plus[:, c].tolist())] for c in columns.tolist()])
    scale = route.scale.reshape(-1, plus.shape[-1])[:, columns]
    offset = route.offset.reshape(-1, plus.shape[-1])[:, columns] + route.base * scale
    count = len(plus)
    reason = (
        f"it sees {count} positions of {len(columns)} values one by one: single positions are read, not whole samples."
    )
    return Carrier(
        shape=(len(columns),),
        width=target.in_features,
        columns=columns,
        negative=minus,
        # What stood on the values before a normalisation differs by position and is not undone here.
        steps=_noted(Affine(scale[0], offset[0])),
        embedding=route.embedding,
        losses=(*route.losses, Loss("the layer itself:", reason)),
        places=plus[:, columns] - 1 if route.whole and not route.steps else None,
        tokens=count,
    )


def _check(model: nn.Module, layer: str, inputs: Inputs, sample: Tensor, carrier: Carrier) -> None:
    """Run the probe through and compare, where the sample is still the client's own.

    Normalisation layers act as their affine part alone: what they take away is undone later, from statistics.
    """
    if carrier.places is None or (carrier.embedding is not None and sample.is_floating_point()):
        return
    caught: list[Tensor] = []
    norms = [model.get_submodule(s.layer) for s in carrier.steps if isinstance(s, Normalised)]
    hooks = [norm.register_forward_hook(lambda m, given, _out: _affine(m, given[0])) for norm in norms]
    target = model.get_submodule(layer)
    hooks.append(target.register_forward_pre_hook(lambda _m, given: caught.append(given[0].detach())))
    if carrier.embedding is not None:
        table = model.get_submodule(carrier.embedding)
        embedded: list[Tensor] = []
        hooks.append(table.register_forward_hook(lambda _m, _g, out: embedded.append(out.detach())))
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    try:
        # Convolutions on an accelerator round to ten bits by default; what is asked here is whether the layers are right.
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False), torch.random.fork_rng(devices=[]):
            model.train()(*inputs)
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    finally:
        for hook in hooks:
            hook.remove()
    truth = flat(embedded[0] if carrier.embedding is not None else sample)
    places = carrier.places.to(truth.device)
    expected = truth[:, places].reshape(-1, places.shape[-1])
    arrived = carrier.read(caught[0].reshape(-1, caught[0].shape[-1]))
    for step in reversed(carrier.steps):
        if isinstance(step, Affine):
            arrived = (arrived - step.offset.to(arrived)) / step.scale.to(arrived)
        else:
            norm = model.get_submodule(step.layer)
            beta = getattr(norm, "bias", None)
            arrived = arrived - (0.0 if beta is None else float(beta.detach().flatten()[0]))
    added = max((float(s.offset.abs().max()) for s in carrier.steps if isinstance(s, Affine)), default=0.0)
    error = float((arrived - expected).abs().max())
    if not error <= 1e-5 * (1 + float(truth.abs().max()) + added):
        raise CannotMount(
            f"{layer}: the probe arrives with an error of {error:.2g}; the layers up to here do not act "
            "as the identity. Values below the shift are cut by a ReLU: normalise the data or raise the shift."
        )


def _affine(layer: nn.Module, values: Tensor) -> Tensor:
    assert isinstance(layer, BatchNorm | nn.LayerNorm)
    if layer.weight is None:
        return values
    if isinstance(layer, nn.LayerNorm):
        return values * layer.weight + (0 if layer.bias is None else layer.bias)
    view = (1, -1, *([1] * (values.dim() - 2)))
    return values * layer.weight.view(view) + layer.bias.view(view)
