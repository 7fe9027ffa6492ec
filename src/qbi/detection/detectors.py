"""Detectors that look at parameters only, by name; one of one's own is added with `DETECTORS[key] = Detector(...)`.

 All are blind to the scale of a row: scaling weights and bias hides nothing.

- *Bias score* b/‖w‖: a QBI or PAIRS row has Φ⁻¹(1/B)·√M/‖w‖ ≈ Φ⁻¹(1/B); training keeps it near zero (erratum 17).
- *Mirrored halves*: the sorted positive entries of a trap-weights row are its sorted negative ones, times one number.
- *Parallel rows*: imprint measures the same thing in every row.
- *Identity kernels*: a convolution filter whose weight sits in one tap carries its input (transmit-SNR infinite).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

FEWEST_INPUTS = 16
"""Linear layers with fewer inputs are not judged: chance alone makes their rows parallel, and b/‖w‖ as large as 1.7/√M."""

BLOCK = 2**24
"""Cosines held at a time."""


Score = Callable[[Tensor, Tensor | None], Tensor | None]
"""From weights (rows first) and a bias to one number a row; None where there is nothing to judge."""


@dataclass(frozen=True)
class Detector:
    """One sign of a crafted layer.

    Args:
        key: how reports call it.
        bound: suspicion above which a row is reported; how bounds were chosen is told in `docs/detection.md`.
        score: of each row.
        suspicion: the score on a scale on which more is more suspicious.
        looks_at: rows of linear layers, or kernels of convolutions.
        low: whether small scores are the suspicious ones.
    """

    key: str
    bound: float
    score: Score
    suspicion: Callable[[Tensor], Tensor]
    looks_at: Literal["rows", "kernels"] = "rows"
    low: bool = False

    def strongest(self, scores: Tensor) -> float:
        """The score that a report names."""
        return float(scores.min() if self.low else scores.clamp_max(1e30).max())


def bias_scores(weight: Float[Tensor, "n m"], bias: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """b/‖w‖ of each row; zero for rows without weights."""
    norms = weight.norm(dim=1)
    return torch.where(norms > 0, bias / norms.clamp_min(1e-30), 0.0)


def mirror_scores(weight: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    """How far the sorted positive half is from a multiple of the sorted negative half; 0 for trap weights."""
    below, above = (weight < 0).sum(1), (weight > 0).sum(1)
    scores = weight.new_ones(len(weight))
    # Sorting is what costs: only rows with as many entries on either side can be mirrored at all.
    rows = (((below - above).abs() <= 1) & (below > 1)).nonzero()[:, 0]
    if len(rows) == 0:
        return scores
    ordered = weight[rows].sort(1).values
    half = weight.shape[1] // 2
    # Both halves by ascending magnitude, zeros first; an odd row's middle entry stands in neither.
    n, p = -ordered[:, :half].flip(1), ordered[:, -half:]
    ratio = (n * p).sum(1) / n.square().sum(1).clamp_min(1e-30)
    scores[rows] = (p - ratio[:, None] * n).norm(dim=1) / p.norm(dim=1).clamp_min(1e-30)
    return scores


def parallel_scores(weight: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    """The largest cosine of each row with another; constant features of a row count like any other."""
    unit = weight / weight.norm(dim=1, keepdim=True).clamp_min(1e-30)
    found = weight.new_zeros(len(weight))
    # A block of rows at a time: nothing of size rows² is ever held.
    for block in torch.arange(len(weight)).split(max(1, BLOCK // len(weight))):
        cosines: Tensor = (unit[block] @ unit.T).abs()
        cosines[torch.arange(len(block)), block] = 0
        found[block] = cosines.amax(1)
    return found


def transmit_scores(weight: Float[Tensor, "o ..."]) -> Float[Tensor, " o"]:
    """Largest tap over all the others together; infinite for an identity kernel."""
    taps = weight.flatten(1).abs()
    if taps.shape[1] == 1:
        return torch.zeros(len(taps))
    largest = taps.amax(1)
    rest = taps.sum(1) - largest
    return torch.where(largest > 0, largest / rest.clamp_min(1e-30), 0.0)


def _biases(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    return bias_scores(weight, bias) if bias is not None and bias.shape == weight.shape[:1] else None


def _parallel(weight: Tensor, _bias: Tensor | None) -> Tensor | None:
    return parallel_scores(weight) if len(weight) > 1 else None


DETECTORS: dict[str, Detector] = {
    d.key: d
    for d in (
        Detector("negative bias", 1.0, _biases, lambda s: -s, low=True),
        Detector(
            "mirrored halves", 2.5, lambda w, _: mirror_scores(w), lambda s: -s.clamp_min(1e-12).log10(), low=True
        ),
        Detector("parallel rows", 3.0, _parallel, lambda s: -(1 - s).clamp_min(1e-12).log10()),
        Detector(
            "identity kernels", 2.0, lambda w, _: transmit_scores(w), lambda s: s.clamp(1e-12, 1e12).log10(), "kernels"
        ),
    )
}
