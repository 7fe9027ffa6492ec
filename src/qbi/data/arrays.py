"""Inputs and targets from a file of arrays. Nothing is unpickled."""

from pathlib import Path

from torch import Tensor

from qbi.data.checkpoint import load_parameters
from qbi.errors import DataError

ARRAYS = (".npz", ".safetensors", ".pt")


def read_arrays(path: Path) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """`x` (or x0, x1 … for several inputs) and, if there are targets, `y`."""
    found = load_parameters(path)
    names = ["x"] if "x" in found else sorted(n for n in found if n.startswith("x") and n[1:].isdigit())
    if not names:
        raise DataError(f"{path}: it holds {', '.join(found) or 'nothing'}; the inputs must be called x (or x0, x1 …).")
    for name in (*names, "y"):
        if name in found and found[name].dim() == 0:
            raise DataError(f"{path}: {name} is a single number; it must hold one row for each sample.")
    targets = found.get("y")
    return tuple(_usable(found[name]) for name in names), None if targets is None else _usable(targets)


def _usable(array: Tensor) -> Tensor:
    """Floats as float32, whole numbers as long."""
    return array.float() if array.is_floating_point() else array.long()
