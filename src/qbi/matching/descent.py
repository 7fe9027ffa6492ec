"""Adam on signed gradients, from noise to images, several times over; the start that ends nearest is kept."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from qbi.cuda_graphs import TRIALS, replaying
from qbi.errors import BadValue
from qbi.matching.distance import GradientDistance
from qbi.randomness import generator

SLOWER = (3 / 8, 5 / 8, 7 / 8)
"""Parts of the steps after each of which the rate is a tenth of what it was (Geiping et al., arXiv 2003.14053)."""

TIMED, TIMED_ON_GPU = 3, 300
"""Steps that are timed, after a first one that is not."""
RECORDED = 10
"""Steps at one rate from which on a GPU replays them as a graph."""


@dataclass(frozen=True)
class Effort:
    """How long, from how many starts, and how smooth.

    Args:
        steps: of Adam, from each start.
        restarts: how many starts.
        rate: of Adam, in the units of the normalised images.
        smooth: weight of the total variation beside the distance of gradients.

    >>> Effort(steps=600).passes
    600
    """

    steps: int = 2400
    restarts: int = 1
    rate: float = 0.1
    smooth: float = 0.01

    def __post_init__(self) -> None:
        if self.steps < 1 or self.restarts < 1 or not self.rate > 0 or not self.smooth >= 0:
            raise BadValue(
                f"gradient matching: {self.steps} steps, {self.restarts} restarts, rate {self.rate}, smoothness {self.smooth}; "
                "steps and restarts need 1 or more, the rate more than 0, the smoothness 0 or more."
            )

    @property
    def passes(self) -> int:
        """Steps from all starts together."""
        return self.steps * self.restarts


@dataclass(frozen=True)
class MatchedImages:
    """What the descent ended in."""

    images: Tensor
    """As the model takes them, in the order of the labels."""
    distance: float
    """One less the cosine between their gradient and the one that was sent."""
    distances: tuple[float, ...]
    """The same from every start."""
    seconds: float


def match_images(
    sought: GradientDistance, shape: tuple[int, ...], *, low: Tensor, high: Tensor, effort: Effort, seed: int
) -> MatchedImages:
    """Images whose gradient comes nearest to the one that was sent.

    Args:
        sought: the distance, with the model and the labels.
        shape: channels, height and width of an image.
        low, high: black and white as the model takes them, broadcast over images.
        effort: how long, from how many starts.
        seed: of the starts; same seed, same images.
    """
    started = time.perf_counter()
    ends = [_one(sought, shape, low, high, effort, effort.steps, seed, number) for number in range(effort.restarts)]
    best = min(ends, key=lambda end: end[1])
    return MatchedImages(best[0], best[1], tuple(d for _, d in ends), time.perf_counter() - started)


def seconds_needed(
    sought: GradientDistance, shape: tuple[int, ...], *, low: Tensor, high: Tensor, effort: Effort
) -> float:
    """How long it would take on this machine, from a few steps that are thrown away."""
    _one(sought, shape, low, high, effort, 1, 0, 0)
    timed = TIMED_ON_GPU if next(iter(sought.wanted.values())).is_cuda else TIMED
    started = time.perf_counter()
    _one(sought, shape, low, high, effort, timed, 0, 0)
    return (time.perf_counter() - started) / (timed + 1) * (effort.passes + effort.restarts)


def _one(
    sought: GradientDistance,
    shape: tuple[int, ...],
    low: Tensor,
    high: Tensor,
    effort: Effort,
    steps: int,
    seed: int,
    number: int,
) -> tuple[Tensor, float]:
    """From one start: the images, and their distance; infinite where it is no number."""
    place = next(iter(sought.wanted.values()))
    draws = generator(seed, "start of a match", number)
    found = torch.randn(len(sought.labels), *shape, generator=draws).to(place)
    low, high = low.to(place), high.to(place)
    found = found.clamp(low, high).requires_grad_()
    found.grad = torch.zeros_like(found)
    optimiser = torch.optim.Adam([found], lr=effort.rate, capturable=found.is_cuda)

    def step() -> None:
        value = sought(found) + effort.smooth * roughness(found)
        (slope,) = torch.autograd.grad(value, found)
        assert found.grad is not None
        found.grad.copy_(slope.sign())
        optimiser.step()
        with torch.no_grad():
            found.copy_(found.clamp(low, high))

    with sought.running():
        ends = [max(1, round(steps * part)) for part in SLOWER]
        for slower, (begin, end) in enumerate(pairwise([0, *ends, steps])):
            optimiser.param_groups[0]["lr"] = effort.rate / 10**slower
            _repeat(step, end - begin, on_gpu=found.is_cuda)
        distance = float(sought(found).detach())
    return found.detach(), distance if distance == distance else float("inf")


def _repeat(step: Callable[[], None], times: int, *, on_gpu: bool) -> None:
    """Take a step so many times; the first ones of a recording count."""
    if on_gpu and times >= RECORDED:
        step, times = replaying(step), times - TRIALS
    for _ in range(times):
        step()


def roughness(images: Tensor) -> Tensor:
    """The total variation: mean size of the differences between neighbours, downwards and sideways."""
    parts = [images.diff(dim=dim).abs().mean() for dim in (-2, -1) if images.shape[dim] > 1]
    return torch.stack(parts).sum() if parts else images.new_zeros(())
