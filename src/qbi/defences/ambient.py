"""The guard for training code one does not want to touch: it watches every module, every backward pass and every optimiser.

Inside the block, whatever model is trained by whatever loop: when a backward pass ends, protected gradients stand in the place of
what torch left there. So closures, several optimisers, updates by hand and copies of gradients only ever see those. It fails closed:
an optimiser that would move a weight by a gradient the guard did not make is refused.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from qbi.defences.aggp import AGGP
from qbi.defences.budget.account import Account
from qbi.defences.budget.clipping import Clipping
from qbi.defences.budget.goal import Budget, Goal, refuse_goal
from qbi.defences.budget.ledger import Ledger
from qbi.defences.calls import LeakRefused
from qbi.defences.counting import Counting
from qbi.defences.policy import PolicyName, policy_named
from qbi.randomness import SystemEntropy, generator

log = logging.getLogger("qbi.guard")


@dataclass
class Tally:
    """What was seen over all steps of one training."""

    steps: int = 0
    """Backward passes."""
    samples: int = 0
    readable: int = 0
    """Samples that stood alone in a row or a difference of two, over all steps; heuristic policies only."""
    rows_changed: int = 0
    clipped: int = 0
    """Samples whose gradient was shortened; budget only."""
    first_readable: dict[str, int] = field(default_factory=dict)
    """By shape of the layer: how many stood alone in the first step."""
    account: Account | None = None
    unwatched: tuple[str, ...] = ()
    """Modules with weights that heuristic policies do not look at."""

    def __str__(self) -> str:
        if self.account is not None:
            return f"{self.steps} steps, {self.clipped} of {self.samples} samples clipped; {self.account}"
        said = f"{self.steps} steps, {self.readable} of {self.samples} samples alone in a row or a difference of two, {self.rows_changed} rows changed"
        return f"{said}; not looked at: {', '.join(self.unwatched)}" if self.unwatched else said


class AmbientGuard:
    """Watches every module and every optimiser inside a `with` block.

    Args:
        policy: `budget` bounds what leaves about each sample, whatever the server sent. The others are `LeakGuard`'s, heuristic: report,
            auto, noise, aggp, drop, skip, refuse.
        settings: of AGGP.
        fewest: of `drop`.
        seed: for tests only; without it, noise comes from the operating system.
        samples, ledger, data, limit: how participations are counted, see `Account`.
        goal: of `budget`, see `Budget.for_goal`: bits, max_psnr, max_reconstruction or epsilon.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with AmbientGuard("budget", bits=72) as guard:
    ...     nn.functional.cross_entropy(model(torch.rand(3, 6)), torch.tensor([0, 1, 1])).backward()
    ...     optimiser.step()
    >>> guard.tally.steps
    1
    """

    def __init__(
        self,
        policy: PolicyName = "budget",
        *,
        settings: AGGP | None = None,
        fewest: int = 16,
        seed: int | None = None,
        samples: int | None = None,
        ledger: Ledger | None = None,
        data: str = "data",
        limit: float | None = None,
        **goal: Unpack[Goal],
    ) -> None:
        draws = SystemEntropy() if seed is None else generator(seed, "guard")
        self._tally = Tally()
        self._listener: Clipping | Counting
        self.budget: Budget | None = None
        if policy == "budget":
            self.budget = Budget.for_goal(**goal)
            self._tally.account = Account(self.budget, samples, ledger, data, limit)
            self._listener = Clipping.of(self.budget, draws, self._tally.account)
        else:
            refuse_goal(policy, goal)
            self._listener = Counting(policy_named(policy, "AmbientGuard", settings=settings, fewest=fewest), draws)
        self._hooks: list[RemovableHandle] = []

    @property
    def tally(self) -> Tally:
        """What was seen so far."""
        tally, passes = self._tally, self._listener.passes
        tally.steps, tally.samples = len(passes), sum(p.samples for p in passes)
        if isinstance(self._listener, Clipping):
            tally.clipped = sum(p.clipped for p in self._listener.passes)
            return tally
        tally.readable = sum(p.readable for p in self._listener.passes)
        tally.rows_changed = sum(p.rows_changed for p in self._listener.passes)
        tally.unwatched = tuple(sorted(self._listener.unwatched))
        tally.first_readable = dict(self._listener.passes[0].layers) if passes else {}
        return tally

    def __enter__(self) -> "AmbientGuard":
        self._listener.seeing.__enter__()
        self._hooks = [register_optimizer_step_pre_hook(self._before_step)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._listener.seeing.__exit__(kind, value, trace)

    def made(self) -> list[Tensor]:
        """The parameters whose gradients were protected here, as they stand now."""
        return list(self._listener.parameters.values())

    def _before_step(self, optimiser: torch.optim.Optimizer, _args: Any, _options: Mapping[str, Any]) -> None:
        parameters = [p for group in optimiser.param_groups for p in group["params"]]
        if isinstance(self._listener, Clipping) and isinstance(optimiser, torch.optim.LBFGS):
            _clear(parameters)
            raise LeakRefused("AmbientGuard: LBFGS steers by the loss, which is not protected; use SGD or Adam.")
        if torch._C._current_graph_task_id() != -1:
            _clear(parameters)
            raise LeakRefused(
                "AmbientGuard: an optimiser steps inside a backward pass, before it can be protected as a whole."
            )
        if not all(self._listener.is_placed(p) for p in parameters):
            _clear(parameters)
            raise LeakRefused(
                "AmbientGuard: a weight got a gradient that was not seen to arise. The gradients were cleared."
            )


def _clear(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
