"""Experts: one matrix for each, all in one weight, and vectors sorted by the expert that they go to."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qbi.uses.operations import operation
from qbi.uses.sites import Following
from qbi.uses.watcher import Watcher

FUNCTIONS = [f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None]


@operation(*FUNCTIONS)
def grouped(watcher: Watcher, input: Tensor, weight: Tensor, *, offs: Tensor | None = None, **options: Any) -> Any:
    """x·W of each expert by itself; `offs` says where its vectors end."""
    plain = input.dim() == 2 and weight.dim() == 3 and all(v is None for v in options.values())
    if not isinstance(watcher, Following) or offs is None or not plain:
        return NotImplemented
    ends = [int(end) for end in offs]
    with watcher:
        parts = [input[start:end] @ own for start, end, own in zip([0, *ends], ends, weight.unbind(0), strict=False)]
        return torch.cat(parts)
