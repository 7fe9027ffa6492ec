"""SSIM, PSNR and L1, one value per sample (a batch's PSNR is infinite as soon as one image is exact)."""

import torch
from jaxtyping import Float
from torch import Tensor


def ssim(
    images: Float[Tensor, "n c h w"], truth: Float[Tensor, "n c h w"], *, data_range: float
) -> Float[Tensor, " n"]:
    """Structural similarity of each image, by torchmetrics."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    values = structural_similarity_index_measure(images, truth, data_range=data_range, reduction="none")
    assert isinstance(values, Tensor)
    return values.reshape(len(images))


def psnr(samples: Float[Tensor, "n ..."], truth: Float[Tensor, "n ..."], *, data_range: float) -> Float[Tensor, " n"]:
    """Peak signal-to-noise ratio of each sample in dB; infinite where it is exact."""
    errors = (samples.double() - truth.double()).square().flatten(1).mean(1)
    return (10 * torch.log10(data_range**2 / errors)).to(truth.dtype)


def l1(samples: Float[Tensor, "n ..."], truth: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Mean absolute difference of each sample."""
    return (samples - truth).abs().flatten(1).mean(1)
