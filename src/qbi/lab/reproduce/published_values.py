"""The paper's numbers, as the package carries them."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def published(name: str) -> dict[str, Any]:
    """One table of the paper, by the name of its file."""
    text = files("qbi.lab.reproduce").joinpath("published", f"{name}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def published_cell(name: str, neurons: int, batch_size: int) -> dict[str, Any]:
    """One row of a published table."""
    for cell in published(name)["cells"]:
        if (cell["neurons"], cell["batch_size"]) == (neurons, batch_size):
            return dict(cell)
    raise KeyError(f"{name}: ({neurons}, {batch_size})")
