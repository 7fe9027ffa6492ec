"""What a server does to the layers behind the attacked one."""

import torch
from torch import nn

from qbi.attacks.base import Carried
from qbi.errors import CannotMount


def next_linear(carried: Carried) -> nn.Linear:
    """The first linear layer behind the attacked one that takes its outputs."""
    linear = [(n, m) for n, m in carried.model.named_modules() if isinstance(m, nn.Linear)]
    names = [name for name, _ in linear]
    for _, layer in linear[names.index(carried.layer) + 1 :]:
        if layer.in_features == carried.target.out_features:
            return layer
    raise CannotMount(f"{carried.layer} (Linear): no linear layer follows whose weights could be set.")


def equalise_head(carried: Carried) -> None:
    """Give every neuron the same outgoing weights, in place, so that all rows back-propagate one coefficient per sample."""
    layer = next_linear(carried)
    with torch.no_grad():
        layer.weight.copy_(layer.weight[:, :1].clone().expand_as(layer.weight))


def is_asleep(carried: Carried) -> bool:
    """Whether the layer behind has nothing but zeros, as adapters and zero-initialised heads do: no row gets a gradient."""
    try:
        return not bool(next_linear(carried).weight.any())
    except CannotMount:
        return False


def wake_head(carried: Carried) -> None:
    """Where the layer behind has nothing but zeros, no row gets a gradient: give it small random weights, in place."""
    if is_asleep(carried):
        layer = next_linear(carried)
        draws = torch.Generator().manual_seed(0)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=draws) / layer.in_features**0.5)
