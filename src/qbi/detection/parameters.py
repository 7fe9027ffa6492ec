"""Detectors that need parameters only. All are blind to the scale of a row: scaling weights and bias hides nothing.

- *Bias score* b/‖w‖: a QBI or PAIRS row has Φ⁻¹(1/B)·√M/‖w‖ ≈ Φ⁻¹(1/B); training keeps it near zero (erratum 17).
- *Mirrored halves*: the sorted positive entries of a trap-weights row are its sorted negative ones, times one number.
- *Parallel rows*: imprint measures the same thing in every row.
- *Identity kernels*: a convolution filter whose weight sits in one tap carries its input (transmit-SNR infinite).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

BIAS_BOUND = -1.0
"""A score below this lets at most one standard normal direction in six pass; see `docs/detection.md`."""

MIRROR_BOUND = 1e-3
PARALLEL_BOUND = 1 - 1e-6
TRANSMIT_BOUND = 1e4
FEWEST_ROWS = 3
"""Fewer suspicious rows than this, in layers of at least ten times as many, are not reported."""


@dataclass(frozen=True)
class Sign:
    """One detector that fired on one layer: which rows, out of how many, and the strongest score."""

    layer: str
    detector: str
    rows: tuple[int, ...]
    total: int
    score: float

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.rows[:8])) + (" …" if len(self.rows) > 8 else "")
        return (
            f"{self.layer}: {self.detector} in {len(self.rows)} of {self.total} rows ({shown}), score {self.score:.3g}"
        )


def inspect_parameters(state: Mapping[str, Tensor]) -> list[Sign]:
    """Run every detector on every layer of a state dictionary."""
    signs = []
    for name, weight in state.items():
        if not name.endswith("weight") or not weight.is_floating_point():
            continue
        layer = name.removesuffix(".weight") if name != "weight" else ""
        bias = state.get(f"{layer}.bias" if layer else "bias")
        if weight.dim() == 2:
            found = _linear_signs(weight.float(), None if bias is None else bias.float())
        elif weight.dim() in (3, 4, 5):
            found = {"identity kernels": transmit_scores(weight.float())}
        else:
            continue
        for detector, (suspicious, scores) in _judged(found).items():
            if _enough(suspicious):
                rows = tuple(suspicious.nonzero()[:, 0].tolist())
                signs.append(Sign(layer or "model", detector, rows, len(weight), _strongest(detector, scores)))
    return signs


def _linear_signs(weight: Float[Tensor, "n m"], bias: Tensor | None) -> dict[str, Tensor]:
    found = {}
    if bias is not None and bias.shape == weight.shape[:1]:
        found["negative bias"] = bias_scores(weight, bias)
    if weight.shape[1] >= 4:
        found["mirrored halves"] = mirror_scores(weight)
    if len(weight) > 1:
        found["parallel rows"] = parallel_scores(weight)
    return found


def _judged(found: dict[str, Tensor]) -> dict[str, tuple[Bool[Tensor, " n"], Tensor]]:
    rules = {
        "negative bias": lambda s: s < BIAS_BOUND,
        "mirrored halves": lambda s: s < MIRROR_BOUND,
        "parallel rows": lambda s: s > PARALLEL_BOUND,
        "identity kernels": lambda s: s > TRANSMIT_BOUND,
    }
    return {name: (rules[name](scores), scores) for name, scores in found.items()}


def _strongest(detector: str, scores: Tensor) -> float:
    low = detector in ("negative bias", "mirrored halves")
    return float(scores.min() if low else scores.clamp_max(1e30).max())


def _enough(suspicious: Bool[Tensor, " n"]) -> bool:
    count, total = int(suspicious.sum()), len(suspicious)
    return count >= min(FEWEST_ROWS, max(1, total // 10))


def bias_scores(weight: Float[Tensor, "n m"], bias: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """b/‖w‖ of each row; zero for rows without weights."""
    norms = weight.norm(dim=1)
    return torch.where(norms > 0, bias / norms.clamp_min(1e-30), 0.0)


def mirror_scores(weight: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    """How far the sorted positive half is from a multiple of the sorted negative half; 0 for trap weights."""
    ordered = weight.sort(1).values
    half = weight.shape[1] // 2
    # Both halves by ascending magnitude; an odd row's middle entry stands in neither.
    n, p = -ordered[:, :half].flip(1), ordered[:, -half:]
    ratio = (n * p).sum(1) / n.square().sum(1).clamp_min(1e-30)
    away = (p - ratio[:, None] * n).norm(dim=1) / p.norm(dim=1).clamp_min(1e-30)
    return torch.where((ordered[:, half - 1] < 0) & (ordered[:, -half] > 0), away, 1.0)


def parallel_scores(weight: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    """The largest cosine of each row with another; constant features of a row count like any other."""
    unit = weight / weight.norm(dim=1, keepdim=True).clamp_min(1e-30)
    cosines: Tensor = (unit @ unit.T).abs()
    cosines.fill_diagonal_(0)
    return cosines.amax(1)


def transmit_scores(weight: Float[Tensor, "o ..."]) -> Float[Tensor, " o"]:
    """Largest tap over all the others together; infinite for an identity kernel."""
    taps = weight.flatten(1).abs()
    if taps.shape[1] == 1:
        return torch.zeros(len(taps))
    largest = taps.amax(1)
    rest = taps.sum(1) - largest
    return torch.where(largest > 0, largest / rest.clamp_min(1e-30), 0.0)
