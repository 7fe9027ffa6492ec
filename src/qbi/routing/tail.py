"""What a model makes of one layer's output, as a function of its own: the part of the graph behind the layer."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from qbi.errors import CannotRead
from qbi.routing.graph import Traced
from qbi.routing.path import BatchNorm, moved_by


def tail_of(traced: Traced, layer: str) -> Callable[[Tensor], Any]:
    """The model from a layer's output on, in float64 on the processor; refuses what does not act on each sample by itself."""
    nodes = traced.nodes_of(layer)
    if len(nodes) != 1:
        raise CannotRead(f"{layer}: it is called {len(nodes)} times; what it sends on cannot be followed.")
    start, moved = nodes[0], moved_by(traced)
    behind: set[fx.Node] = {start}
    for node in traced.graph.nodes:
        if any(n in behind for n in node.all_input_nodes):
            behind.add(node)
    order = [n for n in traced.graph.nodes if n in behind and n is not start]
    modules = {}
    for node in order:
        for other in node.all_input_nodes:
            if other not in behind and other in moved and node.op != "output":
                raise CannotRead(f"{traced.label(node)}: the sample reaches it by another way too.")
        module = traced.module(node)
        if module is not None:
            _check(module, traced.label(node))
            modules[node] = copy.deepcopy(module).double().cpu()

    fixed = _without_inputs(traced)

    def run(value: Tensor) -> Any:
        # A copy: what stands behind may work in place.
        known: dict[fx.Node, Any] = {start: value * 1}

        def given(node: fx.Node) -> Any:
            if node in known:
                return known[node]
            found = _constant(traced, node) if node in fixed else traced.values[node]
            if isinstance(found, Tensor) and found.is_meta:
                return found  # what the sample is elsewhere, handed out beside the prediction
            wide = isinstance(found, Tensor) and found.is_floating_point()
            return found.to(device=value.device, dtype=value.dtype) if wide else found

        for node in order:
            known[node] = traced.run(node, given, module=modules.get(node))
        return known[order[-1]] if order and order[-1].op == "output" else value

    return run


def _without_inputs(traced: Traced) -> set[fx.Node]:
    """Nodes that follow from the model alone, whatever it is called with."""
    out: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "placeholder" and all(n in out for n in node.all_input_nodes):
            out.add(node)
    return out


def _constant(traced: Traced, node: fx.Node) -> Any:
    """The value of such a node with the model's weights as they are now."""
    with torch.no_grad():
        value = traced.run(node, lambda operand: _constant(traced, operand))
    return value.detach() if isinstance(value, Tensor) else value


def _check(module: nn.Module, label: str) -> None:
    for part in module.modules():
        if isinstance(part, BatchNorm) and part.training:
            raise CannotRead(f"{label}: batch normalisation behind the layer mixes the samples; none explains itself.")
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and part.training:
            raise CannotRead(
                f"{label}: dropout behind the layer was drawn by the client; backprops cannot be foretold."
            )


def first_tensor(out: Any) -> Tensor:
    """A model's prediction, where it returns more than that."""
    if isinstance(out, dict):
        out = next(iter(out.values()), None)
    elif isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise CannotRead("model: it returns no tensor.")
    return out.flatten(1) if out.dim() > 1 else out[:, None]
