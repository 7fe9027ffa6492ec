"""Hooks on linear layers that keep what arrived and what came back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qbi.errors import BadValue
from qbi.exposure.record import Exposure


def vulnerable_layers(model: nn.Module) -> list[str]:
    """Linear layers with a bias: each row's quotient can be formed."""
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and watchable(m)]


def watchable(layer: nn.Linear) -> bool:
    """Whether a layer sends gradients of weight and bias that could be divided."""
    return layer.bias is not None and layer.weight.requires_grad and layer.bias.requires_grad


class Watch:
    """Hooks on linear layers that keep what arrived and what came back, for one pass."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.shares: dict[str, list[Tensor]] = {}
        self.above: dict[str, list[Tensor]] = {}

    def clear(self) -> None:
        """Forget the last pass."""
        self.inputs.clear()
        self.shares.clear()
        self.above.clear()

    def exposure(self, name: str) -> Exposure:
        """The exposure of one layer; several passes (gradient accumulation) stand one after another."""
        if not self.inputs.get(name) or len(self.inputs[name]) != len(self.shares.get(name, ())):
            raise BadValue(f"{name}: no forward and backward pass was seen there; nothing is known of its exposure.")
        above = torch.cat(self.above[name]).T
        return Exposure(name, torch.cat(self.inputs[name]), torch.cat(self.shares[name]).T, above)

    def catch(self, name: str, arrived: Tensor, out: Tensor) -> None:
        """Keep a layer's input, and its output's gradient as soon as it is known."""
        if not out.requires_grad:
            return
        self.inputs.setdefault(name, []).append(arrived.detach().reshape(-1, arrived.shape[-1]))
        self.above.setdefault(name, []).append(out.detach().reshape(-1, out.shape[-1]) > 0)
        out.register_hook(lambda g: self.shares.setdefault(name, []).append(g.detach().reshape(-1, g.shape[-1])))


@contextmanager
def watched(model: nn.Module, names: Sequence[str]) -> Iterator[Watch]:
    """Watch the named layers inside the block."""
    watch = Watch()
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _m, arrived, out, name=name: watch.catch(name, arrived[0], out)
        )
        for name in names
    ]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()
