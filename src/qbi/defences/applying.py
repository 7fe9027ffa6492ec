"""Heuristic defences in a training loop: one call computes a batch's gradients and puts protected ones in their place.

    report = defended_step(model, x, y, policy="aggp")
    optimiser.step()

Measured against known servers; others get around them. What bounds every server is `qbi.Private`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbi.defences.aggp import AGGP
from qbi.defences.policy import decide, policy_named
from qbi.errors import BadValue, QbiError
from qbi.exposure import Leak, vulnerable_layers
from qbi.federation.client import Loss, default_loss
from qbi.federation.exposed import exposed_step
from qbi.finite import is_finite
from qbi.randomness import Draws, SystemEntropy, random_integer

log = logging.getLogger("qbi.defences")


class LeakRefused(QbiError):
    """A step that would give samples away, or that could not be looked at; its gradients were cleared.

    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> try:
    ...     defended_step(model, torch.ones(1, 4), torch.tensor([0]), policy="refuse")
    ... except LeakRefused:
    ...     print("refused")
    refused
    """


@dataclass(frozen=True)
class DefenceReport:
    """What one step would have given away, layer by layer, and what was done about it."""

    leaks: tuple[Leak, ...]
    policy: str
    rows_changed: int
    by_differences: int
    """Samples that the difference of two rows would have given away."""
    readable: tuple[int, ...]
    """In each layer, from a row or a difference of two."""
    loss: float

    @property
    def samples(self) -> list[int]:
        """Positions in the batch of the samples that single rows give away; empty where layers see unlike numbers of them."""
        if len({len(leak.samples) for leak in self.leaks}) != 1:
            return []
        return torch.stack([leak.samples for leak in self.leaks]).any(0).nonzero()[:, 0].tolist()

    def __str__(self) -> str:
        where = ", ".join(f"{leak.layer}: {leak.count}" for leak in self.leaks if leak.count) or "none"
        more = f", {self.by_differences} from differences of rows" if self.by_differences else ""
        count = max(max((leak.count for leak in self.leaks), default=0), len(self.samples))
        return f"{count} samples alone in a row ({where}{more}); policy {self.policy} (heuristic), {self.rows_changed} rows changed"


def defended_step(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    targets: Tensor,
    policy: str = "auto",
    *,
    loss: Loss = default_loss,
    layers: Sequence[str] | None = None,
    settings: AGGP | None = None,
    fewest: int = 16,
    draws: Draws | None = None,
) -> DefenceReport:
    """Gradients of a batch, protected by a heuristic policy, in the place of all gradients of the model; the optimiser steps next.

    Args:
        model: what is trained; its buffers (BatchNorm's statistics) move as in plain training, and are not protected.
        inputs, targets, loss: one batch, and the loss that joins its samples.
        policy: `report` counts only; `noise` hides every row behind noise of three times its size; `auto` does so in the layers in
            which a row or a difference of two gives somebody away; `aggp` prunes rows as the paper does; `drop` zeroes every row in
            which fewer than `fewest` samples stand; `skip` clears all gradients of a leaking step; `refuse` raises on one.
        layers: which to look at; all linear layers with a bias that are trained, if not given.
        settings: of AGGP.
        draws: for tests: noise that can be repeated can be subtracted. Without it, it comes from the operating system.

    Whatever goes wrong, no raw gradient stays.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> defended_step(model, torch.rand(3, 6), torch.tensor([0, 1, 1]), "report").policy
    'report'
    """
    for parameter in model.parameters():
        parameter.grad = None
    chosen = policy_named(policy, "defended_step", settings=settings, fewest=fewest)
    possible = vulnerable_layers(model)
    names = tuple(layers) if layers is not None else tuple(possible)
    for name in names:
        if name not in possible:
            raise BadValue(f"defended_step: {name} is not a linear layer with a bias that is trained.")
    if not names:
        raise BadValue("defended_step: the model has no linear layer with a bias; there is nothing to look at.")
    own = SystemEntropy() if draws is None else draws
    seed = random_integer(own) % 2**31
    step = exposed_step(model, inputs, targets, loss=loss, layers=names, seed=seed, as_it_is=True)
    if not all(is_finite(g) for g in step.update.gradients.values()):
        raise LeakRefused("defended_step: gradients have NaN or infinite values; none were kept.")
    found = decide(chosen, step, own)
    report = DefenceReport(
        found.leaks, chosen.name, found.rows_changed, found.by_differences, found.readable, step.update.loss
    )
    log.info("%s", report)
    if found.act == "refuse":
        raise LeakRefused(f"defended_step: {report}. No gradients were kept.")
    with torch.no_grad():
        for name, value in step.update.buffers.items():
            model.get_buffer(name).copy_(value)
        if found.act == "send":
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and name in found.gradients:
                    parameter.grad = found.gradients[name].to(parameter.dtype)
    return report
