"""Between NVFlare's exchange objects and named tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable
from torch import Tensor

from qbi.private.allowed import NotReleased

MODELS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)


def exchanged(shareable: Shareable) -> DXO | None:
    """The exchange object inside, or none: an empty message, or one of another kind."""
    try:
        return from_shareable(shareable)
    except (ValueError, AttributeError):
        return None


def tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arrays by name, as tensors of their own; raises where something else than an array is among them."""
    out = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise NotReleased("nvflare: an array's name is no text.")
        if isinstance(value, Tensor):
            out[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            continue
        if not isinstance(value, np.ndarray | np.generic):
            raise NotReleased(f"nvflare: “{name}” is a {type(value).__name__}, not an array.")
        try:
            out[name] = torch.from_numpy(np.array(value, order="C"))
        except TypeError as problem:
            raise NotReleased(f"nvflare: “{name}” has a type that no model has ({value.dtype}).") from problem
    return out


def like(values: Mapping[str, Tensor], example: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as the server sent them: as numpy's arrays, or as they are. In one order of memory, which a wire tells."""
    as_tensors = any(isinstance(v, Tensor) for v in example.values())
    return {n: v if as_tensors else v.numpy() for n, v in ((n, v.contiguous()) for n, v in values.items())}
