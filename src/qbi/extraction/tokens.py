"""From embedded samples back to tokens: the nearest row of the embedding table the server sent."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def nearest_tokens(
    samples: Float[Tensor, "k m"], table: Float[Tensor, "v d"], *, block: int = 2048
) -> Int[Tensor, "k t"]:
    """The token whose embedding lies nearest to each position of each sample."""
    positions = samples.reshape(-1, table.shape[1])
    half_norms = table.square().sum(1) / 2
    parts = [(part.to(table.dtype) @ table.T - half_norms).argmax(1) for part in positions.split(block)]
    found = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=samples.device)
    return found.reshape(samples.shape[0], -1)


def tokens_moved(gradient: Float[Tensor, "v d"]) -> Bool[Tensor, " v"]:
    """Which tokens stand in a batch: the rows of a trained embedding that got a gradient."""
    return (gradient != 0).any(1)


SPAN_TOLERANCE = 1e-3


def tokens_spanned(gradient: Float[Tensor, "n d"], table: Float[Tensor, "v d"]) -> Bool[Tensor, " v"] | None:
    """Which rows of a frozen embedding lie in what the gradient of the first layer spans, as DAGER (Petrov et al.) tests it.

    The layer sees positions one by one, so its gradient is a sum over positions, and its rows span the embedded tokens.
    None where they span everything, and nothing can be told.
    """
    _, values, rows = torch.linalg.svd(gradient.double(), full_matrices=False)
    rank = int((values > 1e-6 * values[0]).sum())
    if rank >= table.shape[1]:
        return None
    unit = table.double() / table.double().norm(dim=1, keepdim=True).clamp_min(1e-300)
    inside: Tensor = (unit @ rows[:rank].T).square().sum(1)
    return (1 - inside).clamp_min(0).sqrt() < SPAN_TOLERANCE
