"""Between Flower's records and named tensors, integer buffers included."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord
from safetensors.torch import save
from torch import Tensor

from qbi.detection.checkpoint import load_parameters
from qbi.errors import DataError
from qbi.files import write_atomically


def state_of(arrays: ArrayRecord) -> dict[str, Tensor]:
    """The arrays by name, whatever their type; scalars and whole numbers stay what they are."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


def arrays_of(state: dict[str, Tensor]) -> ArrayRecord:
    """Named tensors as a record to send."""
    return ArrayRecord({name: value.detach().cpu().contiguous() for name, value in state.items()})


def save_arrays(arrays: ArrayRecord, path: Path) -> None:
    """A record as safetensors, which `qbi replay` and `qbi inspect` read."""
    write_atomically(path, save({n: v.contiguous() for n, v in state_of(arrays).items()}))


def load_arrays(path: Path) -> ArrayRecord:
    """A parameter file that a deployment left behind (.safetensors, .npz, .pt), as a record."""
    return arrays_of(load_parameters(path))


def difference_of(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights sent minus weights received, for what has a fraction."""
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())[0]
        raise DataError(f"reply: {odd} stands on one side only; the client trained another model.")
    out = {}
    for name, value in before.items():
        if value.shape != after[name].shape:
            raise DataError(f"reply: {name} came back as {tuple(after[name].shape)} instead of {tuple(value.shape)}.")
        if value.is_floating_point():
            out[name] = value.float() - after[name].float()
    return out
