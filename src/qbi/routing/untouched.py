"""Whether a layer is handed the client's samples themselves: nothing before it but changes of shape."""

import torch
from torch import Tensor, fx, nn

from qbi.routing.graph import Traced

RESHAPING = (nn.Flatten, nn.Identity, nn.Unflatten)
FUNCTIONS = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze)
METHODS = ("flatten", "reshape", "view", "squeeze", "unsqueeze", "contiguous")


def sees_samples(traced: Traced, layer: str) -> bool:
    """By the graph, not by trying: what changes some values may leave those of a probe alone."""
    nodes = traced.nodes_of(layer)
    if traced.how == "hooks" or len(nodes) != 1 or any(_hooked(m) for m in traced.model.modules()):
        return False
    node = nodes[0]
    while node.op != "placeholder":
        before = node.all_input_nodes
        if len(before) != 1 or (node is not nodes[0] and not _reshapes(traced, node)):
            return False
        node = before[0]
    return isinstance(traced.values.get(node), Tensor)


def _reshapes(traced: Traced, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(traced.module(node)) in RESHAPING
    if node.op == "call_method":
        return node.target in METHODS
    return node.target in FUNCTIONS


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
