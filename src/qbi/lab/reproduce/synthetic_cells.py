"""Cells on Gaussian noise, for which the closed forms are meant.

For noise the Gram view can be turned round: given the rows W, the activations of a noise sample are N(0, WWᵀ), and
WWᵀ is a Wishart matrix whose factor can be drawn directly (Bartlett). So neither weights nor samples are needed.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from qbi.attacks import QBI
from qbi.lab.reproduce.cells import BATCHES, Cell, Result, mean_over
from qbi.randomness import generator
from qbi.theory import optimal_bias

FEATURES = 3 * 32 * 32


def synthetic_cell(cell: Cell, device: str) -> Result:
    """QBI on ten batches of noise of CIFAR-10's shape, one initialisation a cell."""
    draws = generator(cell.seed_for("noise"), device=device)
    samples = BATCHES * cell.batch_size
    if cell.route == "gram":
        factor = wishart_factor(cell.neurons, FEATURES, draws).float()
        noise = torch.randn(cell.neurons, samples, generator=draws, device=device)
        z = factor @ noise
    else:
        rows = torch.randn(cell.neurons, FEATURES, generator=draws, device=device)
        z = rows @ torch.randn(FEATURES, samples, generator=draws, device=device)
    batches = torch.arange(samples, device=device).reshape(BATCHES, cell.batch_size)
    return {QBI.key: mean_over(z > -optimal_bias(cell.batch_size, FEATURES), batches)}


def wishart_factor(size: int, freedom: int, generator: torch.Generator) -> Float64[Tensor, "size size"]:
    """A lower triangular L such that LLᵀ has the law of WWᵀ for a size×freedom standard normal W (Bartlett)."""
    below = torch.randn(size, size, generator=generator, device=generator.device, dtype=torch.float64).tril(-1)
    degrees = freedom - torch.arange(size, dtype=torch.float64, device=generator.device)
    # χ²_k is twice a gamma variable of shape k/2.
    chi2 = 2 * torch._standard_gamma(degrees / 2, generator=generator)
    return below + torch.diag(chi2.sqrt())
