"""Runs a module with other weights than its own, or in train mode, and leaves it as it was."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def as_client(model: nn.Module, *, seed: int | None = None, train: bool = True) -> Iterator[dict[str, Tensor]]:
    """Run a model as a client would: in train mode, random numbers from `seed` where one is given.

    Modes, buffers and the random state are put back afterwards, whatever ran inside. Yields copies of the buffers, to be lent with
    `call_with` by those who want to see what a pass makes of them.

    >>> model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    >>> with as_client(model):
    ...     _ = model(torch.randn(4, 2))
    >>> model.training, int(model[0].num_batches_tracked)
    (False, 0)
    """
    kept = {n: b.detach().clone() for n, b in model.named_buffers()}
    modes = [(part, part.training) for part in model.modules()]
    first = next(model.parameters(), None)
    devices = [first.device] if first is not None and first.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            if train:
                model.train()
            if seed is not None:
                torch.manual_seed(seed)
            yield {n: b.clone() for n, b in kept.items()}
    finally:
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                before = kept.get(name)
                # Not by versions: a batch norm writes without telling.
                if before is not None and before.shape == buffer.shape and not torch.equal(before, buffer):
                    buffer.copy_(before)


Hook = Callable[..., Any]


@contextmanager
def hooked(
    *, before: Mapping[nn.Module, Hook] | None = None, after: Mapping[nn.Module, Hook] | None = None
) -> Iterator[None]:
    """Inside the block each module calls its hook before it runs (module, given) or after (module, given, out); a hook may change either.

    >>> layer, seen = nn.Linear(2, 1), []
    >>> with hooked(before={layer: lambda _module, given: seen.append(tuple(given[0].shape))}):
    ...     _ = layer(torch.zeros(3, 2))
    >>> seen
    [(3, 2)]
    """
    handles = [module.register_forward_pre_hook(hook) for module, hook in (before or {}).items()]
    handles += [module.register_forward_hook(hook) for module, hook in (after or {}).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Arrived(Exception):
    """What a module was given; nothing behind it needs to run."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def given_to(model: nn.Module, module: nn.Module, *inputs: Any) -> Any:
    """What one of a model's modules is given first, in a pass that ends there; None where the pass does not come to it.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    >>> given_to(model, model[1], torch.zeros(3, 2, 2)).shape
    torch.Size([3, 4])
    """

    def stop(_module: nn.Module, given: tuple[Any, ...]) -> None:
        raise _Arrived(given[0])

    try:
        with hooked(before={module: stop}):
            model(*inputs)
    except _Arrived as found:
        return found.value
    return None
