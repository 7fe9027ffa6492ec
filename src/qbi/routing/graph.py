"""A model as a graph of calls: by torch.fx, where that fails by torch.export, and where that fails by watching modules.

Whatever made it, the graph speaks the same language: layers with parameters are `call_module` nodes with the model's own
names, everything else is a function or a method, so that it can be run, probed and followed from an input to a layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qbi.calling import as_client
from qbi.errors import BadValue, CannotMount, first_line
from qbi.routing.tracers import Inputs, by_export, by_fx, by_hooks

How = Literal["fx", "export", "hooks"]


@dataclass(frozen=True)
class Traced:
    """A model's graph, how it was found, and the value of every node on the probe."""

    model: nn.Module
    graph: fx.Graph
    how: How
    note: str
    values: Mapping[fx.Node, Any] = field(repr=False)

    def nodes_of(self, module: str) -> list[fx.Node]:
        """Where a layer is called."""
        return [n for n in self.graph.nodes if n.op == "call_module" and n.target == module]

    def module(self, node: fx.Node) -> nn.Module | None:
        """The layer a node calls, if it calls one."""
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def place(self, node: fx.Node) -> str:
        """The layer's path, or the function's name."""
        target = node.target
        return target if isinstance(target, str) else str(getattr(target, "__name__", target)).removesuffix(".default")

    def run(self, node: fx.Node, given: Callable[[fx.Node], Any], *, module: nn.Module | None = None) -> Any:
        """One node with operands of one's choice, and another layer than the model's own if one is named."""
        return _executed(self.model, node, given, module)

    def label(self, node: fx.Node) -> str:
        """A name for people: the place and its kind."""
        module = self.module(node)
        kind = type(module).__name__ if module is not None else "parameter" if node.op == "get_attr" else "function"
        return f"{self.place(node)} ({kind})"


def as_inputs(sample: Tensor | Inputs) -> Inputs:
    """One input or several, as a tuple."""
    return sample if isinstance(sample, tuple) else (sample,)


def trace(model: nn.Module, sample: Tensor | Inputs) -> Traced:
    """The model's graph on a probe. The model is left as it was, in train mode, as a client would run it."""
    inputs = as_inputs(sample)
    reasons = []
    ways: list[tuple[How, Callable[[nn.Module, Inputs], fx.Graph]]] = [
        ("fx", by_fx),
        ("export", by_export),
        ("hooks", by_hooks),
    ]
    for how, make in ways:
        try:
            graph = make(model, inputs)
            values = _run(model, graph, inputs)
        except Exception as problem:
            # Tracers fail in any way a model can be written; what they say is kept, and the next one is tried.
            reasons.append(f"{how}: {first_line(problem)}")
            continue
        return Traced(model, graph, how, "; ".join(reasons), values)
    _try_forward(model, inputs)
    raise CannotMount(f"model: its structure cannot be found ({'; '.join(reasons)}).")


def _try_forward(model: nn.Module, inputs: Inputs) -> None:
    """A model that does not run at all is the user's to mend."""
    try:
        with as_client(model), torch.no_grad():
            model(*inputs)
    except Exception as problem:
        shapes = ", ".join(str(tuple(i.shape)) for i in inputs)
        raise BadValue(
            f"model: its forward pass fails on input of shape {shapes} ({type(problem).__name__}: {first_line(problem)}). "
            "Check that the data are what the model takes."
        ) from problem


def _run(model: nn.Module, graph: fx.Graph, inputs: Inputs) -> dict[fx.Node, Any]:
    """Every node's value on the probe, detached, as it was before anything worked on it in place."""
    live: dict[fx.Node, Any] = {}
    values: dict[fx.Node, Any] = {}
    left = iter(inputs)
    with as_client(model), torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                out = list(left) if str(node.target).startswith("*") else next(left, *node.args)
            else:
                out = _executed(model, node, live.__getitem__)
            live[node] = out
            values[node] = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, out)
    return values


def _executed(model: nn.Module, node: fx.Node, given: Callable[[fx.Node], Any], module: nn.Module | None = None) -> Any:
    """What one node makes of its operands; the only place where one is run."""
    args, more = fx.node.map_arg(node.args, given), fx.node.map_arg(node.kwargs, given)
    if node.op == "output":
        return args[0]
    if node.op == "get_attr":
        return attrgetter(str(node.target))(model)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **more)
    called = module or (model.get_submodule(str(node.target)) if node.op == "call_module" else node.target)
    assert callable(called)
    return called(*args, **more)
