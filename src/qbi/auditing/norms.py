"""A batch norm right behind a layer: it takes the batch's mean off, and with it the gradient of the layer's bias.

What comes back to a row adds up to nothing, so quotients of rows mean nothing. But the norm's own shift has a gradient, and it is the sum of
what arrives behind the norm. A server that makes its rows so small that their variance is far below the norm's ε, and makes up for
it in the norm's scale, turns the norm into the subtraction of a mean: a row with one position then holds that position minus the batch's
mean, and the gradient of the shift says how often.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qbi.calling import Hook, as_client, hooked
from qbi.carrier import NormBehind

BatchNorm = nn.modules.batchnorm._BatchNorm


def norm_behind(model: nn.Module, layer: str, inputs: tuple[Tensor, ...]) -> NormBehind | None:
    """The batch norm that a layer's output goes straight into, if its scale and shift are trained.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    >>> norm_behind(model, "0", (torch.rand(5, 3),)).layer
    '1'
    """
    norms: dict[nn.Module, str] = {m: n for n, m in model.named_modules() if isinstance(m, BatchNorm) and _is_usable(m)}
    if not norms:
        return None
    last: list[Tensor] = []
    found: list[tuple[str, int]] = []

    def before_norm(module: nn.Module, given: tuple[Any, ...]) -> None:
        start = _place(last[-1], given[0]) if last else None
        if start is not None:
            found.append((norms[module], start))

    after: dict[nn.Module, Hook] = {model.get_submodule(layer): lambda _m, _i, out: last.append(out.detach())}
    try:
        with (
            hooked(before=dict.fromkeys(norms, before_norm), after=after),
            as_client(model, train=False),
            torch.no_grad(),
        ):
            model(*inputs)
    except (RuntimeError, ValueError, TypeError):
        return None
    return NormBehind(*found[0], tuple(found[1:])) if found and len(last) == 1 else None


def _is_usable(norm: Any) -> bool:
    return bool(norm.affine and norm.weight.requires_grad and norm.bias.requires_grad and norm.training)


def _place(products: Tensor, given: Tensor) -> int | None:
    """Where in a norm's channels a layer's products stand, moved to the front; None where they do not."""
    rows = products.shape[-1]
    if given.dim() < 2 or given.shape[1] < rows or products.numel() * given.shape[1] != given.numel() * rows:
        return None
    ours = products.reshape(-1, rows)
    theirs = given.movedim(1, -1).reshape(-1, given.shape[1])
    first = torch.isclose(theirs, ours[:, :1], rtol=1e-4, atol=1e-6).all(0)
    for start in first[: given.shape[1] - rows + 1].nonzero()[:, 0].tolist():
        if torch.allclose(ours, theirs[:, start : start + rows], rtol=1e-4, atol=1e-6):
            return int(start)
    return None
