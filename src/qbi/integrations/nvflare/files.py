"""Arrays out of a file of NVFlare's exchange objects (DXO, FLModel, Shareable), without building any object that the file names.

NVFlare's own reader makes objects of classes that a file chooses from a list. This one takes sections and msgpack apart, and knows two types
alone: numpy's arrays (read without pickle) and tensors (safetensors). Everything else in the file is passed over.
"""

import struct
import uuid
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from qbi.errors import DataError, first_line

HEADER = struct.Struct(">BBQ")
MAIN, IDENTITY = 100, 16
LARGEST = 2**33
DEEPEST = 64
TYPE, DATA = "__fobs_type__", "__fobs_data__"


def load_exchange(path: Path) -> dict[str, Tensor]:
    """The model in such a file: the largest group of named arrays in it."""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path}: larger than {LARGEST // 2**30} GiB; no model of an exchange is.")
        main, parts = _sections(path.read_bytes())
        document = msgpack.unpackb(main, strict_map_key=False, raw=False)
        groups = list(_groups(document, parts, 0))
    except DataError:
        raise
    except Exception as problem:  # a damaged or hostile file can make a reader fail in any way
        raise DataError(f"{path}: not a readable exchange object of NVFlare ({first_line(problem)}).") from problem
    if not groups:
        raise DataError(f"{path}: no named arrays in it; give a DXO, FLModel or Shareable with a model.")
    return max(groups, key=len)


def _sections(content: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The main one, and large values by their identity."""
    main, parts, place = b"", {}, 0
    while place < len(content):
        marker, _kind, size = HEADER.unpack_from(content, place)
        place += HEADER.size
        body = content[place : place + size]
        if len(body) != size or (place == HEADER.size) != (marker == MAIN):
            raise ValueError("its sections do not fit its length")
        place += size
        if marker == MAIN:
            main = body
        else:
            parts[str(uuid.UUID(bytes=body[:IDENTITY]))] = body[IDENTITY:]
    return main, parts


def _groups(node: Any, parts: Mapping[str, bytes], depth: int) -> Iterator[dict[str, Tensor]]:
    if depth > DEEPEST:
        raise ValueError("its parts hold each other")
    if isinstance(node, dict):
        arrays = {str(n): a for n, v in node.items() if (a := _array(v, parts)) is not None}
        if arrays:
            yield arrays
        for value in node.values():
            yield from _groups(value, parts, depth + 1)
    elif isinstance(node, list):
        for value in node:
            yield from _groups(value, parts, depth + 1)


def _array(node: Any, parts: Mapping[str, bytes]) -> Tensor | None:
    kind = node.get(TYPE) if isinstance(node, dict) else None
    if kind not in ("numpy.ndarray", "torch.Tensor"):
        return None
    held = node[DATA]
    content = held.get("data") if isinstance(held, dict) else held
    if isinstance(content, dict):
        content = parts[str(content[DATA]["data"]["datum_id"])]
    if not isinstance(content, bytes):
        raise ValueError("an array that was sent apart is not in the file")
    if kind == "torch.Tensor":
        (value,) = load(content).values()
        return value
    return torch.from_numpy(np.load(BytesIO(content), allow_pickle=False))
