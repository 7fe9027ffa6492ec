"""Operations that only rearrange a tensor: whose result holds the same numbers in other places.

A weight that is transposed, cut or cast before it is used is still that weight. Where its numbers went is found by
doing the same to the numbers of their places.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

REARRANGING: frozenset[Callable[..., Any]] = frozenset(
    function
    for function in (
        Tensor.t,
        torch.t,
        getattr(Tensor.T, "__get__"),  # noqa: B009
        getattr(Tensor.mT, "__get__"),  # noqa: B009
        Tensor.transpose,
        torch.transpose,
        Tensor.swapaxes,
        Tensor.permute,
        torch.permute,
        Tensor.movedim,
        torch.movedim,
        Tensor.view,
        Tensor.reshape,
        torch.reshape,
        Tensor.flatten,
        torch.flatten,
        Tensor.unflatten,
        torch.unflatten,
        Tensor.squeeze,
        torch.squeeze,
        Tensor.unsqueeze,
        torch.unsqueeze,
        Tensor.chunk,
        torch.chunk,
        Tensor.split,
        torch.split,
        Tensor.unbind,
        torch.unbind,
        Tensor.narrow,
        torch.narrow,
        Tensor.select,
        torch.select,
        Tensor.__getitem__,
        Tensor.contiguous,
        Tensor.clone,
        torch.clone,
        Tensor.expand,
    )
)
"""Functions that may be run on the numbers of places just as on the weight."""

CASTING: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type_as, Tensor.cpu, Tensor.cuda)
)
"""Functions that leave every number where it is."""


def places(function: Callable[..., Any], index: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where the numbers of a rearranged weight stood; None where the function does more than that."""
    if function in CASTING:
        return index
    if function in REARRANGING:
        return function(index, *args[1:], **kwargs)
    return None
