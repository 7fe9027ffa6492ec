"""Data sets of the Hugging Face hub, or saved by its library, through the `hf` extra."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qbi.data.decode import centre_crop
from qbi.data.folder import IMAGENET_MEAN, IMAGENET_STD
from qbi.errors import DataError, MissingExtra, first_line
from qbi.records import ImageData

PREFIX = "hf:"


def load_hub_images(name: str, *, size: int, limit: int) -> ImageData:
    """The first `limit` images of a data set, cropped to the centre."""
    table = _open(name, limit)
    column = _column(table, name, lambda value: isinstance(value, Image.Image), "image")
    fit = centre_crop(size, size)
    pixels = [np.asarray(fit(picture.convert("RGB"))).transpose(2, 0, 1) for picture in table[column]]
    labels, classes = _labels(table)
    return ImageData(
        name, torch.from_numpy(np.stack(pixels)), torch.tensor(labels), classes, IMAGENET_MEAN, IMAGENET_STD
    )


def _open(name: str, limit: int) -> Any:
    try:
        import datasets
    except ImportError as problem:
        raise MissingExtra("datasets", "hf") from problem
    try:
        saved = Path(name).is_dir()
        table = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split="train")
    except Exception as problem:
        # The library raises what its back ends raise: connection errors, missing files, bad names.
        raise DataError(f"hf:{name}: it cannot be loaded ({first_line(problem)}).") from problem
    if len(table) == 0:
        raise DataError(f"hf:{name}: the data set is empty.")
    return table.select(range(min(limit, len(table))))


def _column(table: Any, name: str, wanted: Any, kind: str) -> str:
    for column, value in table[0].items():
        if wanted(value):
            return str(column)
    raise DataError(f"hf:{name}: no {kind} column; its columns are {', '.join(table.column_names)}.")


def _labels(table: Any) -> tuple[list[int], tuple[str, ...]]:
    if "label" not in table.column_names:
        return [0] * len(table), ("all",)
    labels = [int(label) for label in table["label"]]
    names = getattr(table.features["label"], "names", None) or [str(i) for i in range(max(labels) + 1)]
    return labels, tuple(names)
