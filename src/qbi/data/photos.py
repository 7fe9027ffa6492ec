"""Synthetic photos: occluding shapes of all sizes ("dead leaves"), shaded, over a gradient.

Shapes whose sizes follow a power law and that hide one another give images the statistics that matter here: a
spectrum close to 1/f, strong correlation between neighbours and channels, and samples of very different contrast.
They need no download, look like something, and are the same for the same seed.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from qbi.errors import BadValue, require_positive
from qbi.records import ImageData

SHAPES = 70
"""Shapes a photo; enough to hide the background in most places."""

SMALLEST, LARGEST = 0.04, 0.6
"""Radii as a share of the image side."""

IMAGES_AT_A_TIME = 32

MEAN = (0.518, 0.508, 0.498)
STD = (0.233, 0.229, 0.234)
"""Channel statistics of 5,000 photos of 64×64 (seed 1), the "public" statistics of this domain."""

CLASSES = ("round", "square", "pointed")


MOST_PIXELS = 2**29
"""Pixels that are painted at the most: a gibibyte and a half of bytes."""


def synthetic_photos(count: int, size: int = 64, *, seed: int = 0) -> ImageData:
    """`count` photos of size×size pixels in three channels; the label is the form of the front shape."""
    require_positive("synthetic photos", count=count, size=size)
    if count * size**2 > MOST_PIXELS:
        raise BadValue(
            f"synthetic photos: {count:,} of {size}×{size} are more than fit; ask for smaller batches or smaller pictures, or give data."
        )
    generator = torch.Generator().manual_seed(seed)
    # Uniform numbers only: the first photos are the same however many are asked for.
    numbers = torch.rand(count, SHAPES + 1, 12, generator=generator)
    parts = [_paint(block, size) for block in numbers.split(IMAGES_AT_A_TIME)]
    labels = (numbers[:, -1, 4] * 3).long().clamp_max(2)
    return ImageData(
        name=f"synthetic photos {size}×{size}",
        pixels=torch.cat(parts),
        labels=labels,
        classes=CLASSES,
        mean=MEAN,
        std=STD,
    )


def _paint(numbers: Float[Tensor, "n s 12"], size: int) -> UInt8[Tensor, "n 3 size size"]:
    axis = (torch.arange(size) + 0.5) / size
    y, x = axis[:, None].expand(size, size), axis[None, :].expand(size, size)
    top, bottom = _colour(numbers[:, 0, 0:3]), _colour(numbers[:, 0, 3:6])
    canvas = torch.lerp(top[:, :, None, None], bottom[:, :, None, None], y)
    exposure = 0.25 + 0.85 * numbers[:, 0, 6].sqrt()
    for leaf in numbers[:, 1:].unbind(1):
        canvas = _lay(canvas, leaf, x, y)
    contrast = 0.35 + 0.75 * numbers[:, 0, 7]
    lit = (canvas - 0.5) * contrast[:, None, None, None] + 0.5 * exposure[:, None, None, None] + 0.1
    return lit.clamp(0, 1).mul(255).round().to(torch.uint8)


def _lay(canvas: Tensor, leaf: Float[Tensor, "n 12"], x: Tensor, y: Tensor) -> Tensor:
    """Put one shape on top of each photo: a rotated superellipse, shaded across."""
    radius = (SMALLEST**-2 + leaf[:, 0] * (LARGEST**-2 - SMALLEST**-2)) ** -0.5
    angle = leaf[:, 1] * 2 * torch.pi
    stretch = 0.5 + leaf[:, 2]
    form = torch.tensor([2.0, 8.0, 1.0])[(leaf[:, 4] * 3).long().clamp_max(2)]
    cos, sin = (torch.cos(angle) / radius)[:, None, None], (torch.sin(angle) / radius)[:, None, None]
    dx = x - (1.2 * leaf[:, 5, None, None] - 0.1)
    dy = y - (1.2 * leaf[:, 6, None, None] - 0.1)
    u = (dx * cos + dy * sin) / stretch[:, None, None]
    v = (dy * cos - dx * sin) * stretch[:, None, None]
    power = form[:, None, None]
    inside = (u.abs() ** power + v.abs() ** power < 1)[:, None]
    shading = (0.35 * (leaf[:, 7, None, None] - 0.2) * v)[:, None]
    return torch.where(inside, _colour(leaf[:, 8:11])[:, :, None, None] + shading, canvas)


def _colour(numbers: Float[Tensor, "n 3"]) -> Float[Tensor, "n 3"]:
    """A brightness and two small opposing tints: channels of natural colours agree mostly."""
    brightness, warm, green = numbers[:, 0], 0.3 * (numbers[:, 1] - 0.45), 0.16 * (numbers[:, 2] - 0.5)
    return torch.stack([brightness + warm, brightness + green, brightness - warm], 1)
