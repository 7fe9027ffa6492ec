"""Three ways to find a model's graph: torch.fx, torch.export, and watching its modules."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qbi.calling import as_client, hooked
from qbi.errors import BadValue

Inputs = tuple[Tensor, ...]

KNOWN_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.Embedding,
)


def by_fx(model: nn.Module, inputs: Inputs) -> fx.Graph:
    """Symbolic tracing."""
    if isinstance(model, KNOWN_LAYERS):
        raise BadValue("a single layer; wrap it in nn.Sequential")
    graph = fx.Tracer().trace(model)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for extra in placeholders[len(inputs) :]:
        if not extra.args:
            raise BadValue(f"the model takes {len(placeholders)} inputs, {len(inputs)} were given")
    return graph


def by_export(model: nn.Module, inputs: Inputs) -> fx.Graph:
    """The exported graph, its operators on a layer's own parameters written back as calls of that layer."""
    said = io.StringIO()
    with as_client(model), _silent_torch(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        program = torch.export.export(model, inputs, strict=False)
    owned = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    constants = dict(program.graph_signature.inputs_to_lifted_tensor_constants)
    graph, copied = fx.Graph(), {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in owned:
                copied[node] = graph.get_attr(owned[node.name])
            elif node.name in constants:
                copied[node] = graph.call_function(_constant(program.constants[constants[node.name]]))
            else:
                copied[node] = graph.placeholder(node.name)
        elif node.op == "output":
            results = [a for a in pytree.tree_leaves(node.args) if isinstance(a, fx.Node)]
            wanted = set(program.graph_signature.user_outputs)
            chosen = [copied[a] for a in results if a.name in wanted] or [copied[results[-1]]]
            graph.output(chosen[0] if len(chosen) == 1 else tuple(chosen))
        else:
            layer = _layer_of(node, owned, model)
            if layer is not None:
                copied[node] = graph.call_module(layer, (copied[_signal_of(node)],))
            else:
                copied[node] = graph.node_copy(node, lambda n: copied[n])
    for node in reversed(list(graph.nodes)):
        if node.op in ("get_attr", "call_function") and not node.users:
            graph.erase_node(node)
    return graph


@contextlib.contextmanager
def _silent_torch() -> Iterator[None]:
    """Export says at length on the log why it cannot; the reason is kept in the error. Other libraries' logs stay as they are."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.name.startswith("torch")

    handlers = [*logging.getLogger().handlers, *logging.getLogger("torch").handlers]
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            handlers += logger.handlers
    handlers += [logging.lastResort] if logging.lastResort is not None else []
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)


def _constant(value: Tensor) -> Callable[[], Tensor]:
    def constant() -> Tensor:
        return value

    return constant


def _layer_of(node: fx.Node, owned: Mapping[str, str], model: nn.Module) -> str | None:
    """The layer whose weights an operator uses, if the operator is that layer's whole work."""
    names = ("linear", "conv1d", "conv2d", "conv3d", "batch_norm", "layer_norm", "group_norm", "embedding")
    called = str(node.target).removeprefix("aten.").split(".")[0]
    if called not in names:
        return None
    for argument in node.all_input_nodes:
        fqn = owned.get(argument.name, "")
        if fqn.endswith(".weight"):
            layer = fqn.removesuffix(".weight")
            if isinstance(model.get_submodule(layer), KNOWN_LAYERS):
                return layer
    return None


def _signal_of(node: fx.Node) -> fx.Node:
    """The operand that is not a parameter; an embedding has its table first."""
    operand = node.args[1] if "embedding" in str(node.target) else node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def by_hooks(model: nn.Module, inputs: Inputs) -> fx.Graph:
    """Leaf modules in the order in which they were called, joined where one's output is the next one's input.

    Between two modules a reshape or a ReLU written as a function is recognised by its values; anything else is a gap.
    """
    calls: list[tuple[str, Tensor, Tensor]] = []
    leaves = {m: n for n, m in model.named_modules() if not any(True for _ in m.children())}

    def watch(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(out, Tensor):
            calls.append((leaves[module], given[0], out))

    with hooked(after=dict.fromkeys(leaves, watch)), as_client(model), torch.no_grad():
        model(*inputs)
    graph = fx.Graph()
    known: list[tuple[Tensor, fx.Node]] = [(value, graph.placeholder(f"input_{i}")) for i, value in enumerate(inputs)]
    for name, given, out in calls:
        known.append((out, graph.call_module(name, (_source(graph, given, known),))))
    graph.output(known[-1][1])
    return graph


def _source(graph: fx.Graph, given: Tensor, known: list[tuple[Tensor, fx.Node]]) -> fx.Node:
    for value, node in reversed(known):
        if value is given:
            return node
    for value, node in reversed(known):
        if value.numel() != given.numel() or not value.is_floating_point():
            continue
        if torch.equal(value.flatten(), given.flatten()):
            return graph.call_function(torch.reshape, (node, tuple(given.shape)))
        if torch.equal(value.relu().flatten(), given.flatten()):
            return graph.call_function(torch.reshape, (graph.call_function(torch.relu, (node,)), tuple(given.shape)))
    return graph.call_function(_gap(given), tuple(known[-1][1:]))


def _gap(value: Tensor) -> Callable[..., Tensor]:
    """Something between two modules that was not seen."""

    def something_unseen(*_: Any) -> Tensor:
        return value

    return something_unseen
