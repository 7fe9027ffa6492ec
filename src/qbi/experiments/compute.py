"""From a cell to its result, in whatever process: the one function that workers run."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from qbi.errors import BadValue
from qbi.experiments import image_cells, prepared, text_cells
from qbi.experiments.cells import Cell, Result
from qbi.experiments.federation_cells import federation_cell
from qbi.experiments.synthetic_cells import synthetic_cell


@dataclass(frozen=True)
class Workplace:
    """Where a worker finds prepared data, and where it computes."""

    folders: Mapping[str, Path]
    device: str = "cpu"


def compute(cell: Cell, place: Workplace) -> tuple[Result, float]:
    """The result and the seconds it took.

    One thread a cell, however many workers there are: sums in another order would change the last digits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        result = _dispatch(cell, place)
    finally:
        torch.set_num_threads(threads)
    return result, time.perf_counter() - started


def _dispatch(cell: Cell, place: Workplace) -> Result:
    if cell.item == "synthetic":
        return synthetic_cell(cell, place.device)
    if cell.item == "imdb":
        texts = prepared.open_texts(place.folders["imdb"])
        if cell.route == "gram":
            return text_cells.text_cell(cell, texts, place.device)
        return text_cells.real_text_cell(cell, texts, place.device)
    if cell.item == "federation":
        return federation_cell(cell, prepared.open_images(place.folders["cifar10"], "cpu").data)
    name, _, question = cell.item.partition("-")
    if name not in ("imagenet", "cifar10"):
        raise BadValue(f"reproduce: no item is called {cell.item!r}.")
    images = prepared.open_images(place.folders[name], place.device)
    if question == "normalisation":
        if cell.route == "gram":
            return image_cells.normalisation_cell(cell, images.data, images.grams)
        return image_cells.real_normalisation_cell(cell, images.data, images.grams, place.device)
    if cell.route == "gram":
        return image_cells.attack_cell(cell, images.data, images.grams)
    return image_cells.real_attack_cell(cell, images.data, images.grams, place.device)
