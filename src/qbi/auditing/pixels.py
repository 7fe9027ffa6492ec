"""Images as the model takes them, and what of their range is known: shared by those who make pictures."""

import torch
from torch import Tensor

from qbi.auditing.samples import Samples
from qbi.errors import BadValue


def pixel_range(samples: Samples) -> tuple[Tensor, Tensor]:
    """Black and white, as the model takes them."""
    if samples.images is None:
        raise BadValue(f"{samples.name}: it holds no images, so nobody knows what is black and what is white in it.")
    black, white = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    if samples.raw:
        return black, white
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (samples.images.mean, samples.images.std))
    return (black - mean) / std, (white - mean) / std
