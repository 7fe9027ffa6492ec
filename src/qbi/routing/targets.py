"""The linear layers of a model that could be attacked: their size, and what stands behind them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from qbi.routing.graph import Traced
from qbi.routing.path import name_of, tensors

PASSED = ("dropout", "identity", "flatten", "reshape", "view", "contiguous", "getitem", "movedim")


@dataclass(frozen=True)
class Target:
    """A linear layer, as a server looks at it."""

    name: str
    neurons: int
    width: int
    has_bias: bool
    activation: str
    """What follows: an activation's name, `none`, or the layer that stands in between."""
    slope_below: float
    """How much of a gradient the activation lets through at −2, against that at 2: 0 for a ReLU, 1 for none."""

    @property
    def rectified(self) -> bool:
        """Whether rows stay silent for samples below zero."""
        return self.slope_below == 0


def targets(traced: Traced) -> list[Target]:
    """Every linear layer in the order of the graph."""
    found: dict[str, Target] = {}
    for node in traced.graph.nodes:
        module = traced.module(node)
        # Attention uses the weights of its last layer without calling it: it is looked at written as a linear map.
        plain = isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
        if isinstance(module, nn.Linear) and plain and module.weight.requires_grad:
            name = str(node.target)
            behind = activation_behind(traced, node)
            activation = "none" if behind is None else name_of(traced, behind)
            several = _goes_on_twice(traced, node)
            slope = 1.0 if behind is None or several else _slope_below(traced, behind, module.out_features)
            has_bias = module.bias is not None and module.bias.requires_grad
            found[name] = Target(name, module.out_features, module.in_features, has_bias, activation, slope)
    return list(found.values())


def _users(traced: Traced, node: fx.Node) -> list[fx.Node]:
    """What goes on with a node's values; who only asks for their shape does not."""
    asks = [user for user in node.users if user in traced.values and not tensors(traced.values[user])]
    return [user for user in node.users if user not in asks]


def _goes_on_twice(traced: Traced, node: fx.Node) -> bool:
    """Whether a layer's output reaches more than one thing: then no single activation stands behind it."""
    users = _users(traced, node)
    if len(users) != 1:
        return len(users) > 1
    return name_of(traced, users[0]) in PASSED and _goes_on_twice(traced, users[0])


def activation_behind(traced: Traced, node: fx.Node) -> fx.Node | None:
    """The first thing behind a node that is more than a reshape or a dropout."""
    users = [user for user in _users(traced, node) if user.op != "output"]
    if not users:
        return None
    return activation_behind(traced, users[0]) if name_of(traced, users[0]) in PASSED else users[0]


def arriving_shape(traced: Traced, layer: str) -> tuple[int, ...] | None:
    """The shape in which a sample stood before it was flattened for a layer; None where it was not."""
    nodes = traced.nodes_of(layer)
    node = nodes[0].all_input_nodes[0] if nodes and nodes[0].all_input_nodes else None
    while node is not None and name_of(traced, node) in PASSED and node.all_input_nodes:
        node = node.all_input_nodes[0]
        value = traced.values.get(node)
        if isinstance(value, Tensor) and value.dim() == 4:
            return tuple(value.shape[1:])
    return None


def _slope_below(traced: Traced, node: fx.Node, width: int) -> float:
    """Measured on the function itself, not looked up by name; 1 where it is no function of one value."""
    module = traced.module(node)
    others = [n for n in node.all_input_nodes if tensors(traced.values.get(n))]
    if len(others) != 1 or isinstance(module, nn.modules.batchnorm._BatchNorm):
        return 1.0
    slopes = []
    for at in (-2.0, 2.0):
        values = torch.full((2, width), at, requires_grad=True)
        given = {others[0]: values * 1}
        try:
            out = _apply(traced, node, given)
            (slope,) = torch.autograd.grad(out.sum(), values)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
            return 1.0
        slopes.append(float(slope.mean()))
    return slopes[0] / slopes[1] if slopes[1] else 1.0


def _apply(traced: Traced, node: fx.Node, given: Mapping[fx.Node, Tensor]) -> Tensor:
    out = traced.run(node, lambda n: given[n] if n in given else traced.values[n])
    if not isinstance(out, Tensor):
        raise TypeError("a shape or several values, and no function of one")
    return out
