"""Gram matrices of images under every normalisation, from one pass over their pixels.

The products of all pairs of images, kept apart by channel, are all that any affine map of the channels needs: public
statistics, BatchNorm of a batch and LayerNorm of each sample are three choices of a shift and a scale a channel. So
the pixels are touched once, and every table's cell is a look-up.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int, UInt8
from torch import Tensor

CENTRE = 0.5
"""Taken from [0, 1] pixels before multiplying, so that less cancels when a mean is taken out later."""

COLUMNS = 8192
"""Columns multiplied in float32 before they are added up in float64."""


@dataclass(frozen=True)
class ChannelGrams:
    """For n images: products of each pair and sums of each image, channel by channel, of pixels less `CENTRE`."""

    products: Float[Tensor, "c n n"]
    sums: Float64[Tensor, "c n"]
    positions: int
    """Pixels of one channel, H·W."""

    @property
    def features(self) -> int:
        """Values in one image, M."""
        return self.sums.shape[0] * self.positions


@dataclass(frozen=True)
class View:
    """Images as a layer sees them: (pixel − CENTRE − shift)·scale, a shift and a scale for each channel and image."""

    index: Int[Tensor, " t"]
    shift: Float64[Tensor, "c t"]
    scale: Float64[Tensor, "c t"]


def channel_grams(pixels: UInt8[Tensor, "n c h w"], *, device: str = "cpu") -> ChannelGrams:
    """One pass over the pixels. Memory: n²·c doubles, and one block of columns."""
    count, channels = pixels.shape[:2]
    planes = pixels.reshape(count, channels, -1)
    positions = planes.shape[2]
    products = torch.zeros(channels, count, count, dtype=torch.float64, device=device)
    sums = torch.zeros(channels, count, dtype=torch.float64, device=device)
    for channel in range(channels):
        for start in range(0, positions, COLUMNS):
            block = planes[:, channel, start : start + COLUMNS].to(device).float().div_(255).sub_(CENTRE)
            products[channel] += block @ block.T
            sums[channel] += block.double().sum(1)
    return ChannelGrams(products=products, sums=sums, positions=positions)


def view_gram(source: ChannelGrams, a: View, b: View) -> Float64[Tensor, "a b"]:
    """Inner products of two sets of images as seen: Σ_c α_i·β_j·(G_ij − μ_i·s_j − ν_j·s_i + HW·μ_i·ν_j)."""
    total = torch.zeros(len(a.index), len(b.index), dtype=torch.float64, device=source.sums.device)
    for channel in range(len(source.sums)):
        sum_a, sum_b = source.sums[channel, a.index], source.sums[channel, b.index]
        shift_a, shift_b = a.shift[channel], b.shift[channel]
        products = source.products[channel][a.index[:, None], b.index].double()
        products -= torch.outer(shift_a, sum_b)
        products -= torch.outer(sum_a - source.positions * shift_a, shift_b)
        total += products * torch.outer(a.scale[channel], b.scale[channel])
    return total


def view_sums(source: ChannelGrams, view: View) -> Float64[Tensor, " t"]:
    """The sum of each image's values as seen."""
    sums = source.sums[:, view.index] - source.positions * view.shift
    return (sums * view.scale).sum(0)


def raw_view(source: ChannelGrams, index: Int[Tensor, " t"]) -> View:
    """Pixels in [0, 1] as they are."""
    return fixed_view(source, index, (0.0,) * len(source.sums), (1.0,) * len(source.sums))


def fixed_view(source: ChannelGrams, index: Int[Tensor, " t"], mean: tuple[float, ...], std: tuple[float, ...]) -> View:
    """Normalised with public statistics."""
    shape = (len(mean), len(index))
    shift = torch.tensor(mean, dtype=torch.float64, device=source.sums.device)[:, None] - CENTRE
    scale = 1 / torch.tensor(std, dtype=torch.float64, device=source.sums.device)[:, None]
    return View(index=index, shift=shift.expand(shape), scale=scale.expand(shape))


def batch_norm_view(source: ChannelGrams, batches: Int[Tensor, "k b"], *, eps: float = 1e-5) -> View:
    """Normalised channel by channel with the statistics of each batch, as BatchNorm2d does in training."""
    batch_size = batches.shape[1]
    values = batch_size * source.positions
    mean = source.sums[:, batches].sum(2) / values
    squares = source.products.diagonal(dim1=1, dim2=2)[:, batches].double().sum(2) / values
    scale = (squares - mean**2 + eps).rsqrt()
    return View(
        index=batches.flatten(),
        shift=mean.repeat_interleave(batch_size, 1),
        scale=scale.repeat_interleave(batch_size, 1),
    )


def layer_norm_view(source: ChannelGrams, index: Int[Tensor, " t"], *, eps: float = 1e-5) -> View:
    """Each image normalised over all its values, as LayerNorm over the flattened image does."""
    mean = source.sums[:, index].sum(0) / source.features
    squares = source.products.diagonal(dim1=1, dim2=2)[:, index].double().sum(0) / source.features
    scale = (squares - mean**2 + eps).rsqrt()
    shape = (len(source.sums), len(index))
    return View(index=index, shift=mean.expand(shape), scale=scale.expand(shape))
