"""From embedded samples back to tokens: the nearest row of the embedding table the server sent."""

import torch
from jaxtyping import Float, Int
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
