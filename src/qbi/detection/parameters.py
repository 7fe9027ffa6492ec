"""Detectors that need parameters only. All are blind to the scale of a row: scaling weights and bias hides nothing.

- *Bias score* b/‖w‖: a QBI or PAIRS row has Φ⁻¹(1/B)·√M/‖w‖ ≈ Φ⁻¹(1/B); training keeps it near zero (erratum 17).
- *Mirrored halves*: the sorted positive entries of a trap-weights row are its sorted negative ones, times one number.
- *Parallel rows*: imprint measures the same thing in every row.
- *Identity kernels*: a convolution filter whose weight sits in one tap carries its input (transmit-SNR infinite).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.linear_maps import linear_rows

BOUNDS = {"negative bias": 1.0, "mirrored halves": 2.5, "parallel rows": 3.0, "identity kernels": 2.0}
"""Suspicion above which a row is reported, by detector; how they were chosen is told in `docs/detection.md`."""

FEWEST_INPUTS = 16
"""Linear layers with fewer inputs are not judged: chance alone makes their rows parallel, and b/‖w‖ as large as 1.7/√M."""

BLOCK = 2**24
"""Cosines held at a time."""

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
    """Run every detector on every layer of a state dictionary.

    An early warning: a server that knows the detectors can keep below their bounds.

    Args:
        state: parameters by name, as `state_dict()` gives them.

    Returns:
        One sign for each detector that fired on a layer; none for most benign models.

    >>> inspect_parameters({"fc.weight": torch.randn(40, 64), "fc.bias": torch.full((40,), -20.0)})[0].detector
    'negative bias'
    """
    signs = []
    for layer, found in _scores(state):
        for detector, scores in found.items():
            suspicious = suspicion(detector, scores) > BOUNDS[detector]
            if int(suspicious.sum()) >= _fewest(len(scores)):
                rows = tuple(suspicious.nonzero()[:, 0].tolist())
                signs.append(Sign(layer, detector, rows, len(scores), _strongest(detector, scores)))
    return signs


def model_suspicion(state: Mapping[str, Tensor]) -> dict[str, float]:
    """How suspicious a model is to each detector: the suspicion that as many rows reach as a report needs.

    A detector reports the model where this exceeds its bound.
    """
    worst = dict.fromkeys(BOUNDS, -torch.inf)
    for _, found in _scores(state):
        for detector, scores in found.items():
            reached = suspicion(detector, scores).topk(_fewest(len(scores))).values[-1]
            worst[detector] = max(worst[detector], float(reached))
    return worst


def suspicion(detector: str, scores: Tensor) -> Tensor:
    """A detector's score on a scale on which more is more suspicious."""
    if detector == "negative bias":
        return -scores
    if detector == "mirrored halves":
        return -scores.clamp_min(1e-12).log10()
    if detector == "parallel rows":
        return -(1 - scores).clamp_min(1e-12).log10()
    return scores.clamp(1e-12, 1e12).log10()


def _scores(state: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for layer, rows, bias in linear_rows(state):
        # Rows of size one: squares of very large or very small weights leave float32.
        size = rows.abs().amax(1).clamp_min(torch.finfo(rows.dtype).tiny)
        yield layer, _linear_signs((rows / size[:, None]).float(), None if bias is None else _scaled(bias, size))
    for name, weight in state.items():
        if name.endswith("weight") and weight.is_floating_point() and weight.dim() in (3, 4, 5):
            layer = name.removesuffix(".weight") if name != "weight" else "model"
            yield layer, {"identity kernels": transmit_scores(weight.float())}


def _scaled(bias: Tensor, size: Tensor) -> Tensor:
    return (bias / size).float() if bias.shape == size.shape else bias.float()


def _linear_signs(weight: Float[Tensor, "n m"], bias: Tensor | None) -> dict[str, Tensor]:
    if weight.shape[1] < FEWEST_INPUTS:
        return {}
    found = {"mirrored halves": mirror_scores(weight)}
    if bias is not None and bias.shape == weight.shape[:1]:
        found["negative bias"] = bias_scores(weight, bias)
    if len(weight) > 1:
        found["parallel rows"] = parallel_scores(weight)
    return found


def _strongest(detector: str, scores: Tensor) -> float:
    low = detector in ("negative bias", "mirrored halves")
    return float(scores.min() if low else scores.clamp_max(1e30).max())


def _fewest(total: int) -> int:
    return min(FEWEST_ROWS, max(1, total // 10))


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
