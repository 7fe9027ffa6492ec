"""What only the client knows of one layer in one step, and what follows from it: who stands alone in a row.

For a linear layer with rectified output the client sees each sample's share δ of every row's bias gradient. Row n then
holds Σ_i δ_in·x_i, and the server's quotient is the mixture of inputs with weights α_i = δ_in/Σδ. So the distance of
every row's quotient to every sample is a quadratic form in the batch's Gram matrix: what a server that divides rows gets is
known here before anything is sent. A server that combines many rows gets more (docs/strongest-server.md).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from qbi.gram import gram
from qbi.metrics.thresholds import EXACT


@dataclass(frozen=True)
class Exposure:
    """One layer in one step: the inputs that reached it, and each sample's share of each row's bias gradient."""

    layer: str
    inputs: Float[Tensor, "b m"]
    backprops: Float[Tensor, "n b"]
    above: Bool[Tensor, "n b"] | None = None
    """Which pre-activations lie above zero, where that was watched."""

    @property
    def active(self) -> Bool[Tensor, "n b"]:
        """Which samples send anything through which row."""
        return self.backprops != 0

    @property
    def counts(self) -> Int[Tensor, " n"]:
        """How many samples stand in each row."""
        return self.active.sum(1)

    @cached_property
    def leak(self) -> "Leak":
        """The samples that single rows give away exactly."""
        return count_leaks(self)

    @cached_property
    def by_differences(self) -> Bool[Tensor, " b"]:
        """The samples that the difference of two rows gives away exactly."""
        return difference_leaks(self)

    @property
    def readable(self) -> Bool[Tensor, " b"]:
        """The samples that a row or a difference of two gives away; servers that combine more rows are not counted."""
        return self.leak.samples | self.by_differences


def row_errors(exposure: Exposure) -> Float64[Tensor, "n b"]:
    """Mean squared error between each row's quotient and each sample; infinite for rows without a quotient."""
    return _mixture_errors(exposure.backprops.double(), gram(exposure.inputs), exposure.inputs.shape[1])


def _mixture_errors(backprops: Tensor, matrix: Tensor, features: int) -> Float64[Tensor, "n b"]:
    total = backprops.sum(1, keepdim=True)
    weights = backprops / total
    own = (weights @ matrix * weights).sum(1, keepdim=True)
    errors = (own - 2 * weights @ matrix + matrix.diagonal()) / features
    return torch.where((total != 0) & weights.isfinite().all(1, keepdim=True), errors.clamp_min(0), torch.inf)


@dataclass(frozen=True)
class Leak:
    """Samples a server could read from a layer, and the rows it would read them from."""

    layer: str
    samples: Bool[Tensor, " b"]
    rows: Bool[Tensor, " n"]

    @property
    def count(self) -> int:
        """The number of samples at risk."""
        return int(self.samples.sum())


MOST_WORK = 2**30
"""Products up to which every row is compared with every sample; above, each row only with the sample that weighs most in it."""
MOST_ROWS = 2**12
"""Rows up to which pairs of them are looked at."""


def count_leaks(exposure: Exposure) -> Leak:
    """The samples that single rows give away, named."""
    rows, samples = exposure.backprops.shape
    if rows * samples * samples > MOST_WORK:
        return _leaks_of_the_heaviest(exposure)
    near = row_errors(exposure) < _exact(exposure)
    return Leak(layer=exposure.layer, samples=near.any(0), rows=near.any(1))


def _leaks_of_the_heaviest(exposure: Exposure) -> Leak:
    """The same, at the cost of the gradient itself: a row gives away the sample that weighs most in it, or none but its copies."""
    rows, samples = exposure.backprops.shape
    found = torch.zeros(samples, dtype=torch.bool, device=exposure.backprops.device)
    leaking = torch.zeros(rows, dtype=torch.bool, device=exposure.backprops.device)
    most = _exact(exposure)
    for block in torch.arange(rows, device=found.device).split(max(1, MOST_WORK // (64 * exposure.inputs.shape[1]))):
        backprops = exposure.backprops[block]
        heaviest = backprops.abs().argmax(1)
        quotients = (backprops @ exposure.inputs) / backprops.sum(1, keepdim=True)
        near = (quotients - exposure.inputs[heaviest]).square().mean(1) < most
        found[heaviest[near]] = True
        leaking[block[near]] = True
    return Leak(layer=exposure.layer, samples=found, rows=leaking)


def _exact(exposure: Exposure) -> float:
    """The error below which a sample is read exactly, on the range of the inputs."""
    span = float(exposure.inputs.max() - exposure.inputs.min()) if exposure.inputs.numel() else 1.0
    return EXACT.largest_error(span)


MOST_PAIRS = 2**14
"""Pairs of rows that are looked at for differences, the closest first."""


def difference_leaks(exposure: Exposure) -> Bool[Tensor, " b"]:
    """Samples that the difference of two rows gives away: what imprint and mirrored rows live on.

    Two rows differ by one sample only where both weigh all others alike, and then the difference is no longer than the
    longer of the two. Benign rows rarely come that close, since their outgoing weights differ; only pairs that do are
    worked out. Combinations of three rows or more are not seen, and neither are pairs in layers of more than 4096 rows.
    """
    rows, samples = exposure.backprops.shape
    if rows > MOST_ROWS or rows * rows * samples > 64 * MOST_WORK:
        return torch.zeros(samples, dtype=torch.bool, device=exposure.backprops.device)
    backprops = exposure.backprops.double()
    norms = backprops.square().sum(1)
    apart = norms[:, None] + norms - 2 * backprops @ backprops.T
    longer = torch.maximum(norms[:, None], norms)
    alike = (apart <= (1 + 1e-9) * longer) & (apart > 1e-12 * longer) & (torch.minimum(norms[:, None], norms) > 0)
    first, second = alike.triu(1).nonzero(as_tuple=True)
    most = max(1, min(MOST_PAIRS, MOST_WORK // samples**2))
    if len(first) > most:
        closest = (apart / longer)[first, second].topk(most, largest=False).indices
        first, second = first[closest], second[closest]
    if len(first) == 0:
        return torch.zeros(backprops.shape[1], dtype=torch.bool, device=backprops.device)
    errors = _mixture_errors(backprops[first] - backprops[second], gram(exposure.inputs), exposure.inputs.shape[1])
    return (errors < _exact(exposure)).any(0)
