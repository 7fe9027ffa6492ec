"""Between stored pixels and what a model sees."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.records import ImageData


def unit_pixels(data: ImageData, indices: Int[Tensor, " b"] | slice) -> Float[Tensor, "b c h w"]:
    """Pixels as float32 in [0, 1]."""
    return data.pixels[indices].float().div_(255)


def normalised(data: ImageData, indices: Int[Tensor, " b"] | slice) -> Float[Tensor, "b c h w"]:
    """Pixels with the domain's public mean and standard deviation taken out."""
    mean, std = _statistics(data)
    return unit_pixels(data, indices).sub_(mean).div_(std)


def denormalised(data: ImageData, samples: Float[Tensor, "b m"]) -> Float[Tensor, "b c h w"]:
    """Back to [0, 1] pixels, unclipped."""
    mean, std = _statistics(data)
    return samples.reshape(len(samples), *data.shape).cpu().float() * std + mean


def _statistics(data: ImageData) -> tuple[Tensor, Tensor]:
    return torch.tensor(data.mean).view(-1, 1, 1), torch.tensor(data.std).view(-1, 1, 1)
