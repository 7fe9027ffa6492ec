"""Runs every detector on a model's parameters, before any data are touched."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qbi.detection.detectors import DETECTORS, FEWEST_INPUTS, Detector
from qbi.linear_maps import linear_rows

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
        for detector, scores in found:
            suspicious = detector.suspicion(scores) > detector.bound
            if int(suspicious.sum()) >= _fewest(len(scores)):
                rows = tuple(suspicious.nonzero()[:, 0].tolist())
                signs.append(Sign(layer, detector.key, rows, len(scores), detector.strongest(scores)))
    return signs


def model_suspicion(state: Mapping[str, Tensor]) -> dict[str, float]:
    """How suspicious a model is to each detector: the suspicion that as many rows reach as a report needs.

    A detector reports the model where this exceeds its bound.
    """
    worst = dict.fromkeys(DETECTORS, -torch.inf)
    for _, found in _scores(state):
        for detector, scores in found:
            reached = detector.suspicion(scores).topk(_fewest(len(scores))).values[-1]
            worst[detector.key] = max(worst[detector.key], float(reached))
    return worst


def _scores(state: Mapping[str, Tensor]) -> Iterator[tuple[str, list[tuple[Detector, Tensor]]]]:
    for layer, rows, bias in linear_rows(state):
        # Rows of size one: squares of very large or very small weights leave float32.
        size = rows.abs().amax(1).clamp_min(torch.finfo(rows.dtype).tiny)
        scaled = (rows / size[:, None]).float(), None if bias is None else _scaled(bias, size)
        yield layer, _judged("rows", *scaled) if rows.shape[1] >= FEWEST_INPUTS else []
    for name, weight in state.items():
        if name.endswith("weight") and weight.is_floating_point() and weight.dim() in (3, 4, 5):
            layer = name.removesuffix(".weight") if name != "weight" else "model"
            yield layer, _judged("kernels", weight.float(), None)


def _judged(what: str, weight: Tensor, bias: Tensor | None) -> list[tuple[Detector, Tensor]]:
    """Every detector that has something to say of such weights."""
    each = ((d, d.score(weight, bias)) for d in DETECTORS.values() if d.looks_at == what)
    return [(detector, scores) for detector, scores in each if scores is not None]


def _scaled(bias: Tensor, size: Tensor) -> Tensor:
    return (bias / size).float() if bias.shape == size.shape else bias.float()


def _fewest(total: int) -> int:
    return min(FEWEST_ROWS, max(1, total // 10))
