"""The linear layers of a model that could be attacked: their size, and what stands behind them."""

from dataclasses import dataclass

from torch import fx, nn

from qbi.routing.graph import Traced
from qbi.routing.path import SQUASHING, name_of

RECTIFIERS = ("relu", "relu_", "relu6", "hardtanh")
"""Activations that send exactly nothing back for values below zero."""

SOFT = ("gelu", "silu", "leakyrelu", "leaky_relu", "elu", "selu", "celu", "softplus", "mish", "hardswish", "prelu")
"""Activations that let little through below zero: what that is worth is measured, not assumed."""

PASSED = ("dropout", "identity", "flatten", "reshape", "view", "contiguous", "getitem")


@dataclass(frozen=True)
class Target:
    """A linear layer, as a server looks at it."""

    name: str
    neurons: int
    width: int
    has_bias: bool
    activation: str
    """What follows: an activation's name, `none`, or the layer that stands in between."""

    @property
    def rectified(self) -> bool:
        """Whether rows stay silent for samples below zero."""
        return self.activation in RECTIFIERS

    @property
    def soft(self) -> bool:
        """Whether rows are nearly silent for them."""
        return self.activation in SOFT


def targets(traced: Traced) -> list[Target]:
    """Every linear layer in the order of the graph."""
    found: dict[str, Target] = {}
    for node in traced.graph.nodes:
        module = traced.module(node)
        if isinstance(module, nn.Linear):
            name = str(node.target)
            found[name] = Target(
                name, module.out_features, module.in_features, module.bias is not None, activation_behind(traced, node)
            )
    return list(found.values())


def activation_behind(traced: Traced, node: fx.Node) -> str:
    """The first thing behind a node that is more than a reshape or a dropout."""
    users = [user for user in node.users if user.op != "output"]
    if not users:
        return "none"
    name = name_of(traced, users[0])
    if name in PASSED:
        return activation_behind(traced, users[0])
    if name in RECTIFIERS or name in SOFT or any(word in name for word in SQUASHING):
        return name
    return type(module).__name__ if (module := traced.module(users[0])) is not None else name
