"""The learning rate first: clipping fixes a gradient's length, so rates that suit plain training are five to ten times too small."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from qbi.errors import BadValue
from qbi.private.goal import Goal
from qbi.private.samples import Loss
from qbi.private.step import Private

RATES = (0.01, 0.03, 0.1, 0.2, 0.3, 1.0)


@dataclass(frozen=True)
class RateSearch:
    """What each rate came to on data that is not private."""

    losses: dict[float, float]
    """Mean loss on what was held out, by rate; infinite where training failed."""

    @property
    def best(self) -> float:
        """The rate with the least loss."""
        return min(self.losses, key=lambda rate: self.losses[rate])


def find_rate(
    model: nn.Module,
    loss: Loss,
    public: tuple[Tensor, Tensor],
    *,
    batch_size: int,
    epochs: int = 3,
    rates: Sequence[float] = RATES,
    make_optimiser: Callable[[Any, float], torch.optim.Optimizer] | None = None,
    seed: int = 0,
    **goal: Unpack[Goal],
) -> RateSearch:
    """Train copies of a model with the private step on *public or synthetic* data, once for each rate; a fifth is held out.

    The choice then depends on no private sample and costs nothing. The optimiser is SGD with momentum 0.9 if none is given.

    >>> x, y = torch.rand(20, 4), torch.arange(20) % 2
    >>> find_rate(nn.Linear(4, 2), nn.functional.cross_entropy, (x, y), batch_size=4, epochs=1, rates=(0.1,)).best
    0.1
    """
    x, y = public
    if len(x) != len(y) or len(x) < 10 or not rates:
        raise BadValue(
            f"find_rate: {len(x)} inputs, {len(y)} targets, {len(rates)} rates; at least 10 samples and one rate are needed."
        )
    make = make_optimiser or (lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, rest = order[: len(x) // 5], order[len(x) // 5 :]
    losses = {}
    for rate in rates:
        own = copy.deepcopy(model)
        private = Private(own, loss, total=float("inf"), **goal)
        optimiser = make(own.parameters(), rate)
        for some, targets in private.batches((x[rest], y[rest]), batch_size, epochs=epochs):
            private.step(optimiser, some, targets)
        own.eval()
        with torch.no_grad():
            value = float(loss(own(x[held]), y[held]))
        losses[float(rate)] = value if value == value else float("inf")
    return RateSearch(losses)
