"""What a firing pattern tells: which neurons are active, which isolate a sample, which samples are lost.

The pattern is a matrix of booleans, one row a neuron, one column a sample, possibly with leading dimensions
for independent layers. Every route to A, P, R (real forward passes, Gram-space draws, theory's checks) ends here.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Isolation:
    """How many samples each neuron fires for, and which one it is where there is exactly one."""

    counts: Int[Tensor, "*layers n"]
    isolates: Bool[Tensor, "*layers n"]
    sample: Int[Tensor, "*layers n"]


def isolation(fired: Bool[Tensor, "*layers n b"]) -> Isolation:
    """Find the neurons that fire for exactly one sample, and that sample (0 where there is none)."""
    counts = fired.sum(-1)
    isolates = counts == 1
    sample = fired.to(torch.uint8).argmax(-1) * isolates
    return Isolation(counts=counts, isolates=isolates, sample=sample)


def isolated_samples(fired: Bool[Tensor, "*layers n b"]) -> Bool[Tensor, "*layers b"]:
    """Which samples stand alone in at least one neuron: those a server reads exactly."""
    return (fired & (fired.sum(-1, keepdim=True) == 1)).any(-2)
