"""The way from an input to a layer on which least is lost, and how to silence what joins it from the side."""

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qbi.errors import CannotMount
from qbi.routing.graph import Traced

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

SUMS = ("add", "iadd", "sub", "isub", "add_", "sub_", "rsub")
JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack")
REDUCING = ("pool", "mean", "amax", "amin", "interpolate", "upsample")
SQUASHING = (
    "relu",
    "gelu",
    "silu",
    "sigmoid",
    "tanh",
    "softplus",
    "elu",
    "swish",
    "mish",
    "clamp",
    "threshold",
    "shrink",
)


class Unreachable(CannotMount):
    """A layer to which no sample can be carried; the message names the layer that decides."""


def name_of(traced: Traced, node: fx.Node) -> str:
    """What a node does, in one lower-case word."""
    module = traced.module(node)
    if module is not None:
        return type(module).__name__.lower()
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return str(target).removesuffix(".default").split(".")[0].lower()


def tensors(value: object) -> list[Tensor]:
    """The tensors in a node's value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def moved_by(traced: Traced) -> set[fx.Node]:
    """Nodes whose tensors depend on an input."""
    moved: set[fx.Node] = set()
    for node in traced.graph.nodes:
        depends = node.op == "placeholder" or any(n in moved for n in node.all_input_nodes)
        if depends and tensors(traced.values.get(node)):
            moved.add(node)
    return moved


def in_outline(traced: Traced) -> Traced:
    """Without the values of what an input moves: their shapes alone, which take no memory."""
    moved = moved_by(traced)

    def outlined(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    return replace(
        traced, values={n: pytree.tree_map(outlined, v) if n in moved else v for n, v in traced.values.items()}
    )


def find_path(traced: Traced, target: fx.Node) -> list[fx.Node]:
    """From an input to the layer, over shortcuts rather than branches, around pooling where there is a way around."""
    moved = moved_by(traced)
    best: dict[fx.Node, tuple[float, fx.Node | None]] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node in moved:
            best[node] = (0.0, None)
        elif node in moved:
            reached = [(best[n][0], i, n) for i, n in enumerate(node.all_input_nodes) if n in best]
            if reached:
                cost, _, through = min(reached, key=lambda r: r[:2])
                best[node] = (cost + _cost(traced, node), through)
    if target not in best:
        raise Unreachable(f"{traced.label(target)}: no input of the model reaches it.", at=traced.place(target))
    path: list[fx.Node] = [target]
    while (before := best[path[-1]][1]) is not None:
        path.append(before)
    return path[::-1]


def _cost(traced: Traced, node: fx.Node) -> float:
    """How much a node is expected to lose; only the order matters."""
    module, name = traced.module(node), name_of(traced, node)
    if isinstance(module, Convolution):
        return 50.0 if any(s > k for s, k in zip(module.stride, module.kernel_size, strict=True)) else 1.0
    if isinstance(module, nn.Linear | BatchNorm | nn.Embedding):
        return 1.0
    if isinstance(module, nn.LayerNorm):
        return 5.0
    if any(word in name for word in REDUCING) or "dropout" in name:
        return 30.0
    if any(word in name for word in SQUASHING):
        return 0.2
    if name in (*SUMS, *JOINS, "flatten", "identity", "reshape", "view", "permute", "transpose", "getitem"):
        return 0.1
    return 1.0 if module is None else 500.0


def silence(traced: Traced, node: fx.Node, spared: Iterable[str]) -> bool:
    """Make a side branch send zeros by writing zeros into its last layer; False where there is none to write into.

    Layers named in `spared` are on the way itself and stay as they are.
    """
    module = traced.module(node)
    if module is not None and str(node.target) in set(spared):
        return False
    if isinstance(module, nn.MultiheadAttention):
        return _zero(module.out_proj)
    if isinstance(module, Convolution | nn.Linear | BatchNorm | nn.LayerNorm | nn.GroupNorm | nn.Embedding):
        return _zero(module)
    if node.op == "get_attr":
        parameter = dict(traced.model.named_parameters()).get(str(node.target))
        if parameter is None:
            return False
        with torch.no_grad():
            parameter.zero_()
        return True
    operands = [n for n in node.all_input_nodes if tensors(traced.values.get(n))]
    name = name_of(traced, node)
    if name in ("mul", "imul", "truediv", "div"):
        return any(silence(traced, operand, spared) for operand in operands)
    if isinstance(module, nn.RNNBase) or name in ("matmul", "softmax", "exp", "cos", "sigmoid", "softplus"):
        return False
    return bool(operands) and all(silence(traced, operand, spared) for operand in operands)


def _zero(module: nn.Module) -> bool:
    parameters = [p for p in (getattr(module, "weight", None), getattr(module, "bias", None)) if p is not None]
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    return bool(parameters)


def is_sum(traced: Traced, node: fx.Node) -> bool:
    """Whether a node adds what it is given."""
    return node.target in (operator.add, operator.iadd, operator.sub) or name_of(traced, node) in SUMS
