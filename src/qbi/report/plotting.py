"""Plots, by an extra: an audit and a private step need none."""

import io
from typing import Any

from qbi.errors import MissingExtra


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise MissingExtra("matplotlib", "lab") from problem
    return Figure(figsize=(width, height), layout="constrained")


def picture_of(figure: Any, kind: str = "png", dpi: int = 110) -> bytes:
    """A figure as the bytes of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=dpi)
    return buffer.getvalue()
