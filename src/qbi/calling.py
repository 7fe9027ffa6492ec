"""Runs a module with other weights than its own, or in train mode, and leaves it as it was."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def call_with(
    module: nn.Module, values: Mapping[str, Tensor], given: tuple[Any, ...], named: Mapping[str, Any] | None = None
) -> Any:
    """What a module returns when some of its parameters and buffers have the given values.

    As `torch.func.functional_call` does, for modules that hold the same part under several names too: torch would put its own
    weights back under the first name, and the values that were lent back over them under the second.

    >>> import torch
    >>> layer = nn.Linear(2, 2)
    >>> model = nn.Sequential(layer, layer)
    >>> lent = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    >>> call_with(model, lent, (torch.ones(1, 2),)).tolist(), type(layer.weight).__name__
    ([[0.0, 0.0]], 'Parameter')
    """
    own = dict((*module.named_parameters(), *module.named_buffers()))
    lent = {id(own[name]): value for name, value in values.items()}
    everywhere = {
        f"{place}.{name}" if place else name: lent[id(tensor)]
        for place, part in module.named_modules()
        for name, tensor in (
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        )
        if id(tensor) in lent
    }
    return functional_call(module, everywhere, given, dict(named or {}), tie_weights=False)


class untouched:  # noqa: N801
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
