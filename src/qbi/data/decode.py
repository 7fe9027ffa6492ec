"""Image files into one tensor: decoded in parallel, cropped as the paper does, bad files named."""

import io
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from qbi.errors import DataError

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
FILES_AT_A_TIME = 256
MOST_PIXELS, LONGEST_SIDE = 2**26, 2**16
"""Of one image; more is no photo, and decoding it would take all the memory there is."""


@dataclass(frozen=True)
class Decoded:
    """Pixels with the names of the files they came from, and the files that were skipped."""

    pixels: Tensor
    names: tuple[str, ...]
    skipped: tuple[str, ...]


def is_image(name: str) -> bool:
    """Whether the name ends like an image's; hidden files are none."""
    return name.lower().endswith(IMAGE_ENDINGS) and not name.rsplit("/", 1)[-1].startswith(".")


def decode_all(
    source: Iterable[tuple[str, bytes]],
    fit: Callable[[Image.Image], Image.Image],
    *,
    skip_bad: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Decoded:
    """Decode every file, sorted by name. A bad file is an error, or counted when `skip_bad`."""
    names: list[str] = []
    arrays: list[np.ndarray] = []
    skipped: list[str] = []

    def decode(item: tuple[str, bytes]) -> tuple[str, np.ndarray | str]:
        name, content = item
        try:
            with Image.open(io.BytesIO(content)) as image:
                if (
                    math.prod(image.size) > MOST_PIXELS
                    or max(image.size) > LONGEST_SIDE
                    or max(image.size) > 1000 * min(image.size)
                ):
                    return name, f"{image.width}×{image.height} pixels are no photo"
                return name, np.asarray(fit(_eight_bit(image).convert("RGB")))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            return name, str(problem) or type(problem).__name__

    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        # Sizes are checked here, before any pixel is decoded; Pillow's own warning would only say the same.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        for block in _blocks(source):
            for name, result in pool.map(decode, block):
                if isinstance(result, str):
                    if not skip_bad:
                        raise DataError(
                            f"{name}: not a readable image ({_without_address(result)}). Remove it, or skip such files "
                            "with --skip-bad."
                        )
                    skipped.append(name)
                else:
                    names.append(name)
                    arrays.append(result)
                if progress is not None:
                    progress(1)
    if not arrays:
        raise DataError(f"no readable image found ({len(skipped)} skipped).")
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        sizes = ", ".join(f"{w}×{h}" for h, w, _ in sorted(shapes)[:3])
        raise DataError(f"images of different sizes ({sizes}, …); give one size with --size.")
    order = sorted(range(len(names)), key=names.__getitem__)
    pixels = np.empty((len(order), 3, *arrays[0].shape[:2]), dtype=np.uint8)
    for position, index in enumerate(order):
        pixels[position] = arrays[index].transpose(2, 0, 1)
        arrays[index] = arrays[index][:0]
    return Decoded(torch.from_numpy(pixels), tuple(names[i] for i in order), tuple(sorted(skipped)))


def centre_crop(size: int, shorter: int) -> Callable[[Image.Image], Image.Image]:
    """The paper's preprocessing: shorter side to `shorter`, then the central size×size.

    An image that already has the final size is left as it is.
    """

    def fit(image: Image.Image) -> Image.Image:
        if image.size == (size, size):
            return image
        width, height = image.size
        scale = shorter / min(width, height)
        resized = image.resize(
            (max(size, round(width * scale)), max(size, round(height * scale))), Image.Resampling.BILINEAR
        )
        left, top = (resized.width - size) // 2, (resized.height - size) // 2
        return resized.crop((left, top, left + size, top + size))

    return fit


def as_is(image: Image.Image) -> Image.Image:
    """Leave the image as it is."""
    return image


def _blocks(source: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    iterator = iter(source)
    while block := list(islice(iterator, FILES_AT_A_TIME)):
        yield block


def _eight_bit(image: Image.Image) -> Image.Image:
    """Scans of 16 bits in 8; Pillow alone would cut every value above 255 off."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are no 8-bit or 16-bit numbers; save it with 8 bits a channel")
    return image


def _without_address(message: str) -> str:
    """Pillow names unreadable content by its memory address; that helps nobody."""
    return "unknown format" if "cannot identify image file" in message else message
