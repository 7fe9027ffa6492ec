"""One class for all: the last layer is sure of one class whatever comes, so that each other row holds the samples of its own label.

With a cross-entropy, what comes back to row c is p_c − [y = c]. A server that sends a last layer of zeros with one large bias makes p
the same for all samples, nearly one for the first class and nearly zero for the others: row c is then the sum of the samples with
label c, and a label that stands in the batch once gives its sample away. No activation is needed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from qbi.attacks.base import Attack
from qbi.records import CraftedRows

SURE = 30.0
"""Distance of the first class's output from the others, before the layer's rows are scaled: e⁻³⁰ is below every rounding."""


@dataclass(frozen=True)
class OneClass(Attack):
    """For a layer whose outputs are the model's.

    >>> from qbi.randomness import generator
    >>> OneClass().rows(3, 4, generator(0)).bias.argmax().item()
    0
    """

    key: ClassVar[str] = "one-class"
    name: ClassVar[str] = "one class for all"
    action: ClassVar[str] = "sends a last layer that is sure of one class"
    heads: ClassVar[bool] = True

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Zeros, and a bias that decides."""
        weight = torch.zeros(neurons, features, device=generator.device)
        bias = torch.full((neurons,), -SURE * features**0.5, device=generator.device)
        if neurons > 1:
            bias[0] = 0.0  # one output says yes or no: sure of no
        return CraftedRows(weight, bias)
