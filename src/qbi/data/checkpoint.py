"""Read the parameters of a checkpoint without running anything in it."""

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from qbi.errors import DataError, first_line


def load_parameters(path: Path | str) -> dict[str, Tensor]:
    """Tensors by name, from safetensors, .npz, or a .pt file of tensors only; pickled code is refused."""
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path}: a folder, not a checkpoint. Give a .safetensors, .npz or .pt file.")
    if not path.is_file():
        raise DataError(f"{path}: no such file. Give a .safetensors, .npz or .pt checkpoint.")
    _refuse_bombs(path)
    try:
        if path.suffix == ".safetensors":
            loaded: object = load_file(path)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                loaded = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise DataError(
            f"{path}: it holds more than tensors, and is not opened. Save a state_dict, or use safetensors."
        ) from problem
    except Exception as problem:
        # A damaged or hostile file can make a reader fail in any way; whatever it raised, the file is what is wrong.
        raise DataError(f"{path}: not a readable checkpoint ({first_line(problem)}).") from problem
    try:
        tensors = dict(_tensors(loaded, "", 0))
    except RecursionError:
        raise DataError(f"{path}: its dictionaries hold each other; save a plain state_dict.") from None
    if sum(map(len, tensors)) > MOST_NAMES:
        raise DataError(
            f"{path}: its names are {sum(map(len, tensors)):,} characters long; this is no checkpoint of a model."
        )
    _check_layouts(path, tensors)
    if not tensors:
        raise DataError(f"{path}: no named tensors in it, so there is nothing to inspect. Save a state_dict.")
    return tensors


DEEPEST = 32
"""Dictionaries inside dictionaries."""
MOST_NAMES = 2**20
"""Characters of all names together."""

MOST_UNPACKED = 2**31
"""Bytes that compressed arrays, or tensors that repeat what the file holds once, may grow to."""
LIMIT = f"{MOST_UNPACKED // 2**30} GiB"


def _refuse_bombs(path: Path) -> None:
    """What a compressed file says it unpacks to, before any of it is unpacked."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(i.file_size for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED)
    except (zipfile.BadZipFile, OSError, ValueError):
        return  # not readable; the reader of its kind says so
    if unpacked > MOST_UNPACKED:
        raise DataError(
            f"{path}: {path.stat().st_size:,} bytes unpack to {unpacked:,}; at most {LIMIT} are unpacked. "
            "Save fewer samples, or save them uncompressed (np.savez, safetensors)."
        )


def _check_layouts(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Only what lies in the file as plain numbers is taken."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = (
                str(tensor.layout)
                if tensor.layout is not torch.strided
                else "quantised"
                if tensor.is_quantized
                else "empty (meta)"
            )
            raise DataError(
                f"{path}: {name} is {kind.removeprefix('torch.')}; save plain numbers (tensor.to_dense(), "
                "tensor.dequantize())."
            )
        size = tensor.numel() * tensor.element_size()
        if size > MOST_UNPACKED and size > tensor.untyped_storage().nbytes():
            raise DataError(
                f"{path}: {name} repeats {tensor.untyped_storage().nbytes():,} bytes to {size:,}; at most {LIMIT} are "
                "taken. Save its values themselves (tensor.contiguous())."
            )


def _tensors(loaded: object, prefix: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a dictionary and of dictionaries inside it, however a training script nested them."""
    if not isinstance(loaded, dict):
        return
    if depth > DEEPEST:
        raise RecursionError
    for name, value in loaded.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Tensor):
            yield path, value
        else:
            yield from _tensors(value, path, depth + 1)
