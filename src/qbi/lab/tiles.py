"""Pictures side by side, as a file that a page shows."""

import io
from pathlib import Path

from PIL import Image
from torch import Tensor

from qbi.files import write_atomically


def save_tiles(path: Path, tiles: Tensor, scale: int = 1) -> None:
    """A grid of pictures (rows, columns, channels, height, width) with values from 0 to 1, as a PNG."""
    rows, columns, _, high, wide = tiles.shape
    grid = (tiles.clamp(0, 1) * 255).round().byte().permute(0, 3, 1, 4, 2).reshape(rows * high, columns * wide, 3)
    image = Image.fromarray(grid.numpy())
    if scale > 1:
        image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    write_atomically(path, written.getvalue())
