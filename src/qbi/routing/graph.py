"""A model as a graph of calls: by torch.fx, where that fails by torch.export, and where that fails by watching modules.

Whatever made it, the graph speaks the same language: layers with parameters are `call_module` nodes with the model's own
names, everything else is a function or a method, so that it can be run, probed and followed from an input to a layer.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qbi.errors import BadValue, CannotMount, first_line

Inputs = tuple[Tensor, ...]
How = Literal["fx", "export", "hooks"]

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
        ("fx", _by_fx),
        ("export", _by_export),
        ("hooks", _by_hooks),
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
        with _untouched(model), torch.no_grad():
            model(*inputs)
    except Exception as problem:
        shapes = ", ".join(str(tuple(i.shape)) for i in inputs)
        raise BadValue(
            f"model: its forward pass fails on input of shape {shapes} ({type(problem).__name__}: {first_line(problem)}). "
            "Check that the data are what the model takes."
        ) from problem


class _untouched:  # noqa: N801
    """Train mode inside the block; buffers, mode and the random state are put back after it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.buffers = {n: b.detach().clone() for n, b in self.model.named_buffers()}
        self.modes = [(m, m.training) for m in self.model.modules()]
        self.state = torch.get_rng_state()
        self.model.train()

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.state)
        for module, mode in self.modes:
            module.training = mode
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if buffer.shape == self.buffers[name].shape:
                    buffer.copy_(self.buffers[name])


def _run(model: nn.Module, graph: fx.Graph, inputs: Inputs) -> dict[fx.Node, Any]:
    """Every node's value on the probe, detached."""
    values: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            out = super().run_node(n)
            values[n] = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, out)
            return out

    with _untouched(model), torch.no_grad():
        Recorder(fx.GraphModule(model, graph), garbage_collect_values=False).run(*inputs)
    return values


def _by_fx(model: nn.Module, inputs: Inputs) -> fx.Graph:
    if isinstance(model, KNOWN_LAYERS):
        raise BadValue("a single layer; wrap it in nn.Sequential")
    graph = fx.Tracer().trace(model)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for extra in placeholders[len(inputs) :]:
        if not extra.args:
            raise BadValue(f"the model takes {len(placeholders)} inputs, {len(inputs)} were given")
    return graph


def _by_export(model: nn.Module, inputs: Inputs) -> fx.Graph:
    """The exported graph, its operators on a layer's own parameters written back as calls of that layer."""
    # Export says at length on the log why it cannot; the reason is kept in the error.
    logging.disable(logging.CRITICAL)
    said = io.StringIO()
    try:
        with _untouched(model), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            program = torch.export.export(model, inputs, strict=False)
    finally:
        logging.disable(logging.NOTSET)
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


def _by_hooks(model: nn.Module, inputs: Inputs) -> fx.Graph:
    """Leaf modules in the order in which they were called, joined where one's output is the next one's input.

    Between two modules a reshape or a ReLU written as a function is recognised by its values; anything else is a gap.
    """
    calls: list[tuple[str, Tensor, Tensor]] = []
    leaves = {m: n for n, m in model.named_modules() if not any(True for _ in m.children())}

    def watch(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(out, Tensor):
            calls.append((leaves[module], given[0], out))

    hooks = [module.register_forward_hook(watch) for module in leaves]
    try:
        with _untouched(model), torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
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
