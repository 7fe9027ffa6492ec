"""A guard around a training step: what leaves about each sample is bounded, or rows that give samples away are changed.

    guard = LeakGuard(model, policy="budget", bits=72)
    with guard:
        loss = criterion(model(x), y)
        loss.backward()
    print(guard.report)          # the gradients are already protected
    optimiser.step()

It fails closed: where it cannot look (no pass was seen, gradients are not finite), it clears the gradients and raises.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Unpack

import torch
from torch import Tensor, nn

from qbi.defences.aggp import AGGP
from qbi.defences.budget.account import Account
from qbi.defences.budget.clipping import Clipping
from qbi.defences.budget.goal import Budget, Goal, refuse_goal
from qbi.defences.budget.ledger import Ledger
from qbi.defences.calls import LeakRefused
from qbi.defences.policy import PolicyName, decide, policy_named
from qbi.errors import BadValue
from qbi.exposure import Leak, Watch, vulnerable_layers
from qbi.exposure.watching import watchable
from qbi.federation.exposed import ClientStep
from qbi.finite import is_finite
from qbi.randomness import SystemEntropy, generator
from qbi.records import Update

log = logging.getLogger("qbi.guard")


@dataclass(frozen=True)
class GuardReport:
    """What one step would have given away, layer by layer, and what was done about it."""

    leaks: tuple[Leak, ...]
    policy: PolicyName
    rows_changed: int
    by_differences: int = 0
    """Samples that the difference of two rows would have given away."""
    readable: tuple[int, ...] = ()
    """In each layer, from a row or a difference of two."""
    bound: str = ""
    """What the budget policy promises of the step, and what was spent."""

    @property
    def samples(self) -> list[int]:
        """Positions in the batch of the samples that single rows give away; empty where layers see unlike numbers of them."""
        if len({len(leak.samples) for leak in self.leaks}) != 1:
            return []
        return torch.stack([leak.samples for leak in self.leaks]).any(0).nonzero()[:, 0].tolist()

    def __str__(self) -> str:
        if self.bound:
            return self.bound
        where = ", ".join(f"{leak.layer}: {leak.count}" for leak in self.leaks if leak.count) or "none"
        more = f", {self.by_differences} from differences of rows" if self.by_differences else ""
        count = max((leak.count for leak in self.leaks), default=0)
        count = max(count, len(self.samples))
        return f"{count} samples alone in a row ({where}{more}); policy {self.policy} (heuristic), {self.rows_changed} rows changed"


class LeakGuard:
    """Watches a model during forward and backward passes and protects its gradients.

    Args:
        model: what is trained.
        policy: `budget`, the recommended one, clips each sample's gradient over all trainable weights and adds noise to their sum: it
            bounds what any server can read. The others are heuristic, measured against known servers; others get around them:
            `report` counts only; `noise` hides every row behind noise of three times its size; `auto` does so in the
            layers and steps in which a row or a difference of two gives somebody away; `aggp` prunes rows as the paper
            does; `drop` zeroes every row, weight and bias, in which fewer than `fewest` samples stand; `skip` clears all
            gradients of a leaking step; `refuse` raises on one.
        layers: for heuristic policies, the layers to watch; all linear layers with a bias that are trained, if not given.
        settings: of AGGP.
        fewest: of `drop`.
        seed: for tests only: noise that can be repeated can be subtracted. Without it, it comes from the operating system.
        samples, ledger, data, limit: how `budget` counts participations, see `Account`.
        goal: of `budget`, see `Budget.for_goal`: bits, max_psnr, max_reconstruction or epsilon.

    Several backward passes inside one `with` block are one step for heuristic policies; for `budget`, say `accumulate=`. Scaled losses
    are fine.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> guard = LeakGuard(model, policy="budget", bits=72)
    >>> with guard:
    ...     nn.functional.cross_entropy(model(torch.rand(3, 6)), torch.tensor([0, 1, 1])).backward()
    >>> guard.report.policy
    'budget'
    """

    def __init__(
        self,
        model: nn.Module,
        policy: PolicyName = "report",
        *,
        layers: Sequence[str] | None = None,
        settings: AGGP | None = None,
        fewest: int = 16,
        seed: int | None = None,
        samples: int | None = None,
        ledger: Ledger | None = None,
        data: str = "data",
        limit: float | None = None,
        **goal: Unpack[Goal],
    ) -> None:
        self.model = model
        self.draws = SystemEntropy() if seed is None else generator(seed, "guard")
        self.report: GuardReport | None = None
        self.watch = Watch()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._clipping: Clipping | None = None
        if policy == "budget":
            self.budget = Budget.for_goal(**goal)
            self.account = Account(self.budget, samples, ledger, data, limit)
            self._clipping = Clipping.of(self.budget, self.draws, self.account, model)
            return
        refuse_goal(policy, goal)
        self.policy = policy_named(policy, "LeakGuard", settings=settings, fewest=fewest)
        self.names = tuple(layers) if layers is not None else tuple(vulnerable_layers(model))
        if not self.names:
            raise BadValue("LeakGuard: the model has no linear layer with a bias; there is nothing to watch.")
        for name in self.names:
            self._layer(name)

    def __enter__(self) -> "LeakGuard":
        self.watch.clear()
        self.report = None
        if self._clipping is not None:
            self._clipping.passes.clear()
            self._clipping.seeing.__enter__()
            return self
        for name in self.names:

            def catch(_m: nn.Module, arrived: tuple[torch.Tensor, ...], out: torch.Tensor, name: str = name) -> None:
                self.watch.catch(name, arrived[0], out)

            self._hooks.append(self._layer(name).register_forward_hook(catch))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._clipping is not None:
            self._clipping.seeing.__exit__()
        if kind is None:
            self.check()

    def check(self) -> GuardReport:
        """Count what the gradients now in place give away, apply the policy, and say what was done."""
        if self._clipping is not None:
            return self._bounded(self._clipping)
        try:
            exposures = [self.watch.exposure(name) for name in self.names]
        except BadValue as problem:
            self._clear()
            raise LeakRefused(f"LeakGuard: it could not look. {problem} The gradients were cleared.") from problem
        if not all(p.grad is None or is_finite(p.grad) for p in self.model.parameters()):
            self._clear()
            raise LeakRefused("LeakGuard: gradients have NaN or infinite values; they were cleared.")
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        # What is watched got gradients: the exposure was seen to arise.
        step = ClientStep(Update(gradients, {}, 0, float("nan")), tuple(exposures))
        decision = decide(self.policy, step, self.draws)
        self.report = GuardReport(
            decision.leaks, self.policy.name, decision.rows_changed, decision.by_differences, decision.readable
        )
        log.info("%s", self.report)
        if decision.act == "send":
            _replace(self.model, decision.gradients)
        else:
            self._clear()
        if decision.act == "refuse":
            raise LeakRefused(f"LeakGuard: {self.report}. The gradients were cleared.")
        return self.report

    def _bounded(self, clipping: Clipping) -> GuardReport:
        """Every gradient must be one the guard made."""
        if not clipping.passes or not all(clipping.is_placed(p) for p in self.model.parameters()):
            self._clear()
            raise LeakRefused(
                "LeakGuard: no backward pass was seen, or a weight got a gradient that was not seen to arise. The gradients were cleared."
            )
        self.report = GuardReport((), "budget", 0, bound=f"{self.budget.meaning(1)}; {self.account}")
        log.info("%s", self.report)
        return self.report

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _layer(self, name: str) -> nn.Linear:
        layer = self.model.get_submodule(name)
        if not isinstance(layer, nn.Linear) or not watchable(layer):
            raise BadValue(f"LeakGuard: {name} is not a linear layer with a bias; it cannot be watched.")
        return layer


def _replace(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Put protected gradients in the place of those that stand there."""
    for name, parameter in model.named_parameters():
        if name in gradients and parameter.grad is not gradients[name]:
            parameter.grad = gradients[name].to(parameter.dtype)
