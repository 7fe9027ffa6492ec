"""Hooks on linear layers that keep what arrived and what came back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qbi.calling import hooked
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
        self.backprops: dict[str, list[Tensor | None]] = {}
        self.above: dict[str, list[Tensor]] = {}

    def exposure(self, name: str) -> Exposure:
        """The exposure of one layer; several calls (steps of time, gradient accumulation) stand one after another."""
        returned = self.backprops.get(name, [])
        if all(share is None for share in returned):
            raise BadValue(
                f"{name}: no forward and backward pass was seen there; the loss does not depend on it (of several outputs, the first is trained on)."
            )
        above = self.above[name]
        backprops = [
            torch.zeros(a.shape).to(self.inputs[name][0]) if s is None else s
            for s, a in zip(returned, above, strict=True)
        ]
        return Exposure(name, torch.cat(self.inputs[name]), torch.cat(backprops).T, torch.cat(above).T)

    def catch(self, name: str, arrived: Tensor, out: Tensor) -> Tensor:
        """Keep a layer's input, and its output's gradient as soon as it is known; what to go on with, which may be written over."""
        if not out.requires_grad:
            return out
        self.inputs.setdefault(name, []).append(arrived.detach().reshape(-1, arrived.shape[-1]))
        self.above.setdefault(name, []).append(out.detach().reshape(-1, out.shape[-1]) > 0)
        kept = self.backprops.setdefault(name, [])
        place = len(kept)
        kept.append(None)

        def came_back(gradient: Tensor) -> None:
            kept[place] = gradient.detach().reshape(-1, gradient.shape[-1])

        out.register_hook(came_back)
        return out.clone()


@contextmanager
def watched(model: nn.Module, names: Sequence[str]) -> Iterator[Watch]:
    """Watch the named layers inside the block."""
    watch = Watch()
    modules = {model.get_submodule(name): name for name in names}
    catch = lambda module, arrived, out: watch.catch(modules[module], arrived[0], out)  # noqa: E731
    with hooked(after=dict.fromkeys(modules, catch)):
        yield watch
