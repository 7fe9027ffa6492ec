"""Imprint, "Robbing the Fed" (Fowl et al.): equal rows, biases at quantiles, and neighbouring rows subtracted.

Every row measures the same scalar of a sample; its bias lets the samples above one quantile pass. Two neighbours differ
by the samples between their quantiles, so their difference isolates a sample although each row holds many. Needed here
to judge defences fairly: rules that look at single rows do not see it.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.special import ndtri
from torch import Tensor, nn

from qbi.attacks.mount import Mounted
from qbi.errors import CannotMount, require_positive
from qbi.extraction.read import read_rows
from qbi.records import Candidates, CraftedRows


@dataclass(frozen=True)
class Imprint:
    """Rows that all measure the mean of a sample, biases at the quantiles of a normal law of the measurements.

    `mean` and `std` are those of the measurement over the domain, in units of the sample's values.
    """

    mean: float = 0.0
    std: float = 1.0
    name: str = "imprint"

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Row n fires for samples whose mean exceeds the n-th quantile."""
        require_positive(self.name, neurons=neurons, features=features)
        weight = torch.full((neurons, features), 1 / features, device=generator.device)
        levels = torch.arange(1, neurons + 1, dtype=torch.float64) / (neurons + 1)
        quantiles = torch.from_numpy(ndtri(levels.numpy())) * self.std + self.mean
        # Mounting scales rows by 1/√M; the measurement is kept at a size that float32 resolves.
        size = math.sqrt(features)
        return CraftedRows(weight * size, (-quantiles * size).float().to(generator.device))


def equalise_head(mounted: Mounted) -> None:
    """Give every neuron the same outgoing weights, in place, so that all rows back-propagate one coefficient a sample."""
    target = mounted.target
    linear = [(n, m) for n, m in mounted.model.named_modules() if isinstance(m, nn.Linear)]
    names = [name for name, _ in linear]
    for _, layer in linear[names.index(mounted.layer) + 1 :]:
        if layer.in_features == target.out_features:
            with torch.no_grad():
                layer.weight.copy_(layer.weight[:, :1].expand_as(layer.weight))
            return
    raise CannotMount(f"{mounted.layer} (Linear): no linear layer follows whose weights could be made equal.")


def read_differences(weight: Float[Tensor, "n m"], bias: Float[Tensor, " n"]) -> Candidates:
    """Read the differences of neighbouring rows, and the rows themselves."""
    return read_rows(torch.cat([weight[:-1] - weight[1:], weight]), torch.cat([bias[:-1] - bias[1:], bias]))
