"""Turn the layers before one layer into the identity, and say how the sample arrives there.

The way is followed node by node. At each one a map says which value of the sample stands where: layers with weights are
written so that they copy (convolutions by single taps, several of them where a stride or a missing border asks for it),
a ReLU is passed by a pair of channels for both signs or by a shift, reshapes and the like move the map itself. What
cannot be the identity is named as a loss, and what comes out of it is carried on as the sample.

Everything here changes the model it is given: callers pass copies.
"""

from dataclasses import replace

from torch import Tensor, fx, nn

from qbi.carrier import Carrier, Cause, Shortfall
from qbi.errors import CannotMount
from qbi.routing.arrival import arrive, check_arrival
from qbi.routing.copying import plan_convolution, plan_linear, through_weights
from qbi.routing.graph import Traced, as_inputs, trace
from qbi.routing.path import (
    JOINS,
    BatchNorm,
    Convolution,
    Unreachable,
    find_path,
    is_sum,
    moved_by,
    name_of,
    silence,
)
from qbi.routing.route import Route, Way, fresh
from qbi.routing.tracers import Inputs
from qbi.routing.weightless import through_norm, through_other

DEFAULT_SHIFT = 8.0
"""Added to pass a ReLU: normalised data rarely lie below −8, and float32 still keeps six digits."""


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
        raise Unreachable(f"{layer}: it {times}; a sample cannot be told apart there.", at=layer)
    path = find_path(traced, nodes[0])
    way = Way(traced, path, shift, moved_by(traced))
    # A pooling layer or an activation may be used as often as one likes: there is nothing in it to set.
    repeated = {
        n
        for n in way.layers
        if way.layers.count(n) > 1 and any(True for _ in traced.model.get_submodule(n).parameters())
    }
    if repeated:
        raise Unreachable(
            f"{sorted(repeated)[0]}: it is used more than once on the way; one setting cannot serve both.",
            at=sorted(repeated)[0],
        )
    route = _start(traced.values[path[0]], way)
    for position in range(1, len(path) - 1):
        route = _pass(way, position, route)
        if strict:
            _refuse(route)
    source = _input_index(traced, path[0])
    carrier = replace(arrive(traced.model.get_submodule(layer), route), source=source)
    try:
        check_arrival(model, layer, inputs, inputs[source], carrier)
    except CannotMount as problem:
        if strict:
            raise
        cut = Shortfall(layer, Cause.SHIFT, f"sees another value than was sent ({problem})", layer)
        return replace(carrier, shortfalls=(*carrier.shortfalls, cut), places=None)
    return carrier


def _refuse(route: Route) -> None:
    for shortfall in route.shortfalls:
        if not shortfall.approximate:
            raise CannotMount(str(shortfall), at=shortfall.place)


def _input_index(traced: Traced, node: fx.Node) -> int:
    return [n for n in traced.graph.nodes if n.op == "placeholder"].index(node)


def _start(value: Tensor, way: Way) -> Route:
    if not value.is_floating_point() and not any(
        isinstance(way.traced.module(n), nn.Embedding) for n in way.nodes if n.op == "call_module"
    ):
        last = way.nodes[-1]
        raise Unreachable(
            f"{way.traced.label(last)}: the input holds whole numbers and meets no embedding on the way to it.",
            at=way.traced.place(last),
        )
    return fresh(tuple(value.shape[1:]))


def _pass(way: Way, position: int, route: Route) -> Route:
    """The route behind one node."""
    traced, node = way.traced, way.nodes[position]
    module, label = traced.module(node), traced.label(node)
    before = route.present
    _join(way, position)
    if isinstance(module, nn.Embedding):
        value = traced.values[node]
        return replace(fresh(tuple(value.shape[1:])), embedding=str(node.target))
    if not isinstance(route.plus, Tensor) and module is not None:
        raise Unreachable(f"{label} takes several tensors at once.", at=traced.place(node))
    if isinstance(module, Convolution):
        out = through_weights(way, position, route, plan_convolution(module, route, traced.values[node].shape[2:]))
    elif isinstance(module, nn.Linear):
        out = through_weights(way, position, route, plan_linear(module, route))
    elif isinstance(module, BatchNorm | nn.LayerNorm):
        out = through_norm(way, position, route)
    else:
        out = through_other(way, position, route)
    if out.whole and out.present < before and len(out.shortfalls) == len(route.shortfalls):
        out = out.lose(label, traced.place(node), Cause.STRIDE, f"keeps {out.present} of {before} values.")
    if out.present == 0:
        raise Unreachable(f"{label} keeps nothing of the sample.", at=traced.place(node))
    return out


def _join(way: Way, position: int) -> None:
    """Silence what is added to the sample from the side; refuse what meets it in another way."""
    traced, node, through = way.traced, way.nodes[position], way.nodes[position - 1]
    others = [n for n in node.all_input_nodes if n is not through and n in way.moved]
    if not others or name_of(traced, node) in JOINS:
        return
    for other in others:
        if not is_sum(traced, node):
            raise Unreachable(
                f"{traced.label(node)} combines the sample with {traced.label(other)}.", at=traced.place(node)
            )
        if not silence(traced, other, way.layers):
            raise Unreachable(
                f"{traced.label(node)} adds {traced.label(other)} to the sample, which cannot be silenced.",
                at=traced.place(node),
            )
