"""CIFAR-10 as published: Python-2 pickles (through an unpickler that can build arrays and nothing else), the
binary version, or a folder of images by class."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qbi.data.tree import files
from qbi.errors import DataError
from qbi.records import ImageData

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.247, 0.243, 0.261)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGE_BYTES = 3 * 32 * 32

_PICKLE_NAMES = {f"data_batch_{i}" for i in range(1, 6)} | {"test_batch"}
_BINARY_NAMES = {f"{name}.bin" for name in _PICKLE_NAMES}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays and plain containers; anything else in the file is refused before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
        }:
            return _reconstruct
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        raise DataError(f"the pickle asks for {module}.{name}; only arrays are allowed. Do not trust this file.")


def _reconstruct(kind: type, shape: tuple[int, ...], _code: bytes) -> np.ndarray:
    """What numpy's pickles call to make an empty array before its state is set."""
    if kind is not np.ndarray:
        raise DataError("the pickle asks for an array of a foreign kind. Do not trust this file.")
    return np.ndarray.__new__(np.ndarray, shape, np.dtype("b"))


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into a pickle that Python 2 can read."""
    if encoding != "latin1":
        raise DataError(f"the pickle asks for bytes in {encoding!r}. Do not trust this file.")
    return text.encode("latin-1")


def load_cifar10(root: Path) -> ImageData:
    """All images found, training batches first."""
    found = {name.rsplit("/", 1)[-1]: content for name, content in files(root, _wanted)}
    if not found:
        raise DataError(f"{root}: no CIFAR-10 batches here (data_batch_1 … test_batch, or the same with .bin).")
    pixels, labels = [], []
    for name in sorted(found):
        x, y = _binary(found[name], name) if name.endswith(".bin") else _pickled(found[name], f"{root}: {name}")
        pixels.append(x)
        labels.append(y)
    stacked = np.concatenate(pixels).reshape(-1, 3, 32, 32)
    return ImageData(
        name="CIFAR-10",
        pixels=torch.from_numpy(stacked),
        labels=torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        classes=CLASSES,
        mean=MEAN,
        std=STD,
    )


def _wanted(name: str) -> bool:
    return name.rsplit("/", 1)[-1] in _PICKLE_NAMES | _BINARY_NAMES


def _pickled(content: bytes, place: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except DataError as problem:
        raise DataError(f"{place}: {problem}") from None
    except Exception as problem:
        # A damaged pickle can fail in any way; whatever it raised, the file is what is wrong.
        raise DataError(f"{place}: damaged or truncated ({type(problem).__name__}); fetch it again.") from problem
    if not isinstance(batch, dict) or b"data" not in batch or b"labels" not in batch:
        raise DataError(f"{place}: not a CIFAR-10 batch (no data and labels in it).")
    data, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != IMAGE_BYTES or len(labels) != len(data):
        raise DataError(
            f"{place}: data of shape {data.shape} and {len(labels)} labels; expected n×{IMAGE_BYTES} bytes."
        )
    return data, labels


def _binary(content: bytes, place: str) -> tuple[np.ndarray, np.ndarray]:
    if not content or len(content) % (IMAGE_BYTES + 1):
        raise DataError(
            f"{place}: {len(content)} bytes are no whole number of records of {IMAGE_BYTES + 1}; fetch it again."
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, IMAGE_BYTES + 1)
    return records[:, 1:], records[:, 0]
