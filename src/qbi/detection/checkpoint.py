"""Read the parameters of a checkpoint without running anything in it."""

import pickle
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from qbi.errors import DataError


def load_parameters(path: Path) -> dict[str, Tensor]:
    """Tensors by name, from safetensors or from a .pt file of tensors only; pickled code is refused."""
    if not path.is_file():
        raise DataError(f"{path}: no such file. Give a safetensors or a .pt checkpoint.")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise DataError(
            f"{path}: it holds more than tensors, and is not opened. Save a state_dict, or use safetensors."
        ) from problem
    except Exception as problem:
        # A damaged or hostile file can make a reader fail in any way; whatever it raised, the file is what is wrong.
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        raise DataError(f"{path}: not a readable checkpoint ({reason}).") from problem
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: no dictionary of tensors in it, but a {type(loaded).__name__}.")
    return {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
